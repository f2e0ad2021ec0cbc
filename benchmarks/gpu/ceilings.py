"""What the device can do at most, measured: the two figures every other one is a share of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import CudaClock, HostClock, take_turns

COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Best sustained rates of this device, as measured."""

    copy_bytes_per_s: float
    """Device-to-device copy; bytes read plus bytes written."""
    matmul_flop_per_s: float
    """Square matrix product of random bfloat16 numbers."""
    copy_bytes: int
    matmul_size: int


def measure(device: torch.device) -> Ceilings:
    """Median of several runs each; on a CPU tiny ones, to prove the code."""
    on_gpu = device.type == "cuda"
    clock = CudaClock() if on_gpu else HostClock()
    copied = COPY_BYTES if on_gpu else 1 << 16
    source = torch.empty(copied // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    copy = clock.prepare(lambda i: target.copy_(source))
    size = MATMUL_SIZE if on_gpu else 32
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    c = torch.empty_like(a)
    product = clock.prepare(lambda i: torch.mm(a, b, out=c))
    timings = take_turns({"copy": copy, "matmul": product})
    return Ceilings(
        copy_bytes_per_s=2 * copied / timings["copy"].median_us * 1e6,
        matmul_flop_per_s=2 * size**3 / timings["matmul"].median_us * 1e6,
        copy_bytes=copied,
        matmul_size=size,
    )
