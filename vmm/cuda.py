"""The CUDA driver: virtual memory management of one GPU through `cuda.bindings.driver`.

We don't use `cuda.core`, because its `VirtualMemoryResource` cannot reserve addresses without mapping them.

Published costs on A100 and H100, in microseconds: reserve 2-20, create 29-190, map 1.5-2, setAccess 36-38,
unmap 25-34, release 23. setAccess is the most expensive of the calls made while growing, but one call may
span many mappings, so callers call it once per grown range.

The context is the device's primary context, which torch uses too. A thread without a context gets it at its
first call. A thread with a context, perhaps of another device, keeps it: the calls name their device.

Calls used: cuInit, cuDeviceGet, cuDeviceGetAttribute, cuDevicePrimaryCtxRetain / Release, cuCtxGetCurrent /
SetCurrent / PushCurrent / PopCurrent / Synchronize, cuMemGetAllocationGranularity, cuMemAddressReserve /
Free, cuMemCreate / Release / Map / Unmap, cuMemSetAccess / GetAccess, cuMemRetainAllocationHandle,
cuMemExportToShareableHandle / ImportFromShareableHandle, cuMemGetInfo, cuGetErrorName / String.

Source: CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .driver import (
    DEINITIALIZED,
    INVALID_VALUE,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Access,
    DriverError,
    DriverUnavailable,
    MappedRange,
    OutOfMemory,
)
from .owner import OwnerProcess

if TYPE_CHECKING:
    import torch


def _bindings() -> Any:
    """Import `cuda.bindings.driver`; raises `DriverUnavailable`, which says how to install it."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverUnavailable(
            f"CudaDriver needs cuda-python >= 13 (pip install cuda-python): {error}"
        ) from error


