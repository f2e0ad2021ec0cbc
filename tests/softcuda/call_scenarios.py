"""The calls of the software driver through the real `cuda.bindings`, and the code of every refusal.

Run by `test_library.py` in a child process, in this order: the first tests see a process without a context.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cu

from tests.softcuda.library import SoftCuda, Usage
from vattn.vmm.bench.calls import call_latencies
from vattn.vmm.bench.overlap import overlap_latencies
from vattn.vmm.cuda import CudaDriver
from vattn.vmm.driver import OUT_OF_MEMORY, UNKNOWN, Access, DriverError, OutOfMemory

PAGE, MEMORY = 65536, 16 * 65536  # settings of the child, see test_library.py
INVALID_VALUE, NOT_INITIALIZED, INVALID_DEVICE, INVALID_CONTEXT = 1, 3, 101, 201
CONTEXT_IS_DESTROYED, NOT_SUPPORTED = 709, 801

Attribute = cu.CUdevice_attribute
Pointer = cu.CUpointer_attribute
POSIX = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


def do(name: str, *args: Any) -> Any:
    """Value of a call that must succeed."""
    status, *values = getattr(cu, name)(*args)
    assert int(status) == 0, f"{name}: {status}"
    return values[0] if len(values) == 1 else tuple(values)


def code(name: str, *args: Any) -> int:
    """CUresult of a call."""
    return int(getattr(cu, name)(*args)[0])


def location(device: int = 0, kind: Any = DEVICE) -> Any:
    made = cu.CUmemLocation()
    made.type, made.id = kind, device
    return made


def properties(shareable: bool = False, **fields: Any) -> Any:
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = location()
    made.requestedHandleTypes = POSIX if shareable else 0
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def access(flags: Any = READ_WRITE, device: int = 0) -> Any:
    made = cu.CUmemAccessDesc()
    made.location, made.flags = location(device), flags
    return made


def attribute(which: Any, address: int) -> tuple[int, int]:
    """(code, value) of a pointer attribute."""
    status, value = cu.cuPointerGetAttribute(which, address)
    return int(status), 0 if value is None else int(value)


# Before and without a context


def test_nothing_works_before_cuInit() -> None:
    for name, *args in (("cuDeviceGetCount",), ("cuCtxGetCurrent",), ("cuMemRelease", 1)):
        assert code(name, *args) == NOT_INITIALIZED
    assert code("cuInit", 1) == INVALID_VALUE
    assert code("cuInit", 0) == code("cuInit", 0) == 0


def test_there_is_one_device() -> None:
    assert do("cuDeviceGetCount") == 1 and do("cuDriverGetVersion") >= 12000
    assert do("cuDeviceGetName", 32, 0).rstrip(b"\0") == b"softcuda"
    assert do("cuDeviceTotalMem", 0) == MEMORY
    assert code("cuDeviceGet", 1) == code("cuDeviceTotalMem", 1) == INVALID_DEVICE
    supported = Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    shareable = Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    assert (int(supported), int(shareable)) == (102, 103)
    assert do("cuDeviceGetAttribute", supported, 0) == do("cuDeviceGetAttribute", shareable, 0) == 1


NEED_A_CONTEXT = {
    "cuCtxSynchronize": (),
    "cuCtxGetDevice": (),
    "cuMemGetInfo": (),
    "cuMemAddressReserve": (PAGE, 0, 0, 0),
    "cuMemAddressFree": (PAGE, PAGE),
    "cuMemCreate": (PAGE, properties(), 0),
    "cuMemMap": (PAGE, PAGE, 0, 1, 0),
    "cuMemSetAccess": (PAGE, PAGE, [access()], 1),
    "cuMemUnmap": (PAGE, PAGE),
    "cuMemImportFromShareableHandle": (0, POSIX),
    "cuPointerGetAttribute": (Pointer.CU_POINTER_ATTRIBUTE_MAPPED, PAGE),
}


@pytest.mark.parametrize("name", NEED_A_CONTEXT)
def test_without_a_context_the_call_is_refused(name: str) -> None:
    assert int(do("cuCtxGetCurrent")) == 0
    assert code(name, *NEED_A_CONTEXT[name]) == INVALID_CONTEXT


def test_contexts_are_a_stack_per_thread() -> None:
    assert code("cuCtxPopCurrent") == code("cuDevicePrimaryCtxRelease", 0) == INVALID_CONTEXT
    primary = do("cuDevicePrimaryCtxRetain", 0)
    do("cuCtxPushCurrent", primary)
    assert int(do("cuCtxGetCurrent")) == int(primary) and int(do("cuCtxGetDevice")) == 0
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(int(do("cuCtxGetCurrent"))))
    thread.start()
    thread.join()
    assert seen == [0]
    do("cuCtxSetCurrent", primary)  # replaces the top
    assert int(do("cuCtxPopCurrent")) == int(primary)
    assert int(do("cuCtxGetCurrent")) == 0
    do("cuDevicePrimaryCtxRelease", 0)


def test_a_primary_context_that_nobody_holds_is_destroyed() -> None:
    primary = do("cuDevicePrimaryCtxRetain", 0)
    do("cuCtxSetCurrent", primary)
    do("cuCtxSynchronize")
    do("cuDevicePrimaryCtxRelease", 0)
    assert code("cuCtxSynchronize") == code("cuMemGetInfo") == CONTEXT_IS_DESTROYED
    do("cuCtxSetCurrent", cu.CUcontext(0))
    assert int(do("cuCtxGetCurrent")) == 0


# With one


@pytest.fixture
def soft() -> Iterator[SoftCuda]:
    """The device, empty before and after."""
    soft = SoftCuda()
    do("cuCtxPushCurrent", do("cuDevicePrimaryCtxRetain", 0))
    yield soft
    soft.fail_at(0)
    do("cuCtxPopCurrent")
    do("cuDevicePrimaryCtxRelease", 0)
    soft.check()
    assert soft.usage() == Usage(0, 0, 0, 0), "the test left something"


class Page:
    """A reservation of eight pages with a handle of two mapped at its second page."""

    def __init__(self, shareable: bool = False) -> None:
        self.va = int(do("cuMemAddressReserve", 8 * PAGE, 0, 0, 0))
        self.handle = do("cuMemCreate", 2 * PAGE, properties(shareable), 0)
        self.at = self.va + PAGE
        do("cuMemMap", self.at, 2 * PAGE, 0, self.handle, 0)

    def drop(self) -> None:
        do("cuMemUnmap", self.at, 2 * PAGE)
        do("cuMemRelease", self.handle)
        do("cuMemAddressFree", self.va, 8 * PAGE)


@pytest.fixture
def page(soft: SoftCuda) -> Iterator[Page]:
    page = Page()
    yield page
    page.drop()


def test_granularity(soft: SoftCuda) -> None:
    flags = cu.CUmemAllocationGranularity_flags
    least = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert do("cuMemGetAllocationGranularity", properties(), least) == PAGE
    advised = do("cuMemGetAllocationGranularity", properties(), flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
    assert advised == 2 << 20
    foreign = properties(location=location(1))
    assert code("cuMemGetAllocationGranularity", foreign, least) == INVALID_DEVICE


def test_reserve_refuses(soft: SoftCuda) -> None:
    assert code("cuMemAddressReserve", 0, 0, 0, 0) == INVALID_VALUE
    assert code("cuMemAddressReserve", PAGE + 1, 0, 0, 0) == INVALID_VALUE
    assert code("cuMemAddressReserve", PAGE, 3 * PAGE, 0, 0) == INVALID_VALUE
    assert code("cuMemAddressReserve", PAGE, 0, 100, 0) == INVALID_VALUE
    assert code("cuMemAddressReserve", PAGE, 0, 0, 1) == INVALID_VALUE
    assert code("cuMemAddressReserve", 1 << 60, 0, 0, 0) == OUT_OF_MEMORY
    assert code("cuMemAddressReserve", (1 << 64) - 4096, 1 << 30, 0, 0) == OUT_OF_MEMORY


def test_reserve_takes_host_pages_and_honours_alignment_and_hint(soft: SoftCuda) -> None:
    small = int(do("cuMemAddressReserve", 4096, 0, 0, 0))
    wide = int(do("cuMemAddressReserve", PAGE, 1 << 30, 0, 0))
    assert small % PAGE == 0 and wide % (1 << 30) == 0
    do("cuMemAddressFree", wide, PAGE)
    assert int(do("cuMemAddressReserve", PAGE, 0, wide, 0)) == wide
    do("cuMemAddressFree", wide, PAGE)
    do("cuMemAddressFree", small, 4096)


def test_free_refuses(page: Page) -> None:
    assert code("cuMemAddressFree", page.va, 8 * PAGE) == INVALID_VALUE, "something is mapped"
    assert code("cuMemAddressFree", page.va, PAGE) == INVALID_VALUE, "not all of it"
    assert code("cuMemAddressFree", page.va + 4 * PAGE, 4 * PAGE) == INVALID_VALUE
    assert code("cuMemAddressFree", PAGE, PAGE) == INVALID_VALUE, "never reserved"


def test_create_refuses(soft: SoftCuda) -> None:
    for size in (0, 1, PAGE // 2, PAGE + 4096):
        assert code("cuMemCreate", size, properties(), 0) == INVALID_VALUE
    assert code("cuMemCreate", PAGE, properties(), 1) == INVALID_VALUE
    assert code("cuMemCreate", MEMORY + PAGE, properties(), 0) == OUT_OF_MEMORY
    host = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    assert code("cuMemCreate", PAGE, properties(location=location(0, host)), 0) == NOT_SUPPORTED
    assert code("cuMemCreate", PAGE, properties(location=location(3)), 0) == INVALID_DEVICE
    fabric = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    assert code("cuMemCreate", PAGE, properties(requestedHandleTypes=fabric), 0) == NOT_SUPPORTED
    unset = properties(type=cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID)
    assert code("cuMemCreate", PAGE, unset, 0) == INVALID_VALUE


def test_map_refuses(page: Page) -> None:
    free = page.va + 4 * PAGE
    bad = {
        "an address within a page": (free + 4096, 2 * PAGE, 0, page.handle, 0),
        "part of a handle": (free, PAGE, 0, page.handle, 0),
        "more than a handle": (free, 3 * PAGE, 0, page.handle, 0),
        "an offset": (free, PAGE, PAGE, page.handle, 0),
        "flags": (free, 2 * PAGE, 0, page.handle, 1),
        "nothing": (free, 0, 0, page.handle, 0),
        "over a mapping": (page.at + PAGE, 2 * PAGE, 0, page.handle, 0),
        "into a mapping": (page.at - PAGE, 2 * PAGE, 0, page.handle, 0),
        "over the end": (page.va + 7 * PAGE, 2 * PAGE, 0, page.handle, 0),
        "no reservation": (1 << 44, 2 * PAGE, 0, page.handle, 0),
        "no handle": (free, 2 * PAGE, 0, 12345, 0),
    }
    assert {reason: code("cuMemMap", *args) for reason, args in bad.items()} == dict.fromkeys(
        bad, INVALID_VALUE
    )


def test_unmap_and_set_access_take_whole_mappings_without_a_gap(page: Page) -> None:
    beyond = do("cuMemCreate", PAGE, properties(), 0)
    do("cuMemMap", page.va + 5 * PAGE, PAGE, 0, beyond, 0)
    ranges = {
        "part": (page.at, PAGE),
        "a tail": (page.at + PAGE, PAGE),
        "a gap": (page.at, 5 * PAGE),
        "unmapped": (page.va + 3 * PAGE, PAGE),
        "one more": (page.at, 3 * PAGE),
        "within a page": (page.at + 4096, PAGE),
        "nothing": (page.at, 0),
        "no reservation": (1 << 44, PAGE),
    }
    for reason, (va, size) in ranges.items():
        assert code("cuMemUnmap", va, size) == INVALID_VALUE, reason
        assert code("cuMemSetAccess", va, size, [access()], 1) == INVALID_VALUE, reason
    assert int(do("cuMemGetAccess", location(), page.at)) == 0, "a refused call changed something"
    do("cuMemUnmap", page.va + 5 * PAGE, PAGE)
    do("cuMemRelease", beyond)


def test_set_access_refuses_what_it_does_not_know(page: Page) -> None:
    assert code("cuMemSetAccess", page.at, 2 * PAGE, [access()], 0) == INVALID_VALUE
    assert code("cuMemSetAccess", page.at, 2 * PAGE, [access(device=1)], 1) == INVALID_DEVICE
    do("cuMemSetAccess", page.at, 2 * PAGE, [access()], 1)
    assert int(do("cuMemGetAccess", location(), page.at + PAGE)) == int(READ_WRITE)
    assert code("cuMemGetAccess", location(), page.va) == INVALID_VALUE, "nothing is mapped there"
    assert code("cuMemGetAccess", location(1), page.at) == INVALID_DEVICE


def test_memory_lives_until_the_last_mapping_and_reference_are_gone(soft: SoftCuda) -> None:
    page = Page()
    assert int(do("cuMemRetainAllocationHandle", page.at + PAGE)) == int(page.handle)
    do("cuMemRelease", page.handle)
    do("cuMemRelease", page.handle)
    assert code("cuMemRelease", page.handle) == INVALID_VALUE, "both references are gone"
    assert code("cuMemMap", page.va + 4 * PAGE, 2 * PAGE, 0, page.handle, 0) == INVALID_VALUE
    assert do("cuMemGetInfo") == (MEMORY - 2 * PAGE, MEMORY), "the mapping holds it"
    assert int(do("cuMemRetainAllocationHandle", page.at)) == int(page.handle), "known by its address"
    assert code("cuMemRetainAllocationHandle", page.va) == INVALID_VALUE
    do("cuMemUnmap", page.at, 2 * PAGE)
    assert do("cuMemGetInfo") == (MEMORY - 2 * PAGE, MEMORY), "the reference holds it"
    do("cuMemRelease", page.handle)
    assert do("cuMemGetInfo") == (MEMORY, MEMORY)
    do("cuMemAddressFree", page.va, 8 * PAGE)


def test_export_and_import(soft: SoftCuda) -> None:
    page, plain = Page(shareable=True), do("cuMemCreate", PAGE, properties(), 0)
    assert code("cuMemExportToShareableHandle", plain, POSIX, 0) == INVALID_VALUE
    fabric = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    assert code("cuMemExportToShareableHandle", page.handle, fabric, 0) == NOT_SUPPORTED
    fd = int(do("cuMemExportToShareableHandle", page.handle, POSIX, 0))
    other = do("cuMemImportFromShareableHandle", fd, POSIX)
    os.close(fd)
    assert int(other) != int(page.handle) and soft.usage().used == 3 * PAGE, "it is the same memory"
    do("cuMemMap", page.va + 4 * PAGE, 2 * PAGE, 0, other, 0)
    for va in (page.at, page.va + 4 * PAGE):
        do("cuMemSetAccess", va, 2 * PAGE, [access()], 1)
    ctypes.memset(page.at, 7, 2 * PAGE)
    assert ctypes.string_at(page.va + 4 * PAGE, 2 * PAGE) == b"\7" * (2 * PAGE)
    do("cuMemUnmap", page.va + 4 * PAGE, 2 * PAGE)
    do("cuMemRelease", other)
    do("cuMemRelease", plain)
    page.drop()


def test_import_takes_only_what_was_exported(soft: SoftCuda) -> None:
    fd = os.memfd_create("something")
    os.ftruncate(fd, 2 * PAGE)
    assert code("cuMemImportFromShareableHandle", fd, POSIX) == INVALID_VALUE
    os.close(fd)
    assert code("cuMemImportFromShareableHandle", fd, POSIX) == INVALID_VALUE


def test_what_a_pointer_points_to(page: Page) -> None:
    inside, outside = page.at + PAGE + 100, page.va
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside) == (0, 2)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, inside) == (0, inside)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside) == (0, page.va)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside) == (0, 8 * PAGE)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_MAPPED, inside) == (0, 1)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_MAPPED, outside) == (0, 0)
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, outside)[0] == INVALID_VALUE
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_HOST_POINTER, inside)[0] == INVALID_VALUE
    assert attribute(Pointer.CU_POINTER_ATTRIBUTE_MAPPED, 4096)[0] == INVALID_VALUE
    several = [Pointer.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Pointer.CU_POINTER_ATTRIBUTE_RANGE_SIZE]
    assert [int(value) for value in do("cuPointerGetAttributes", 2, several, inside)] == [2, 8 * PAGE]
    assert [int(value) for value in do("cuPointerGetAttributes", 2, several, 4096)] == [0, 0]


# Steering


def test_the_nth_call_fails_once_or_from_there_on(soft: SoftCuda) -> None:
    soft.fail_at(2)
    va = int(do("cuMemAddressReserve", PAGE, 0, 0, 0))
    assert code("cuMemCreate", PAGE, properties(), 0) == OUT_OF_MEMORY
    handle = do("cuMemCreate", PAGE, properties(), 0)
    soft.fail_at(1, code=NOT_SUPPORTED, lasting=True)
    assert [code("cuMemMap", va, PAGE, 0, handle, 0) for _ in range(3)] == [NOT_SUPPORTED] * 3
    with soft.unharmed():
        do("cuMemMap", va, PAGE, 0, handle, 0)
    assert (soft.last_failure, code("cuMemUnmap", va, PAGE)) == ("cuMemMap", NOT_SUPPORTED)
    soft.fail_at(0)
    do("cuMemUnmap", va, PAGE)
    do("cuMemRelease", handle)
    do("cuMemAddressFree", va, PAGE)


def test_an_injected_failure_reaches_the_caller_with_its_name(soft: SoftCuda) -> None:
    driver = CudaDriver(tensor_device="cpu")
    va, handle = driver.reserve(PAGE), driver.create(PAGE)
    soft.fail_at(1)
    with pytest.raises(DriverError, match=r"cuMemMap: CUDA_ERROR_UNKNOWN \(999\): unknown error") as caught:
        driver.map(va, PAGE, handle)
    assert caught.value.code == UNKNOWN
    soft.fail_at(1)
    with pytest.raises(OutOfMemory, match=f"{PAGE:,} bytes asked"):
        driver.create(PAGE)
    calls = soft.calls("cuMemMap")
    driver.map(va, PAGE, handle)
    driver.set_access(va, PAGE, Access.READ_WRITE)
    assert soft.calls("cuMemMap") == calls + 1
    driver.close()


def test_arguments_that_the_bindings_do_not_take_are_invalid_values(soft: SoftCuda) -> None:
    driver = CudaDriver(tensor_device="cpu")
    va = driver.reserve(PAGE)
    driver.map(va, PAGE, driver.create(PAGE))
    two: Any = 2  # CUDA has 0, 1 and 3
    for call in (
        lambda: driver.reserve(-PAGE),
        lambda: driver.reserve(1 << 64),
        lambda: driver.create(-PAGE),
        lambda: driver.map(va, -PAGE, 1),
        lambda: driver.unmap(-va, PAGE),
        lambda: driver.release(-1),
        lambda: driver.import_handle(1 << 40, PAGE),
        lambda: driver.set_access(va, -PAGE, Access.READ),
        lambda: driver.set_access(va, PAGE, two),
    ):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == INVALID_VALUE
    driver.check()
    driver.close()


def test_the_device_changes_only_while_it_is_empty(soft: SoftCuda) -> None:
    va = int(do("cuMemAddressReserve", PAGE, 0, 0, 0))
    assert not soft.configure(4096, MEMORY)
    do("cuMemAddressFree", va, PAGE)
    assert not soft.configure(100, MEMORY), "no page"
    assert soft.configure(4096, 8192, read_only=False)
    driver = CudaDriver(tensor_device="cpu")
    assert (driver.granularity, driver.memory_info()) == (4096, (8192, 8192))
    va = driver.reserve(8192)
    driver.map(va, 8192, driver.create(8192))
    with pytest.warns(RuntimeWarning, match="refuses read-only"):
        driver.set_access(va, 8192, Access.READ)  # the device is full: nothing else is needed to find out
    assert [mapping.access for mapping in driver.mappings(va, 8192) or []] == [Access.READ_WRITE]
    driver.close()
    assert soft.configure(PAGE, MEMORY)


def test_a_function_the_library_does_not_have_is_reported_as_such(soft: SoftCuda) -> None:
    with pytest.raises(RuntimeError, match="cuMemAllocManaged"):
        cu.cuMemAllocManaged(PAGE, 1)
    assert code("cuGetErrorName", 12345) == code("cuGetErrorString", 12345) == INVALID_VALUE
    assert do("cuGetErrorName", cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY) == b"CUDA_ERROR_OUT_OF_MEMORY"


def test_its_calls_can_be_timed(soft: SoftCuda) -> None:
    driver = CudaDriver(tensor_device="cpu")
    calls = {row.call: row.n for row in call_latencies(driver, PAGE, 2, rounds=1)}
    assert calls["map"] == 6 and calls["set_access, all"] == calls["unmap, all"] == 1
    assert len(overlap_latencies(driver, PAGE, rounds=1)) == 8
    driver.close()


def test_threads_may_call_at_once(soft: SoftCuda) -> None:
    driver = CudaDriver(tensor_device="cpu")
    va = driver.reserve(8 * PAGE)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(200):
                handle = driver.create(PAGE)
                driver.map(va + index * PAGE, PAGE, handle)
                driver.set_access(va + index * PAGE, PAGE, Access.READ_WRITE)
                ctypes.memset(va + index * PAGE, index, 64)
                driver.release(handle)
                driver.unmap(va + index * PAGE, PAGE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    soft.check()
    driver.close()
