"""Devices: memory, bandwidth and dense bf16 FLOPs from the vendors' public data sheets.

Peaks are the sheets' dense figures (half of those quoted "with sparsity"); what of a peak a kernel
reaches is a parameter of the cost model, not of the device. Memory is the sheet's figure in GiB, as
drivers report it (H200: 141 on the sheet, 140.4 GiB in nvidia-smi).
"""

from __future__ import annotations

from dataclasses import dataclass

from vattn.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One device. Bytes, bytes per second, FLOPs per second."""

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    """Dense bf16 with float32 accumulation."""
    link_bandwidth: float
    """To its peers, one direction: NVLink, Infinity Fabric or PCIe."""
    page_bytes: int = 2 << 20
    """Granularity of its virtual memory."""


def _gpu(name: str, gib: float, gbps: float, tflops: float, link_gbps: float) -> Gpu:
    return Gpu(name, int(gib * (1 << 30)), gbps * 1e9, tflops * 1e12, link_gbps * 1e9)


GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        _gpu("a100-40", 40, 1555, 312, 300),  # SXM4 40 GB
        _gpu("a100-80", 80, 2039, 312, 300),  # SXM4 80 GB
        _gpu("h100", 80, 3350, 989, 450),  # SXM5
        _gpu("h200", 141, 4800, 989, 450),  # SXM5
        _gpu("b200", 180, 8000, 2250, 900),  # HGX
        _gpu("l4", 24, 300, 121, 32),  # PCIe 4.0 x16
        _gpu("l40s", 48, 864, 362, 32),
        _gpu("rtx-4090", 24, 1008, 165.2, 32),  # bf16 with fp32 accumulation
        _gpu("mi300x", 192, 5300, 1307, 448),  # seven links of 64 GB/s each way
    )
}


def find_gpu(name: str) -> Gpu:
    """A device of the table. Raises ConfigError, which lists them."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    gpu = GPUS.get({"a100": "a100-80", "4090": "rtx-4090", "rtx4090": "rtx-4090"}.get(key, key))
    if gpu is None:
        raise ConfigError(f"gpu {name!r} is not in the table: use one of {', '.join(GPUS)}")
    return gpu
