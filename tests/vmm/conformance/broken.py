"""Drivers that are wrong in one way each, to show that the rules notice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from vattn.vmm.driver import INVALID_VALUE, Access, DriverError, MappedRange, OutOfMemory
from vattn.vmm.host import HostDriver

PAGE = 64 << 10
MEMORY = 16 << 20


class Sound(HostDriver):
    """The host driver as it is."""

    def __init__(self) -> None:
        super().__init__(PAGE, budget=MEMORY)


class Agreeable(Sound):
    """Accepts everything: what is refused is not done, but no error comes back."""

    def reserve(self, size: int, align: int = 0) -> int:
        try:
            return super().reserve(size, align)
        except DriverError:
            return super().reserve(PAGE)

    def free(self, va: int, size: int) -> None:
        with suppress(DriverError):
            super().free(va, size)

    def create(self, size: int, shareable: bool = False) -> int:
        try:
            return super().create(size, shareable)
        except DriverError:
            return super().create(PAGE, shareable)

    def map(self, va: int, size: int, handle: int) -> None:
        with suppress(DriverError):
            super().map(va, size, handle)

    def set_access(self, va: int, size: int, access: Access) -> None:
        with suppress(DriverError):
            super().set_access(va, size, access)

    def unmap(self, va: int, size: int) -> None:
        with suppress(DriverError):
            super().unmap(va, size)

    def export_handle(self, handle: int) -> int:
        try:
            return super().export_handle(handle)
        except DriverError:
            return os.memfd_create("nothing")


class Misaligned(Sound):
    """Reserves behind the address it should."""

    def _do_reserve(self, size: int, align: int) -> int:
        return super()._do_reserve(size + 4096, align) + 4096


class Repeating(Sound):
    """Gives out the same addresses twice."""

    def _do_reserve(self, size: int, align: int) -> int:
        self.last = getattr(self, "last", None) or super()._do_reserve(64 * PAGE, align)
        return self.last


class Open(Sound):
    """Grants everything as soon as it is mapped, and never takes it back."""

    def _do_map(self, va: int, allocation: object) -> None:
        super()._do_map(va, allocation)  # type: ignore[arg-type]
        super()._do_set_access(va, allocation.size, Access.READ_WRITE)  # type: ignore[attr-defined]

    def _do_set_access(self, va: int, size: int, access: Access) -> None:
        pass

    def mappings(self, va: int, size: int) -> list[MappedRange]:
        return [m._replace(access=Access.READ_WRITE) for m in super().mappings(va, size)]


class Secretive(Open):
    """As `Open`, but claims what was asked for."""

    def mappings(self, va: int, size: int) -> list[MappedRange]:
        return Sound.mappings(self, va, size)


class Lingering(Sound):
    """Leaves memory mapped for real when it is unmapped."""

    def _do_unmap(self, va: int, size: int) -> None:
        pass


class Flat(Sound):
    """Has memory behind every reserved address."""

    def _do_reserve(self, size: int, align: int) -> int:
        va = super()._do_reserve(size, align)
        self._memory.libc.mprotect(va, min(size, 64 * PAGE), 3)
        return va


class Copying(Sound):
    """Maps a copy instead of the memory itself: aliases differ, and nothing outlives its mapping."""

    def _do_map(self, va: int, allocation: object) -> None:
        size = allocation.size  # type: ignore[attr-defined]
        self._memory.libc.mmap(va, size, 0, 0x32)  # private, anonymous, fixed


class Shared(Sound):
    """Has one memory for all handles."""

    def _do_map(self, va: int, allocation: object) -> None:
        allocation.offset = 0  # type: ignore[attr-defined]
        super()._do_map(va, allocation)  # type: ignore[arg-type]


class OneByOne(Sound):
    """Takes a single mapping per call."""

    def unmap(self, va: int, size: int) -> None:
        self._single(va, size)
        super().unmap(va, size)

    def set_access(self, va: int, size: int, access: Access) -> None:
        self._single(va, size)
        super().set_access(va, size, access)

    def _single(self, va: int, size: int) -> None:
        if len(self.mappings(va, size)) > 1:
            raise DriverError("single", INVALID_VALUE)


class Leaking(Sound):
    """Never gives memory back."""

    def release(self, handle: int) -> None:
        if self.shadow.allocation("release", handle).mapped:
            super().release(handle)
        else:
            del self.shadow.allocations[handle]


class Hasty(Sound):
    """Gives memory back with its handle, mapped or not, and forgets what is in it."""

    def release(self, handle: int) -> None:
        allocation = self.shadow.allocation("release", handle)
        if allocation.mapped:
            self._memory.libc.punch_hole(self._memory.fd, allocation.offset, allocation.size)
        super().release(handle)


class Bottomless(Sound):
    """Has memory without end, and says that none is taken."""

    def memory_info(self) -> tuple[int, int]:
        return MEMORY, MEMORY

    def create(self, size: int, shareable: bool = False) -> int:
        self.shadow.used = 0
        return super().create(size, shareable)


class Boastful(Sound):
    """Has more free than there is."""

    def memory_info(self) -> tuple[int, int]:
        return 2 * MEMORY, MEMORY


class Greedy(Sound):
    """Takes memory for addresses."""

    def reserve(self, size: int, align: int = 0) -> int:
        if size > MEMORY:
            raise OutOfMemory("reserve")
        return super().reserve(size, align)


class Anonymous(Sound):
    """Names other handles than those that are mapped."""

    def mappings(self, va: int, size: int) -> list[MappedRange]:
        return [m._replace(handle=m.handle + 1) for m in super().mappings(va, size)]


class Racy(Sound):
    """Fails when two threads are in it."""

    inside = False

    def create(self, size: int, shareable: bool = False) -> int:
        if self.inside:
            raise DriverError("create", INVALID_VALUE, hint="two at once")
        self.inside = True
        try:
            torch.zeros(1 << 16).sum()  # others get their turn
            return super().create(size, shareable)
        finally:
            self.inside = False


class Elsewhere(Sound):
    """Makes tensors over memory of their own."""

    def tensor(
        self,
        va: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        owner: object = None,
    ) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)


class Odd(Sound):
    """Has a granularity that is no power of two, and recommends part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.granularity = 3 * PAGE
        self.recommended_granularity = 4 * PAGE


class Private(Sound):
    """Imports a copy of what was exported."""

    def import_handle(self, fd: int, size: int) -> int:
        return self.create(size)
