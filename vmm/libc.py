"""The system calls of the host driver, through ctypes (which releases the GIL around each of them)."""

from __future__ import annotations

import ctypes
import errno
import os

PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_FAILED = ctypes.c_void_p(-1).value


class Libc:
    """mmap, mprotect, munmap, madvise and hole punching; failures are `OSError`s with the errno."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        size_t, pointer, int_ = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        # Own function objects: argument types set here must not leak into other users of ctypes.
        self._mmap = ctypes.CFUNCTYPE(
            pointer, pointer, size_t, int_, int_, int_, ctypes.c_int64, use_errno=True
        )(("mmap", libc))
        self._mprotect = ctypes.CFUNCTYPE(int_, pointer, size_t, int_, use_errno=True)(("mprotect", libc))
        self._munmap = ctypes.CFUNCTYPE(int_, pointer, size_t, use_errno=True)(("munmap", libc))
        self._madvise = ctypes.CFUNCTYPE(int_, pointer, size_t, int_, use_errno=True)(("madvise", libc))
        self._fallocate = ctypes.CFUNCTYPE(int_, int_, int_, ctypes.c_int64, ctypes.c_int64, use_errno=True)(
            ("fallocate", libc)
        )

    def mmap(self, va: int, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
        """Address of the new mapping."""
        address = self._mmap(va, size, prot, flags, fd, offset)
        if address == _FAILED:
            raise _error()
        return int(address)

    def mprotect(self, va: int, size: int, prot: int) -> None:
        """Change the protection of a range."""
        if self._mprotect(va, size, prot):
            raise _error()

    def munmap(self, va: int, size: int) -> None:
        """Remove everything in a range."""
        if self._munmap(va, size):
            raise _error()

    def advise_huge(self, va: int, size: int) -> None:
        """Ask for huge pages. It is not an error if the system has none."""
        self._madvise(va, size, MADV_HUGEPAGE)

    def populate(self, va: int, size: int) -> None:
        """Take writable memory from the system now, not at the first touch. No effect before Linux 5.14."""
        self._madvise(va, size, MADV_POPULATE_WRITE)

    def punch_hole(self, fd: int, offset: int, size: int) -> None:
        """Give the memory behind a range of a file back to the system."""
        while self._fallocate(fd, _PUNCH_HOLE_KEEP_SIZE, offset, size):
            if ctypes.get_errno() != errno.EINTR:
                raise _error()


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
