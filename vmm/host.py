"""The host driver: CUDA's virtual memory calls, made with `mmap` and a memfd. It uses real memory.

    memfd      | 0 | 1 | 2 | 3 | 4 | ...          physical memory: sparse, a released range becomes a hole
                 │       └────────────┐
    addresses  [ . . . . ▓ . . . . . ▓ ▓ . ]      ▓ MAP_SHARED | MAP_FIXED over a PROT_NONE reservation
                         └─ 0 ─┘ alias: the same range of the file at a second address

Memory is taken from the system when write access is granted, so mapped memory equals used memory. It is given
back when the handle is released and the last mapping is gone.

Touching an address that is not mapped, or lacks the access right, kills the process with SIGSEGV. On a GPU it
would poison the context.

Limits of the operating system: a process may hold `vm.max_map_count` mappings (65,530 by default). Pages that
are neighbours both in the address space and in the file count as one mapping, so ranges of the file are
handed out lowest first. Near the limit `map` raises `OutOfMemory`, early enough that unmapping still works:
that may have to split a mapping in two.

After `fork` a child shares the memory but must not use the driver: every call raises `WrongProcess` there,
and clean-up in the child does nothing.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import libc as sys_calls
from .driver import UNKNOWN, Access, ArgumentError, DriverError, DriverUnavailable, OutOfMemory
from .hostinfo import host_memory, max_map_count
from .owner import OwnerProcess
from .shadow import Allocation, Shadow, invalid
from .shadowed import ShadowedDriver

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
HUGE_PAGE = 2 << 20
_RESERVED = sys_calls.MAP_PRIVATE | sys_calls.MAP_ANONYMOUS | sys_calls.MAP_NORESERVE
_PROTECTION = {
    Access.NONE: sys_calls.PROT_NONE,
    Access.READ: sys_calls.PROT_READ,
    Access.READ_WRITE: sys_calls.PROT_READ_WRITE,
}
_SPARE_MAPPINGS = 4
_FILE_STEP = 1 << 30


class HostDriver(ShadowedDriver):
    """Virtual memory of the CPU.

    Args:
        granularity: smallest page in bytes, a power of two and a multiple of the system's page. From 2 MiB
            on, the driver asks for huge pages.
        budget: bytes that `create` may hand out; None for all memory that the process may use.

    Raises `DriverUnavailable` on systems other than Linux, `ValueError` for impossible sizes.
    """

    name = "host"

    def __init__(self, granularity: int = 64 << 10, budget: int | None = None) -> None:
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            raise DriverUnavailable(f"HostDriver needs Linux (memfd_create, mmap); this is {sys.platform}")
        page = os.sysconf("SC_PAGE_SIZE")
        if granularity % page:
            raise ArgumentError(
                f"granularity {granularity:,} is not a multiple of the system page, {page:,} bytes"
            )
        total = host_memory()[1]
        if budget is not None and budget > total:
            raise ValueError(f"budget of {budget:,} bytes is more than the memory of this machine, {total:,}")
        super().__init__(granularity, total if budget is None else budget)
        self._own_budget = budget is not None
        self._memory = _Memory()
        self._huge = granularity >= HUGE_PAGE
        self._finalizer = weakref.finalize(self, _close, self._memory, self.shadow)
        self._finalizer.atexit = False  # at exit threads may still compute; the kernel cleans up

    @property
    def device(self) -> torch.device:
        """The CPU."""
        import torch

        return torch.device("cpu")

    @property
    def _lock(self) -> threading.Lock:
        """Refused in a forked child, before it could wait for a lock that it may have inherited locked."""
        self._memory.owner.require()
        return self._mutex

    def defer(self, clean_up: Callable[[], None]) -> None:
        """See `Driver.defer`. A forked child has nothing to clean up."""
        if self._memory.owner.here:
            super().defer(clean_up)

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the budget if one was given, else of the system's memory."""
        free, total = super().memory_info()
        return (free if self._own_budget else min(free, host_memory()[0])), total

    def set_access(self, va: int, size: int, access: Access) -> None:
        """See `Driver.set_access`. Granting write access also takes the memory from the system."""
        super().set_access(va, size, access)
        if access is Access.READ_WRITE:
            # One call in the thread that maps, instead of a page fault per 4 KiB in the thread that computes.
            self._memory.libc.populate(va, size)  # without the lock, because it may be slow

    def export_handle(self, handle: int) -> int:
        """Descriptor of the allocation's own memfd. The memory exists while any process holds a descriptor.

        Only allocations made with `shareable=True` have a memfd of their own (one open descriptor each).
        """
        with self._lock:
            self._require_open("export_handle")
            allocation = self.shadow.allocation("export_handle", handle)
            if allocation.descriptor < 0:
                raise invalid("export_handle", f"handle {handle} was not created with shareable=True")
            return os.dup(allocation.descriptor)

    def import_handle(self, fd: int, size: int) -> int:
        """See `Driver.import_handle`. It counts against the exporter's budget, not against this driver's."""
        with self._lock:
            self._require_open("import_handle")
            try:
                actual = os.fstat(fd).st_size
                if size <= 0 or size % self.granularity or actual != size:
                    raise invalid("import_handle", f"the descriptor holds {actual:,} bytes, not {size:,}")
                descriptor = os.dup(fd)
            except OSError as error:
                raise invalid("import_handle", f"descriptor {fd}: {error.strerror}") from error
            allocation = self.shadow.add_allocation(size, charged=False)
            allocation.descriptor = descriptor
            return allocation.handle

    def tensor(
        self,
        va: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        owner: object = None,
    ) -> torch.Tensor:
        """See `Driver.tensor`."""
        from .dlpack import tensor_from_address

        return tensor_from_address(va, shape, stride, dtype, self.device, owner)

    def close(self) -> None:
        """Unmap everything and give all memory back, even if tensors still view it. Idempotent.

        Does nothing in a forked child.
        """
        if not self._memory.owner.here:
            return
        with self._lock:
            self._closed = True
            self._finalizer()

    # Implements ShadowedDriver

    def _do_reserve(self, size: int, align: int) -> int:
        # mmap aligns to the system's page only: ask for more and trim both ends.
        page = os.sysconf("SC_PAGE_SIZE")
        slack = align - page if align > page else 0
        try:
            start = self._memory.mmap(0, size + slack, sys_calls.PROT_NONE, _RESERVED)
            va = -(-start // align) * align
            if va > start:
                self._memory.munmap(start, va - start)
            if start + slack > va:
                self._memory.munmap(va + size, start + slack - va)
        except OSError as error:
            raise _driver_error("reserve", error, "too many addresses: see `ulimit -v`") from error
        return va

    def _do_free(self, va: int, size: int) -> None:
        try:
            self._memory.munmap(va, size)
        except OSError as error:
            raise _driver_error("free", error) from error

    def _do_create(self, allocation: Allocation, shareable: bool) -> None:
        try:
            if shareable:
                allocation.descriptor = os.memfd_create("vattn-shared", os.MFD_CLOEXEC)
                os.ftruncate(allocation.descriptor, allocation.size)
            else:
                allocation.offset = self._memory.take(allocation.size)
        except OSError as error:
            if allocation.descriptor >= 0:
                os.close(allocation.descriptor)
                allocation.descriptor = -1
            raise OutOfMemory("create", hint=f"{error.strerror}: see `ulimit -n` and `ulimit -f`") from error

    def _do_map(self, va: int, allocation: Allocation) -> None:
        memory = self._memory
        fd = allocation.descriptor if allocation.descriptor >= 0 else memory.fd
        try:
            memory.hold_spares()
            flags = sys_calls.MAP_SHARED | sys_calls.MAP_FIXED
            memory.libc.mmap(va, allocation.size, sys_calls.PROT_NONE, flags, fd, allocation.offset)
            if self._huge:
                memory.libc.advise_huge(va, allocation.size)
        except OSError as error:
            memory.drop_spares()
            raise _driver_error("map", error) from error

    def _do_set_access(self, va: int, size: int, access: Access) -> None:
        try:
            self._memory.libc.mprotect(va, size, _PROTECTION[access])
        except OSError as error:
            self._memory.drop_spares()
            raise _driver_error("set_access", error) from error

    def _do_unmap(self, va: int, size: int) -> None:
        # Replace the mappings by reserved addresses in one call, so that no other mmap can take them.
        try:
            self._memory.mmap(va, size, sys_calls.PROT_NONE, _RESERVED | sys_calls.MAP_FIXED)
        except OSError as error:
            raise _driver_error("unmap", error) from error

    def _do_discard(self, allocation: Allocation) -> None:
        if allocation.descriptor >= 0:
            os.close(allocation.descriptor)
            return
        try:
            self._memory.give(allocation.offset, allocation.size)
        except OSError as error:  # the range is free for reuse all the same
            _log.warning("%d bytes stay with the process: %s", allocation.size, error)


class _Memory:
    """The memfd, its free ranges, and a few spare mappings.

    The spare mappings are given up when the system has no mapping left, so that unmapping still works.
    """

    def __init__(self) -> None:
        self.libc = sys_calls.Libc()
        self.owner = OwnerProcess("HostDriver")
        self.fd = os.memfd_create("vattn", os.MFD_CLOEXEC)
        self._size = 0  # of the file
        self._end = 0  # of the ranges ever used
        self._holes: dict[int, list[int]] = {}  # range size -> heap of offsets
        self._spares = 0  # address of the spare mappings; 0 when spent

    def take(self, size: int) -> int:
        """Offset of a free range: the lowest of its size, so that neighbouring pages stay neighbours.

        Ranges are never joined or split. The file is sparse, so unused offsets cost nothing.
        """
        holes = self._holes.get(size)
        if holes:
            return heapq.heappop(holes)
        offset = self._end
        if offset + size > self._size:
            grown = -(-(offset + size) // _FILE_STEP) * _FILE_STEP
            os.ftruncate(self.fd, grown)
            self._size = grown
        self._end += size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a range and give its memory back to the system."""
        heapq.heappush(self._holes.setdefault(size, []), offset)
        self.libc.punch_hole(self.fd, offset, size)

    def mmap(self, *args: int) -> int:
        """`mmap` that gives up the spare mappings if there is no other mapping left."""
        try:
            return self.libc.mmap(*args)
        except OSError as error:
            if error.errno != errno.ENOMEM or not self.drop_spares():
                raise
            return self.libc.mmap(*args)

    def munmap(self, va: int, size: int) -> None:
        """`munmap` that gives up the spare mappings if there is no other mapping left."""
        try:
            self.libc.munmap(va, size)
        except OSError as error:
            if error.errno != errno.ENOMEM or not self.drop_spares():
                raise
            self.libc.munmap(va, size)

    def hold_spares(self) -> None:
        """Make sure that there are spare mappings. Raises OSError if the system grants no more."""
        if self._spares:
            return
        page = os.sysconf("SC_PAGE_SIZE")
        size = page * 2 * _SPARE_MAPPINGS
        va = self.libc.mmap(0, size, sys_calls.PROT_NONE, _RESERVED)
        try:
            for index in range(_SPARE_MAPPINGS):  # every other page differs: two mappings each
                self.libc.mprotect(va + page * 2 * index, page, sys_calls.PROT_READ)
        except OSError:
            self.libc.munmap(va, size)
            raise
        self._spares = va

    def drop_spares(self) -> bool:
        """Give up the spare mappings. False if there were none."""
        if not self._spares:
            return False
        va, self._spares = self._spares, 0
        self.libc.munmap(va, os.sysconf("SC_PAGE_SIZE") * 2 * _SPARE_MAPPINGS)
        return True


def _close(memory: _Memory, shadow: Shadow) -> None:
    """Give everything back. Also runs if a driver was not closed. Does nothing in a forked child."""
    if not memory.owner.here:
        return
    descriptors: set[int] = set()
    for reservation in shadow.reservations.values():
        memory.munmap(reservation.base, reservation.end - reservation.base)
        descriptors.update(mapping.allocation.descriptor for mapping in reservation.slots.values())
    descriptors.update(allocation.descriptor for allocation in shadow.allocations.values())
    memory.drop_spares()
    for descriptor in (*descriptors, memory.fd):
        if descriptor >= 0:
            os.close(descriptor)
    shadow.clear()


def _driver_error(call: str, error: OSError, hint: str = "") -> DriverError:
    if error.errno == errno.ENOMEM:
        limit = max_map_count() or 0
        full = f"no room for another mapping: use larger pages or raise vm.max_map_count (now {limit:,})"
        return OutOfMemory(call, hint=hint or full)
    return DriverError(call, UNKNOWN, hint=error.strerror or str(error))
