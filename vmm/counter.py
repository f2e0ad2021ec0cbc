"""Count driver calls by kind and measure how long they take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .driver import Access, Driver, MappedRange


BUCKETS = 40
"""Number of entries in a histogram. The last one counts every call of 2^38 ns (275 s) or more."""


class CallCounter:
    """A `Driver` that passes every call on and counts those that reach the system.

    `counts`, `seconds` and `histograms` are by kind ("reserve", "free", "create", "release", "map",
    "set_access", "unmap"), failed calls included. Entry b of a histogram counts the calls that took
    2^(b-1) to 2^b nanoseconds. Thread-safe.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.counts: dict[str, int] = dict.fromkeys(
            ("reserve", "free", "create", "release", "map", "set_access", "unmap"), 0
        )
        self.seconds: dict[str, float] = dict.fromkeys(self.counts, 0.0)
        self.histograms: dict[str, list[int]] = {kind: [0] * BUCKETS for kind in self.counts}
        # Reentrant: the collector may run a finaliser, which calls the driver, while this thread counts.
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        """Name of the driver behind."""
        return self.driver.name

    @property
    def device(self) -> torch.device:
        """Device of the driver behind."""
        return self.driver.device

    @property
    def granularity(self) -> int:
        """Granularity of the driver behind, in bytes."""
        return self.driver.granularity

    @property
    def total(self) -> int:
        """Calls of all kinds."""
        return sum(self.counts.values())

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            for kind in self.counts:
                self.counts[kind] = 0
                self.seconds[kind] = 0.0
                self.histograms[kind] = [0] * BUCKETS

    def reserve(self, size: int, align: int = 0) -> int:
        """Counted; see `Driver.reserve`."""
        start = perf_counter()
        try:
            return self.driver.reserve(size, align)
        finally:
            self._count("reserve", start)

    def free(self, va: int, size: int) -> None:
        """Counted; see `Driver.free`."""
        start = perf_counter()
        try:
            self.driver.free(va, size)
        finally:
            self._count("free", start)

    def create(self, size: int, shareable: bool = False) -> int:
        """Counted; see `Driver.create`."""
        start = perf_counter()
        try:
            return self.driver.create(size, shareable)
        finally:
            self._count("create", start)

    def release(self, handle: int) -> None:
        """Counted; see `Driver.release`."""
        start = perf_counter()
        try:
            self.driver.release(handle)
        finally:
            self._count("release", start)

    def map(self, va: int, size: int, handle: int) -> None:
        """Counted; see `Driver.map`."""
        start = perf_counter()
        try:
            self.driver.map(va, size, handle)
        finally:
            self._count("map", start)

    def set_access(self, va: int, size: int, access: Access) -> None:
        """Counted; see `Driver.set_access`."""
        start = perf_counter()
        try:
            self.driver.set_access(va, size, access)
        finally:
            self._count("set_access", start)

    def unmap(self, va: int, size: int) -> None:
        """Counted; see `Driver.unmap`."""
        start = perf_counter()
        try:
            self.driver.unmap(va, size)
        finally:
            self._count("unmap", start)

    def export_handle(self, handle: int) -> int:
        """See `Driver.export_handle`."""
        return self.driver.export_handle(handle)

    def import_handle(self, fd: int, size: int) -> int:
        """See `Driver.import_handle`."""
        return self.driver.import_handle(fd, size)

    def memory_info(self) -> tuple[int, int]:
        """See `Driver.memory_info`."""
        return self.driver.memory_info()

    def tensor(
        self,
        va: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        owner: object = None,
    ) -> torch.Tensor:
        """See `Driver.tensor`."""
        return self.driver.tensor(va, shape, stride, dtype, owner)

    def mappings(self, va: int, size: int) -> list[MappedRange] | None:
        """See `Driver.mappings`."""
        return self.driver.mappings(va, size)

    def synchronize(self) -> None:
        """See `Driver.synchronize`."""
        self.driver.synchronize()

    def defer(self, clean_up: Callable[[], None]) -> None:
        """See `Driver.defer`."""
        self.driver.defer(clean_up)

    def close(self) -> None:
        """See `Driver.close`."""
        self.driver.close()

    def _count(self, kind: str, start: float) -> None:
        elapsed = perf_counter() - start
        with self._lock:
            self.counts[kind] += 1
            self.seconds[kind] += elapsed
            self.histograms[kind][min(BUCKETS - 1, int(elapsed * 1e9).bit_length())] += 1
