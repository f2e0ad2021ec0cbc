"""Host memory, under a budget, for the K and V of preempted requests.

    device   | request, as its backend lays it out |
                  | one copy out            ^ one copy in
                  v                         |
    host     | token 0 … token n: the written tokens |

On CUDA the host memory is pinned and copies run on a stream of their own; the compute stream waits for
them, the host does not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROBE_BYTES = 8 << 20


@dataclass(frozen=True)
class SwappedOut:
    """One request's K and V on the host."""

    data: torch.Tensor
    tokens: int
    """Number of written tokens."""
    salt: str | None
    """Salt under which it may be shared after it is swapped in; None to share nothing."""

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class SwapSpace:
    """Host memory for swapped requests of a device, at most `budget_bytes`."""

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self._device = device
        self._held: dict[str, SwappedOut] = {}
        import torch

        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.used_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0
        self.seconds = 0.0
        """Seconds the host spent on copies."""
        self._bandwidth: float | None = None

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.budget_bytes

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __getitem__(self, request_id: str) -> SwappedOut:
        return self._held[request_id]

    def put(self, request_id: str, source: torch.Tensor, tokens: int, salt: str | None = None) -> None:
        """Copy `source`, a device tensor with any strides, to the host. `fits` must be true."""
        assert request_id not in self._held
        started = time.perf_counter()
        out = SwappedOut(self._to_host(source), tokens, salt)
        self.seconds += time.perf_counter() - started
        self._held[request_id] = out
        self.used_bytes += out.nbytes
        self.out_bytes += out.nbytes

    def unshare(self) -> None:
        """Forbid sharing everything that is swapped out now."""
        self._held = {request_id: replace(out, salt=None) for request_id, out in self._held.items()}

    def restored(self, request_id: str, nbytes: int, seconds: float) -> None:
        """Forget a request that is back on the device. `nbytes` of it were copied from here."""
        self.in_bytes += nbytes
        self.seconds += seconds
        self.discard(request_id)

    def discard(self, request_id: str) -> None:
        """Forget a request if it is swapped out."""
        out = self._held.pop(request_id, None)
        if out is not None:
            self.used_bytes -= out.nbytes

    def on_device(self, data: torch.Tensor) -> torch.Tensor:
        """`data` on the device, so that it can be copied into the cache."""
        return data if self._stream is None else data.to(self._device, non_blocking=True)

    def _to_host(self, source: torch.Tensor) -> torch.Tensor:
        import torch

        if self._stream is None:
            return source.clone(memory_format=torch.contiguous_format)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        compute.wait_stream(self._stream)  # so that later work does not overwrite the source too early
        return host

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one copy out or in, measured at the first call."""
        if self._bandwidth is None:
            import torch

            probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self._device)
            best = 0.0
            for _ in range(3):
                started = time.perf_counter()
                self._to_host(probe)
                if self._stream is not None:
                    self._stream.synchronize()
                best = max(best, PROBE_BYTES / (time.perf_counter() - started))
            self._bandwidth = best
        return self._bandwidth

    def check(self) -> None:
        """Raise AssertionError unless the bytes add up."""
        assert self.used_bytes == sum(out.nbytes for out in self._held.values()) <= self.budget_bytes