class CudaDriver:
    """Virtual memory of the CUDA device `device_index`.

    Args:
        device_index: ordinal of the device, as torch counts.
        tensor_device: device of the tensors that `tensor` makes; None for the CUDA device. Another device
            makes sense only if the addresses are valid on it, e.g. "cpu" with a software driver library.

    Attributes: `granularity` is the minimum that the driver allows, `recommended_granularity` what it
    recommends. Raises `DriverUnavailable` if there is no driver library or no such device, or if the device
    does not support virtual memory management.
    """

    name = "cuda"

    def __init__(self, device_index: int = 0, tensor_device: str | torch.device | None = None) -> None:
        import torch

        self._cu = cu = _bindings()
        self._owner = OwnerProcess("CudaDriver")
        try:
            self._call("cuInit", 0)
            device = self._call("cuDeviceGet", device_index)
            attributes = cu.CUdevice_attribute
            supported = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED  # 102
            if not self._call("cuDeviceGetAttribute", supported, device):
                raise DriverUnavailable(f"CUDA device {device_index} has no virtual memory management")
            shareable = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED  # 103
            self.can_share = bool(self._call("cuDeviceGetAttribute", shareable, device))
            context = self._call("cuDevicePrimaryCtxRetain", device)
        except (DriverError, RuntimeError) as error:
            if isinstance(error, DriverUnavailable):
                raise
            raise DriverUnavailable(f"CUDA device {device_index} cannot be used: {error}") from error
        self.device_index = device_index
        self.device = (
            torch.device("cuda", device_index) if tensor_device is None else torch.device(tensor_device)
        )
        self._local = threading.local()
        self._books = _Books(cu, device, context, self._owner)
        self._finalizer = weakref.finalize(self, _close, self._books)
        self._finalizer.atexit = False  # at exit kernels may still run; the process gives everything back
        self._enter()
        self._fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._location = cu.CUmemLocation()
        self._location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device_index
        self._plain, self._shared = self._properties(False), self._properties(True)
        flags = cu.CUmemAllocationGranularity_flags
        granularity = "cuMemGetAllocationGranularity"
        self.granularity = int(self._call(granularity, self._plain, flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        self.recommended_granularity = int(
            self._call(granularity, self._plain, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        )
        self._access = {access: [self._access_descriptor(access)] for access in Access}
        self._read_only = True  # until the device refuses

    # Addresses

    def reserve(self, size: int, align: int = 0) -> int:
        """See `Driver.reserve`."""
        self._enter()
        va = int(self._call("cuMemAddressReserve", size, align, 0, 0))
        self._books.reservations[va] = size
        return va

    def free(self, va: int, size: int) -> None:
        """See `Driver.free`."""
        self._enter()
        self._call("cuMemAddressFree", va, size)
        self._books.reservations.pop(va, None)

    # Memory

    def create(self, size: int, shareable: bool = False) -> int:
        """See `Driver.create`."""
        self._enter()
        if shareable and not self.can_share:
            raise DriverError("cuMemCreate", NOT_SUPPORTED, hint="the device cannot share by file descriptor")
        try:
            handle = int(self._call("cuMemCreate", size, self._shared if shareable else self._plain, 0))
        except OutOfMemory as error:
            raise OutOfMemory("cuMemCreate", hint=f"{size:,} bytes asked; {self._memory_hint()}") from error
        self._books.handles[handle] = size
        return handle

    def release(self, handle: int) -> None:
        """See `Driver.release`."""
        self._enter()
        self._call("cuMemRelease", handle)
        self._books.handles.pop(handle, None)

    def export_handle(self, handle: int) -> int:
        """See `Driver.export_handle`."""
        self._enter()
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def import_handle(self, fd: int, size: int) -> int:
        """See `Driver.import_handle`. CUDA does not check `size` before the handle is mapped."""
        self._enter()
        handle = int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type))
        self._books.handles[handle] = size
        return handle

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device. Memory cached by torch is not free: `torch.cuda.empty_cache`."""
        with _Current(self):
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    # Mappings

    def map(self, va: int, size: int, handle: int) -> None:
        """See `Driver.map`."""
        self._enter()
        self._call("cuMemMap", va, size, 0, handle, 0)
        self._books.mapped[va] = size

    def set_access(self, va: int, size: int, access: Access) -> None:
        """See `Driver.set_access`. If the device has no read-only access, READ grants READ_WRITE.

        The driver has no query for that. A device counts as having none once it refuses READ and grants
        READ_WRITE on the same range. A `RuntimeWarning` then says so, once.
        """
        self._enter()
        if not isinstance(access, Access):
            raise DriverError("cuMemSetAccess", INVALID_VALUE, hint=f"{access!r} is not an Access")
        if access is Access.READ and self._read_only:
            try:
                self._call("cuMemSetAccess", va, size, self._access[access], 1)
            except DriverError as error:
                if error.code not in (INVALID_VALUE, NOT_SUPPORTED):
                    raise
                self._call("cuMemSetAccess", va, size, self._access[Access.READ_WRITE], 1)
                self._read_only = False
                warnings.warn(
                    f"CUDA device {self.device_index} refuses read-only mappings: shared pages are writable",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        granted = Access.READ_WRITE if access is Access.READ else access
        self._call("cuMemSetAccess", va, size, self._access[granted], 1)

    def unmap(self, va: int, size: int) -> None:
        """See `Driver.unmap`."""
        self._enter()
        self._call("cuMemUnmap", va, size)
        mapped = self._books.mapped
        end = va + size
        while va < end:
            va += mapped.pop(va, self.granularity)

    def mappings(self, va: int, size: int) -> list[MappedRange] | None:
        """The mappings made here that the driver confirms, with the handle and access it reports."""
        self._enter()
        found = []
        for start, length in sorted(self._books.mapped.items()):
            if va <= start < va + size:
                try:
                    handle = int(self._call("cuMemRetainAllocationHandle", start))
                except DriverError:
                    continue  # the driver says that it is not mapped
                self._books.borrowed.append(handle)
                self._call("cuMemRelease", handle)
                self._books.borrowed.remove(handle)
                access = Access(int(self._call("cuMemGetAccess", self._location, start)))
                found.append(MappedRange(start, length, handle, access))
        return found

    def check(self) -> None:
        """Raise AssertionError unless every mapping lies in a reservation and the driver confirms it."""
        reservations = self._books.reservations.items()
        for va, size in self._books.mapped.items():
            assert any(base <= va and va + size <= base + length for base, length in reservations), "outside"
            assert self.mappings(va, size), f"the driver knows no mapping at {va:#x}"

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

    # Life

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        with _Current(self):
            self._call("cuCtxSynchronize")

    def defer(self, clean_up: Callable[[], None]) -> None:
        """Run `clean_up` at once: the CUDA driver does its own locking. Does nothing in a forked child."""
        if self._owner.here:
            clean_up()

    def close(self) -> None:
        """Wait for the device and give back everything made by this object. Idempotent."""
        self._finalizer()

    def _call(self, call: str, *args: Any) -> Any:
        """Make a driver call and return its value or tuple of values. Raises `DriverError` if it fails."""
        self._owner.require()
        try:
            result = getattr(self._cu, call)(*args)
        except OverflowError as error:  # a number that no C type of the call holds
            raise DriverError(call, INVALID_VALUE, hint=f"{args}: {error}") from None
        return _check(self._cu, call, result)

    def _enter(self) -> None:
        """Raise `DriverError` if closed, and make sure that this thread has a context."""
        if self._books.closed:
            raise DriverError("CudaDriver", DEINITIALIZED, hint="the driver is closed")
        if not getattr(self._local, "ready", False):
            if not int(self._call("cuCtxGetCurrent")):
                self._call("cuCtxSetCurrent", self._books.context)
            self._local.ready = True

    def _properties(self, shareable: bool) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        if shareable:
            properties.requestedHandleTypes = self._fd_type
        return properties

    def _access_descriptor(self, access: Access) -> Any:
        descriptor = self._cu.CUmemAccessDesc()
        descriptor.location = self._location
        descriptor.flags = self._cu.CUmemAccess_flags(int(access))
        return descriptor

    def _memory_hint(self) -> str:
        import torch

        try:
            free, total = self.memory_info()
        except DriverError:
            return "the driver does not say how much is free"
        text = f"{free:,} of {total:,} are free"
        if self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            text += f", torch caches {cached:,}: torch.cuda.empty_cache() gives that back"
        return text


class _Books:
    """Everything made and not yet given back. It suffices to clean up after a driver that was not closed."""

    def __init__(self, cu: Any, device: Any, context: Any, owner: OwnerProcess) -> None:
        self.cu = cu
        self.device = device
        self.context = context
        self.owner = owner
        self.closed = False
        self.reservations: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address -> bytes
        self.handles: dict[int, int] = {}  # handle -> bytes
        self.borrowed: list[int] = []  # references from cuMemRetainAllocationHandle


class _Current:
    """Makes the device's context current in this thread for a `with` block."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver._enter()
        self._driver._call("cuCtxPushCurrent", self._driver._books.context)

    def __exit__(self, *_: object) -> None:
        self._driver._call("cuCtxPopCurrent")


def _check(cu: Any, call: str, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) == 0:
        return values[0] if len(values) == 1 else tuple(values)
    _, name = cu.cuGetErrorName(status)
    _, text = cu.cuGetErrorString(status)
    kind = OutOfMemory if int(status) == OUT_OF_MEMORY else DriverError
    raise kind(call, int(status), _text(name), _text(text))


def _text(value: bytes | None) -> str:
    return value.decode() if value else ""


def _close(books: _Books) -> None:
    """Give everything back. Errors are ignored, since after a fault every call fails.

    A forked child has no CUDA context and nothing to give back.
    """
    if books.closed or not books.owner.here:
        return
    books.closed = True
    cu = books.cu
    cu.cuCtxPushCurrent(books.context)
    cu.cuCtxSynchronize()
    for va, size in books.mapped.items():
        cu.cuMemUnmap(va, size)
    for handle in (*books.handles, *books.borrowed):
        cu.cuMemRelease(handle)
    for va, size in books.reservations.items():
        cu.cuMemAddressFree(va, size)
    cu.cuCtxPopCurrent()
    cu.cuDevicePrimaryCtxRelease(books.device)
    for book in (books.mapped, books.handles, books.borrowed, books.reservations):
        book.clear()
