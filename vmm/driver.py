"""The driver contract: CUDA's virtual memory management calls, one to one, and their errors.

Physical memory and addresses are separate here:

    reserve ─> addresses  [ . . . . . . . . ]        nothing behind them; touching them kills the process
    create  ─> a handle   ▓▓                         memory without an address
    map     ─> addresses  [ . . ▓▓ . . . . ]         still no access
    set_access            [ . . ▓▓ . . . . ]         usable; one call may cover many adjacent mappings

`HostDriver` uses `mmap` and a memfd, `CudaDriver` the CUDA driver. `AccountingDriver` only keeps books. All
three obey the same rules and raise the same codes, so code written against one runs on any of them.

Source of the rules: CUDA Driver API, section "Virtual Memory Management".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .counter import CallCounter as CallCounter  # re-exported beside the driver

if TYPE_CHECKING:
    import torch

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
DEINITIALIZED = 4
NOT_SUPPORTED = 801
UNKNOWN = 999
CODE_NAMES = {
    INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    DEINITIALIZED: "CUDA_ERROR_DEINITIALIZED",
    NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
    UNKNOWN: "CUDA_ERROR_UNKNOWN",
}


class Access(enum.IntEnum):
    """Access rights of an address. The values are those of `CUmemAccess_flags`."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


class MappedRange(NamedTuple):
    """One mapping as the driver reports it."""

    va: int
    size: int
    handle: int
    access: Access


class DriverError(RuntimeError):
    """A driver call failed.

    Attributes: `call` (name of the call), `code` (the CUresult), `name` (name of the code), `hint` (what to
    do).
    """

    def __init__(self, call: str, code: int, name: str = "", hint: str = "") -> None:
        self.call = call
        self.code = code
        self.name = name or CODE_NAMES.get(code, f"error {code}")
        self.hint = hint
        super().__init__(f"{call}: {self.name} ({code})" + (f": {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type[DriverError], tuple[str, int, str, str]]:
        return type(self), (self.call, self.code, self.name, self.hint)


class OutOfMemory(DriverError):
    """Physical memory, the budget or the kernel's table of mappings is exhausted (CUresult 2)."""

    def __init__(self, call: str, code: int = OUT_OF_MEMORY, name: str = "", hint: str = "") -> None:
        super().__init__(call, code, name, hint)


class DriverUnavailable(RuntimeError):
    """This machine cannot run the driver; the message says what is missing."""


class ArgumentError(ValueError):
    """An impossible size, shape or device. Nothing was changed."""


class Driver(Protocol):
    """Virtual memory of one device. Sizes, addresses and alignments are bytes, multiples of `granularity`.

    Every call either does all it was asked or raises `DriverError` and changes nothing. Calls are safe from
    any thread. They are not ordered with work on a stream: before it unmaps a range, a caller must make sure
    that no work uses it. In a forked child they raise `WrongProcess`, since the parent owns the memory.
    """

    @property
    def name(self) -> str:
        """Short name for tables and messages: "host", "cuda", "accounting"."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that `tensor` makes."""

    @property
    def granularity(self) -> int:
        """Smallest page in bytes."""

    def reserve(self, size: int, align: int = 0) -> int:
        """Reserve `size` bytes of addresses and return the first. `align` 0 means the granularity."""

    def free(self, va: int, size: int) -> None:
        """Give back a whole reservation, as `reserve` returned it. Nothing may be mapped in it."""

    def create(self, size: int, shareable: bool = False) -> int:
        """Allocate `size` bytes of physical memory; returns a handle (> 0).

        `shareable`: the handle may be passed to `export_handle`. Raises `OutOfMemory` if memory is short.
        """

    def release(self, handle: int) -> None:
        """Drop the handle. The memory itself exists until its last mapping, in any process, is gone."""

    def map(self, va: int, size: int, handle: int) -> None:
        """Map the whole of `handle` at `va`; `size` must be its size. No access until `set_access`."""

    def set_access(self, va: int, size: int, access: Access) -> None:
        """Set the access of every mapping in the range, which must hold whole mappings without a gap."""

    def unmap(self, va: int, size: int) -> None:
        """Remove the mappings of a range, which must hold whole mappings without a gap."""

    def export_handle(self, handle: int) -> int:
        """A file descriptor with which another process imports a shareable handle. The caller closes it."""

    def import_handle(self, fd: int, size: int) -> int:
        """A handle of the `size` bytes exported by `export_handle`. The caller still has to close `fd`."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of physical memory."""

    def tensor(
        self,
        va: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        owner: object = None,
    ) -> torch.Tensor:
        """A tensor over addresses, with strides in elements. Nothing needs to be mapped there.

        The tensor and its views keep only `owner` alive. The caller, or `owner`, must make sure that the
        reservation outlives them.
        """

    def mappings(self, va: int, size: int) -> list[MappedRange] | None:
        """The mappings in the range, by address; None if the driver cannot tell. For checks; may be slow."""

    def synchronize(self) -> None:
        """Wait until no submitted work can touch memory of this device."""

    def defer(self, clean_up: Callable[[], None]) -> None:
        """Run `clean_up`, which may call this driver, at the earliest moment that is safe.

        Finalisers need this: the garbage collector may run one in the middle of a driver call of the same
        thread.
        """

    def close(self) -> None:
        """Give back everything. Idempotent; any other call afterwards raises `DriverError`."""


def open_driver(device: str | torch.device, **options: Any) -> Driver:
    """Open the driver of a device: "cpu" -> `HostDriver`, "cuda" or "cuda:1" -> `CudaDriver`.

    `options` are the keyword arguments of that class. Raises `DriverUnavailable` if it cannot run here, and
    `ValueError` for any other device.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        from .host import HostDriver

        return HostDriver(**options)
    if kind == "cuda":
        import torch

        from .cuda import CudaDriver

        if index:
            options.setdefault("device_index", int(index))
        elif torch.cuda.is_available():
            options.setdefault("device_index", torch.cuda.current_device())
        return CudaDriver(**options)
    raise ArgumentError(f"no virtual memory driver for device {str(device)!r}: use 'cpu' or 'cuda'")
