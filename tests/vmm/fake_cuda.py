"""`cuda.bindings.driver` with a host driver behind it: enough of it to run `CudaDriver` without a GPU.

Types and enumerations are the real ones; every function returns what the real one does, a tuple that starts
with a CUresult. Contexts are numbers, one current per thread.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as real

from vattn.vmm.driver import Access, DriverError
from vattn.vmm.host import HostDriver

PRIMARY = 0x1000


class FakeCuda:
    """One device of `budget` bytes. Attributes set the device's abilities; `calls` counts calls by name."""

    def __init__(self, granularity: int = 64 << 10, budget: int = 16 << 20) -> None:
        self.host = HostDriver(granularity, budget=budget)
        self.recommended = 4 * granularity
        self.devices = 1
        self.abilities = {102: 1, 103: 1}
        self.enforces_read_only = True
        self.calls: Counter[str] = Counter()
        self.context_retained = 0
        self.retained: Counter[int] = Counter()
        self.contexts = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuda"):
            function = getattr(type(self), f"_{name}", None)
            if function is None:
                raise RuntimeError(f"function {name} not found")
            return self._counted(name, function)
        return getattr(real, name)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            try:
                values = function(self, *args)
            except DriverError as error:
                return (real.CUresult(error.code), 0)
            return (real.CUresult.CUDA_SUCCESS, *values)

        return call

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = [0]
        stack: list[int] = self.contexts.stack
        return stack

    def _need_context(self) -> None:
        if not self.stack[-1]:
            raise DriverError("context", int(real.CUresult.CUDA_ERROR_INVALID_CONTEXT))

    def _cuInit(self, flags: int) -> tuple[Any, ...]:
        return ()

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if ordinal >= self.devices:
            raise DriverError("device", int(real.CUresult.CUDA_ERROR_INVALID_DEVICE))
        return (real.CUdevice(ordinal),)

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        return (self.abilities.get(int(attribute), 0),)

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        self.context_retained += 1
        return (real.CUcontext(PRIMARY),)

    def _cuDevicePrimaryCtxRelease(self, device: Any) -> tuple[Any, ...]:
        self.context_retained -= 1
        return ()

    def _cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return (real.CUcontext(self.stack[-1]),)

    def _cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self.stack[-1] = int(context)
        return ()

    def _cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self.stack.append(int(context))
        return ()

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (real.CUcontext(self.stack.pop()),)

    def _cuCtxSynchronize(self) -> tuple[Any, ...]:
        self._need_context()
        return ()

    def _cuMemGetInfo(self) -> tuple[Any, ...]:
        self._need_context()
        assert self.stack[-1] == PRIMARY, "asked about another device"
        return self.host.memory_info()

    def _cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, ...]:
        assert int(properties.location.type) == int(real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        minimum = real.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return (self.host.granularity if option == minimum else self.recommended,)

    def _cuMemAddressReserve(self, size: int, align: int, address: int, flags: int) -> tuple[Any, ...]:
        self._need_context()
        return (real.CUdeviceptr(self.host.reserve(size, align)),)

    def _cuMemAddressFree(self, va: int, size: int) -> tuple[Any, ...]:
        self.host.free(va, size)
        return ()

    def _cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self._need_context()
        posix = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return (
            real.CUmemGenericAllocationHandle(
                self.host.create(size, shareable=properties.requestedHandleTypes == posix)
            ),
        )

    def _cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        if self.retained[int(handle)]:
            self.retained[int(handle)] -= 1  # a reference that cuMemRetainAllocationHandle gave
        else:
            self.host.release(int(handle))
        return ()

    def _cuMemMap(self, va: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        assert (offset, flags) == (0, 0)
        self.host.map(va, size, int(handle))
        return ()

    def _cuMemUnmap(self, va: int, size: int) -> tuple[Any, ...]:
        self.host.unmap(va, size)
        return ()

    def _cuMemSetAccess(self, va: int, size: int, descriptors: Any, count: int) -> tuple[Any, ...]:
        assert count == len(descriptors) == 1
        access = Access(int(descriptors[0].flags))
        if access is Access.READ and not self.enforces_read_only:
            raise DriverError("access", int(real.CUresult.CUDA_ERROR_NOT_SUPPORTED))
        self.host.set_access(va, size, access)
        return ()

    def _mapping_at(self, va: int) -> Any:
        for base, reservation in self.host.shadow.reservations.items():
            for mapping in reservation.slots.values():
                if base <= va < reservation.end and mapping.va <= va < mapping.va + mapping.size:
                    return mapping
        raise DriverError("address", 1)

    def _cuMemGetAccess(self, location: Any, va: int) -> tuple[Any, ...]:
        return (int(self._mapping_at(va).access),)

    def _cuMemRetainAllocationHandle(self, va: int) -> tuple[Any, ...]:
        allocation = self._mapping_at(va).allocation
        self.retained[allocation.handle] += 1
        return (real.CUmemGenericAllocationHandle(allocation.handle),)

    def _cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> tuple[Any, ...]:
        return (self.host.export_handle(int(handle)),)

    def _cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> tuple[Any, ...]:
        return (real.CUmemGenericAllocationHandle(self.host.import_handle(fd, os.fstat(fd).st_size)),)

    def _cuGetErrorName(self, result: Any) -> tuple[Any, ...]:
        return (real.CUresult(result).name.encode(),)

    def _cuGetErrorString(self, result: Any) -> tuple[Any, ...]:
        return (f"text of error {int(result)}".encode(),)
