"""`CudaDriver` against a stand-in for the bindings: calls, contexts, errors, clean-up."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from tests.vmm.fake_cuda import PRIMARY, FakeCuda
from vattn.vmm.cuda import CudaDriver
from vattn.vmm.driver import (
    DEINITIALIZED,
    INVALID_VALUE,
    NOT_SUPPORTED,
    Access,
    DriverError,
    DriverUnavailable,
    OutOfMemory,
    open_driver,
)
from vattn.vmm.growable import GrowableTensor
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

PAGE = 64 << 10
RW = Access.READ_WRITE


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(PAGE, budget=32 * PAGE)
    monkeypatch.setattr("vattn.vmm.cuda._bindings", lambda: fake)
    return fake


@pytest.fixture
def driver(cuda: FakeCuda) -> CudaDriver:
    driver = CudaDriver(tensor_device="cpu")
    cuda.calls.clear()
    return driver


def refuse(*_: object) -> tuple[object, ...]:
    raise DriverError("anything", INVALID_VALUE)


def on_a_thread(act: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# Opening


def test_it_reads_what_the_device_can_do(cuda: FakeCuda, driver: CudaDriver) -> None:
    assert (driver.name, driver.device_index) == ("cuda", 0)
    assert (driver.granularity, driver.recommended_granularity) == (PAGE, 4 * PAGE)
    assert driver.can_share and driver.memory_info() == (32 * PAGE, 32 * PAGE)
    assert CudaDriver().device == torch.device("cuda", 0)


def test_the_factory_passes_the_device_index(cuda: FakeCuda) -> None:
    cuda.devices = 3
    driver = open_driver("cuda:2", tensor_device="cpu")
    assert isinstance(driver, CudaDriver) and driver.device_index == 2


def test_a_missing_device_is_unavailable(cuda: FakeCuda) -> None:
    with pytest.raises(DriverUnavailable, match=r"device 5 cannot be used.*INVALID_DEVICE"):
        CudaDriver(5)
    assert cuda.context_retained == 0


def test_a_device_without_virtual_memory_is_unavailable(cuda: FakeCuda) -> None:
    cuda.abilities[102] = 0
    with pytest.raises(DriverUnavailable, match="no virtual memory management"):
        CudaDriver()


def test_missing_bindings_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverUnavailable, match="pip install cuda-python"):
        CudaDriver()


# Work


def test_life_of_a_page(cuda: FakeCuda, driver: CudaDriver) -> None:
    va = driver.reserve(4 * PAGE, 1 << 20)
    handle = driver.create(PAGE)
    driver.map(va + PAGE, PAGE, handle)
    driver.set_access(va + PAGE, PAGE, RW)
    page = driver.tensor(va + PAGE, (PAGE // 4,), (1,), torch.float32)
    page.fill_(3.0)
    assert va % (1 << 20) == 0 and page.sum() == 3 * PAGE // 4
    driver.check()
    (found,) = driver.mappings(va, 4 * PAGE) or []
    assert found == (va + PAGE, PAGE, handle, RW)
    driver.release(handle)
    driver.unmap(va + PAGE, PAGE)
    assert driver.mappings(va, 4 * PAGE) == []
    driver.free(va, 4 * PAGE)
    assert driver.memory_info() == (32 * PAGE, 32 * PAGE)
    cuda.host.check()


def test_one_call_each(cuda: FakeCuda, driver: CudaDriver) -> None:
    va = driver.reserve(4 * PAGE)
    handle = driver.create(PAGE)
    for index in range(4):
        driver.map(va + index * PAGE, PAGE, handle)
    driver.set_access(va, 4 * PAGE, RW)
    driver.unmap(va, 4 * PAGE)
    work = {name: n for name, n in cuda.calls.items() if name.startswith("cuMem")}
    assert work == {
        "cuMemAddressReserve": 1,
        "cuMemCreate": 1,
        "cuMemMap": 4,
        "cuMemSetAccess": 1,
        "cuMemUnmap": 1,
    }


def test_the_check_notices_a_mapping_that_is_gone(cuda: FakeCuda, driver: CudaDriver) -> None:
    va = driver.reserve(PAGE)
    driver.map(va, PAGE, driver.create(PAGE))
    driver.check()
    cuda.host.unmap(va, PAGE)
    with pytest.raises(AssertionError, match="knows no mapping"):
        driver.check()


def test_errors_carry_the_drivers_own_words(driver: CudaDriver) -> None:
    va = driver.reserve(PAGE)
    with pytest.raises(DriverError) as caught:
        driver.unmap(va, PAGE)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemUnmap", INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
    assert error.hint == "text of error 1"


def test_exhaustion_is_out_of_memory_with_the_figures(driver: CudaDriver) -> None:
    driver.create(30 * PAGE)
    with pytest.raises(
        OutOfMemory, match=f"{4 * PAGE:,} bytes asked; {2 * PAGE:,} of {32 * PAGE:,} are free"
    ):
        driver.create(4 * PAGE)


def test_sharing_by_descriptor(driver: CudaDriver) -> None:
    va = driver.reserve(2 * PAGE)
    handle = driver.create(PAGE, shareable=True)
    fd = driver.export_handle(handle)
    imported = driver.import_handle(fd, PAGE)
    os.close(fd)
    driver.map(va, PAGE, handle)
    driver.map(va + PAGE, PAGE, imported)
    driver.set_access(va, 2 * PAGE, RW)
    both = driver.tensor(va, (2, PAGE), (PAGE, 1), torch.uint8)
    both[0] = 9
    assert both[1].eq(9).all()


def test_sharing_is_refused_where_the_device_cannot(cuda: FakeCuda) -> None:
    cuda.abilities[103] = 0
    driver = CudaDriver(tensor_device="cpu")
    with pytest.raises(DriverError) as caught:
        driver.create(PAGE, shareable=True)
    assert caught.value.code == NOT_SUPPORTED
    assert driver.create(PAGE) > 0


def test_read_only_aliases_are_enforced(driver: CudaDriver) -> None:
    va = driver.reserve(PAGE)
    driver.map(va, PAGE, driver.create(PAGE))
    driver.set_access(va, PAGE, Access.READ)
    assert [m.access for m in driver.mappings(va, PAGE) or []] == [Access.READ]


def test_without_read_only_access_aliases_are_writable_and_it_is_said_once(cuda: FakeCuda) -> None:
    cuda.enforces_read_only = False
    driver = CudaDriver(tensor_device="cpu")
    va = driver.reserve(PAGE)
    driver.map(va, PAGE, driver.create(PAGE))
    with pytest.warns(RuntimeWarning, match="refuses read-only mappings"):
        driver.set_access(va, PAGE, Access.READ)
    assert [m.access for m in driver.mappings(va, PAGE) or []] == [RW]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.set_access(va, PAGE, Access.READ)
    with pytest.raises(DriverError):
        driver.set_access(va + PAGE, PAGE, Access.READ)


def test_whether_read_only_access_exists_is_found_out_without_memory(cuda: FakeCuda) -> None:
    cuda.enforces_read_only = False
    driver = CudaDriver(tensor_device="cpu")
    va = driver.reserve(32 * PAGE)
    driver.map(va, 32 * PAGE, driver.create(32 * PAGE))
    with pytest.raises(DriverError):
        driver.set_access(va - PAGE, PAGE, Access.READ)  # says nothing about the device
    with pytest.warns(RuntimeWarning, match="refuses read-only mappings"):
        driver.set_access(va, 32 * PAGE, Access.READ)


def test_a_reference_that_could_not_be_dropped_is_dropped_when_the_driver_closes(
    cuda: FakeCuda, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    va = driver.reserve(PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    with monkeypatch.context() as patch:
        patch.setattr(FakeCuda, "_cuMemRelease", refuse)
        with pytest.raises(DriverError):
            driver.mappings(va, PAGE)
    assert cuda.retained[handle] == 1
    driver.close()
    assert not cuda.retained[handle] and cuda.host.memory_info()[0] == 32 * PAGE


# Contexts and threads


def test_a_thread_without_a_context_gets_the_primary_one(cuda: FakeCuda, driver: CudaDriver) -> None:
    def work() -> None:
        assert cuda.stack == [0]
        driver.create(PAGE)
        assert cuda.stack == [PRIMARY]
        assert driver.memory_info()[0] == 31 * PAGE
        assert cuda.stack == [PRIMARY]

    on_a_thread(work)


def test_a_thread_keeps_the_context_of_another_device(cuda: FakeCuda, driver: CudaDriver) -> None:
    def work() -> None:
        cuda.stack[-1] = 0x2000
        driver.create(PAGE)
        driver.memory_info()
        driver.synchronize()
        assert cuda.stack == [0x2000]

    on_a_thread(work)


def test_the_context_is_looked_at_once_per_thread(cuda: FakeCuda, driver: CudaDriver) -> None:
    for _ in range(5):
        driver.create(PAGE)
    assert cuda.calls["cuCtxGetCurrent"] == 0, "the constructor did"


# End of life


def test_close_gives_everything_back(cuda: FakeCuda, driver: CudaDriver) -> None:
    va = driver.reserve(4 * PAGE)
    handles = [driver.create(PAGE) for _ in range(2)]
    for index, handle in enumerate(handles):
        driver.map(va + index * PAGE, PAGE, handle)
    driver.release(handles[0])
    driver.close()
    driver.close()
    assert cuda.host.memory_info() == (32 * PAGE, 32 * PAGE) and not cuda.host.shadow.reservations
    assert cuda.context_retained == 0 and cuda.calls["cuCtxSynchronize"] == 1
    for call in (lambda: driver.create(PAGE), lambda: driver.memory_info(), lambda: driver.reserve(PAGE)):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code == DEINITIALIZED


def test_a_leaked_driver_gives_everything_back_when_collected(cuda: FakeCuda) -> None:
    driver = CudaDriver(tensor_device="cpu")
    driver.map(driver.reserve(PAGE), PAGE, driver.create(PAGE))
    driver.cycle = driver  # type: ignore[attr-defined]
    del driver
    gc.collect()
    assert cuda.host.memory_info() == (32 * PAGE, 32 * PAGE) and cuda.context_retained == 0


# What stands on it


def test_an_address_space_runs_on_it(cuda: FakeCuda, driver: CudaDriver) -> None:
    pool = PagePool(driver, PAGE, 16 * PAGE)
    space = AddressSpace(driver, pool, 2, 8 * PAGE)
    assert space.extend(0, 3)
    space.tensor((2, space.pitch), None, torch.uint8)[0, : 3 * PAGE] = 5
    space.alias(1, space.pages(0)[:2])
    assert space.extend(1, 1)
    assert space.tensor((2, space.pitch), None, torch.uint8)[1, : 2 * PAGE].eq(5).all()
    space.check({})
    on_a_thread(lambda: space.extend(0, 2))
    space.truncate(0, 1)
    space.check({})
    space.close()
    pool.close()
    assert cuda.host.memory_info()[0] == 32 * PAGE


def test_a_growable_tensor_waits_for_the_device_before_it_gives_memory_back(
    cuda: FakeCuda, driver: CudaDriver
) -> None:
    tensor = GrowableTensor((PAGE,), torch.uint8, 8, driver=driver)
    tensor.grow(4)
    tensor.view().fill_(1)
    assert cuda.calls["cuCtxSynchronize"] == 0
    tensor.shrink(2)
    assert cuda.calls["cuCtxSynchronize"] == 1 and tensor.nbytes_mapped == 2 * PAGE
    tensor.check()
    del tensor
    assert cuda.calls["cuCtxSynchronize"] == 2 and cuda.host.memory_info()[0] == 32 * PAGE
