"""The base of drivers that use `Shadow`: rules, locking and clean-up. A subclass adds memory, if any."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .driver import DEINITIALIZED, Access, DriverError, MappedRange
from .shadow import Allocation, Shadow, invalid

_log = logging.getLogger(__name__)


class ShadowedDriver:
    """Template of a software driver.

    Each public call checks the rules, calls a `_do_*` method of the subclass, then updates the books. So a
    refused call or a failing system call changes nothing. One lock guards all of it.
    """

    name = "shadowed"

    def __init__(self, granularity: int, budget: int) -> None:
        if granularity <= 0 or granularity & (granularity - 1):
            raise ValueError(f"granularity must be a power of two, not {granularity:,}")
        if budget < 0:
            raise ValueError(f"budget must not be negative, not {budget:,} bytes")
        self.granularity = granularity
        self.shadow = Shadow(granularity, budget)
        self._mutex = threading.Lock()
        self._closed = False
        self._deferred: deque[Callable[[], None]] = deque()

    @property
    def _lock(self) -> threading.Lock:
        """What every call holds; a subclass may refuse it."""
        return self._mutex

    # Implemented by the subclass

    def _do_reserve(self, size: int, align: int) -> int:
        raise NotImplementedError

    def _do_free(self, va: int, size: int) -> None:
        pass

    def _do_create(self, allocation: Allocation, shareable: bool) -> None:
        pass

    def _do_map(self, va: int, allocation: Allocation) -> None:
        pass

    def _do_set_access(self, va: int, size: int, access: Access) -> None:
        pass

    def _do_unmap(self, va: int, size: int) -> None:
        pass

    def _do_discard(self, allocation: Allocation) -> None:
        """Give back memory that nothing holds any more. Must not raise: the books are updated already."""

    # The calls

    def reserve(self, size: int, align: int = 0) -> int:
        """See `Driver.reserve`."""
        with self._lock:
            self._require_open("reserve")
            align = self.shadow.check_reserve(size, align)
            va = self._do_reserve(size, align)
            self.shadow.add_reservation(va, size)
        self._run_deferred()
        return va

    def free(self, va: int, size: int) -> None:
        """See `Driver.free`."""
        with self._lock:
            self._require_open("free")
            self.shadow.check_free(va, size)
            self._do_free(va, size)
            self.shadow.remove_reservation(va)
        self._run_deferred()

    def create(self, size: int, shareable: bool = False) -> int:
        """See `Driver.create`."""
        with self._lock:
            self._require_open("create")
            self.shadow.check_create(size)
            allocation = self.shadow.add_allocation(size)
            try:
                self._do_create(allocation, shareable)
            except BaseException:
                self.shadow.release(allocation.handle)
                raise
        self._run_deferred()
        return allocation.handle

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        with self._lock:
            self._require_open("release")
            allocation = self.shadow.release(handle)
            if allocation is not None:
                self._do_discard(allocation)
        self._run_deferred()

    def map(self, va: int, size: int, handle: int) -> None:
        """See `Driver.map`."""
        with self._lock:
            self._require_open("map")
            reservation, allocation = self.shadow.check_map(va, size, handle)
            self._do_map(va, allocation)
            self.shadow.add_mapping(reservation, va, allocation)
        self._run_deferred()

    def set_access(self, va: int, size: int, access: Access) -> None:
        """See `Driver.set_access`."""
        with self._lock:
            self._require_open("set_access")
            if access.__class__ is not Access:
                raise invalid("set_access", f"{access!r} is not an Access")
            _, mappings = self.shadow.covering("set_access", va, size)
            self._do_set_access(va, size, access)
            for mapping in mappings:
                mapping.access = access
        self._run_deferred()

    def unmap(self, va: int, size: int) -> None:
        """See `Driver.unmap`."""
        with self._lock:
            self._require_open("unmap")
            reservation, mappings = self.shadow.covering("unmap", va, size)
            self._do_unmap(va, size)
            for allocation in self.shadow.remove_mappings(reservation, mappings):
                self._do_discard(allocation)
        self._run_deferred()

    def memory_info(self) -> tuple[int, int]:
        """(budget not in use, budget) in bytes."""
        return self.shadow.budget - self.shadow.used, self.shadow.budget

    def mappings(self, va: int, size: int) -> list[MappedRange]:
        """See `Driver.mappings`."""
        with self._lock:
            return self.shadow.mappings(va, size)

    def synchronize(self) -> None:
        """Does nothing: on a CPU no work runs asynchronously."""

    def defer(self, clean_up: Callable[[], None]) -> None:
        """See `Driver.defer`. Runs at once, or right after the call that is under way."""
        self._deferred.append(clean_up)
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._run_deferred()

    def check(self) -> None:
        """Recount the books. Raises AssertionError if they disagree."""
        with self._lock:
            self.shadow.check()

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise DriverError(call, DEINITIALIZED, hint="the driver is closed")

    def _run_deferred(self) -> None:
        while self._deferred:
            try:
                clean_up = self._deferred.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                clean_up()
            except Exception:  # it must not fail the unrelated call that it follows
                _log.exception("giving back the memory of a collected object failed")
