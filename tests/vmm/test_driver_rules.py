"""The rules of CUDA's virtual memory calls, and their error codes, on the drivers that need no GPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import (
    DEINITIALIZED,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    Access,
    CallCounter,
    Driver,
    DriverError,
    DriverUnavailable,
    MappedRange,
    OutOfMemory,
    open_driver,
)
from vattn.vmm.host import HostDriver

PAGE = 64 << 10
RW = Access.READ_WRITE


@pytest.fixture(params=["host", "accounting", "counted host"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    inner = {"accounting": AccountingDriver}.get(request.param, HostDriver)(PAGE, budget=16 * PAGE)
    yield CallCounter(inner) if request.param == "counted host" else inner
    inner.check()
    inner.close()


def raises(call: object, *args: object, code: int = INVALID_VALUE) -> DriverError:
    """The error a call must be refused with."""
    with pytest.raises(DriverError) as caught:
        call(*args)  # type: ignore[operator]
    assert caught.value.code == code, caught.value
    return caught.value


def test_life_of_a_page(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    handle = driver.create(PAGE)
    driver.map(va + PAGE, PAGE, handle)
    assert driver.mappings(va, 4 * PAGE) == [MappedRange(va + PAGE, PAGE, handle, Access.NONE)]
    driver.set_access(va + PAGE, PAGE, RW)
    assert driver.mappings(va, 4 * PAGE) == [MappedRange(va + PAGE, PAGE, handle, RW)]
    driver.unmap(va + PAGE, PAGE)
    driver.release(handle)
    driver.free(va, 4 * PAGE)
    assert driver.memory_info() == (16 * PAGE, 16 * PAGE)


@pytest.mark.parametrize("size", [0, -PAGE, 1, PAGE - 1, PAGE + 4096])
def test_sizes_are_whole_pages(driver: Driver, size: int) -> None:
    va = driver.reserve(4 * PAGE)
    handle = driver.create(PAGE)
    raises(driver.reserve, size)
    raises(driver.create, size)
    raises(driver.map, va, size, handle)
    raises(driver.set_access, va, size, RW)
    raises(driver.unmap, va, size)


def test_addresses_are_aligned_to_pages(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    handle = driver.create(PAGE)
    raises(driver.map, va + 4096, PAGE, handle)
    driver.map(va, PAGE, handle)
    raises(driver.set_access, va + 4096, PAGE, RW)
    raises(driver.unmap, va + 4096, PAGE)


@pytest.mark.parametrize("align", [PAGE, 4 * PAGE, 2 << 20, 1 << 30])
def test_reservations_are_aligned_as_asked(driver: Driver, align: int) -> None:
    for _ in range(3):
        assert driver.reserve(PAGE, align) % align == 0


def test_an_alignment_below_the_granularity_is_raised_to_it(driver: Driver) -> None:
    assert driver.reserve(PAGE, 4096) % PAGE == 0


def test_an_alignment_that_is_no_power_of_two_is_refused(driver: Driver) -> None:
    raises(driver.reserve, PAGE, 3 * PAGE)


def test_map_refuses_what_is_mapped_already(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    one, two = driver.create(PAGE), driver.create(2 * PAGE)
    driver.map(va + PAGE, PAGE, one)
    raises(driver.map, va + PAGE, PAGE, one)
    raises(driver.map, va, 2 * PAGE, two)
    raises(driver.map, va + PAGE, 2 * PAGE, two)
    driver.map(va + 2 * PAGE, 2 * PAGE, two)
    assert [m.va - va for m in driver.mappings(va, 4 * PAGE) or []] == [PAGE, 2 * PAGE]


def test_map_takes_all_of_a_handle(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    two = driver.create(2 * PAGE)
    raises(driver.map, va, PAGE, two)
    raises(driver.map, va, 4 * PAGE, two)


def test_map_stays_within_one_reservation(driver: Driver) -> None:
    va = driver.reserve(PAGE)
    two = driver.create(2 * PAGE)
    raises(driver.map, va, 2 * PAGE, two)
    raises(driver.map, 1 << 46, 2 * PAGE, two)


def test_a_released_handle_maps_no_more_but_its_mappings_live(driver: Driver) -> None:
    va = driver.reserve(2 * PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    driver.release(handle)
    raises(driver.map, va + PAGE, PAGE, handle)
    raises(driver.release, handle)
    assert driver.memory_info()[0] == 15 * PAGE, "the mapping holds the memory"
    driver.set_access(va, PAGE, RW)
    driver.unmap(va, PAGE)
    assert driver.memory_info()[0] == 16 * PAGE


@pytest.mark.parametrize("handle", [0, -1, 12345])
def test_an_unknown_handle_is_refused(driver: Driver, handle: int) -> None:
    va = driver.reserve(PAGE)
    raises(driver.map, va, PAGE, handle)
    raises(driver.release, handle)


def test_unmap_takes_whole_mappings(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    two = driver.create(2 * PAGE)
    driver.map(va, 2 * PAGE, two)
    driver.map(va + 2 * PAGE, 2 * PAGE, two)
    raises(driver.unmap, va, PAGE)
    raises(driver.unmap, va + PAGE, PAGE)
    raises(driver.unmap, va + PAGE, 2 * PAGE)
    driver.unmap(va, 4 * PAGE)
    assert driver.mappings(va, 4 * PAGE) == []


def test_unmap_and_set_access_refuse_a_gap(driver: Driver) -> None:
    va = driver.reserve(3 * PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    driver.map(va + 2 * PAGE, PAGE, handle)
    for call in (lambda: driver.unmap(va, 3 * PAGE), lambda: driver.set_access(va, 3 * PAGE, RW)):
        raises(call)
    assert [m.access for m in driver.mappings(va, 3 * PAGE) or []] == [Access.NONE, Access.NONE]
    raises(driver.unmap, va + PAGE, PAGE)


def test_set_access_takes_whole_mappings_and_a_true_access(driver: Driver) -> None:
    va = driver.reserve(2 * PAGE)
    driver.map(va, 2 * PAGE, driver.create(2 * PAGE))
    raises(driver.set_access, va, PAGE, RW)
    raises(driver.set_access, va, 2 * PAGE, 2)


def test_each_alias_has_its_own_access(driver: Driver) -> None:
    va = driver.reserve(2 * PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    driver.map(va + PAGE, PAGE, handle)
    driver.set_access(va, PAGE, RW)
    driver.set_access(va + PAGE, PAGE, Access.READ)
    assert [m.access for m in driver.mappings(va, 2 * PAGE) or []] == [RW, Access.READ]


def test_access_starts_from_nothing_after_every_map(driver: Driver) -> None:
    va = driver.reserve(PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    driver.set_access(va, PAGE, RW)
    driver.unmap(va, PAGE)
    driver.map(va, PAGE, handle)
    assert [m.access for m in driver.mappings(va, PAGE) or []] == [Access.NONE]


def test_free_takes_back_exactly_what_was_reserved(driver: Driver) -> None:
    va = driver.reserve(2 * PAGE)
    raises(driver.free, va, PAGE)
    raises(driver.free, va + PAGE, PAGE)
    raises(driver.free, va, 4 * PAGE)
    driver.free(va, 2 * PAGE)
    raises(driver.free, va, 2 * PAGE)


def test_free_refuses_a_range_that_holds_mappings(driver: Driver) -> None:
    va = driver.reserve(2 * PAGE)
    driver.map(va + PAGE, PAGE, driver.create(PAGE))
    raises(driver.free, va, 2 * PAGE)
    driver.unmap(va + PAGE, PAGE)
    driver.free(va, 2 * PAGE)


def test_create_stops_at_the_budget(driver: Driver) -> None:
    handles = [driver.create(PAGE) for _ in range(15)]
    error = raises(driver.create, 2 * PAGE, code=OUT_OF_MEMORY)
    assert isinstance(error, OutOfMemory) and f"{2 * PAGE:,}" in error.hint
    handles.append(driver.create(PAGE))
    raises(driver.create, PAGE, code=OUT_OF_MEMORY)
    driver.release(handles[3])
    driver.create(PAGE)
    assert driver.memory_info() == (0, 16 * PAGE)


def test_a_refused_call_changes_nothing(driver: Driver) -> None:
    va = driver.reserve(4 * PAGE)
    handle = driver.create(PAGE)
    driver.map(va, PAGE, handle)
    before = driver.mappings(va, 4 * PAGE), driver.memory_info()
    for call in (
        lambda: driver.map(va, PAGE, handle),
        lambda: driver.unmap(va, 2 * PAGE),
        lambda: driver.set_access(va, 2 * PAGE, RW),
        lambda: driver.free(va, 4 * PAGE),
        lambda: driver.create(64 * PAGE),
    ):
        with pytest.raises(DriverError):
            call()
        assert (driver.mappings(va, 4 * PAGE), driver.memory_info()) == before


def test_a_closed_driver_refuses_everything(driver: Driver) -> None:
    va = driver.reserve(PAGE)
    handle = driver.create(PAGE)
    driver.close()
    driver.close()
    raises(driver.reserve, PAGE, code=DEINITIALIZED)
    raises(driver.create, PAGE, code=DEINITIALIZED)
    raises(driver.map, va, PAGE, handle, code=DEINITIALIZED)
    raises(driver.free, va, PAGE, code=DEINITIALIZED)


def test_errors_name_the_call_the_code_and_the_reason(driver: Driver) -> None:
    error = raises(driver.unmap, driver.reserve(PAGE), PAGE)
    assert (error.call, error.name) == ("unmap", "CUDA_ERROR_INVALID_VALUE")
    assert "nothing is mapped" in error.hint and error.hint in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.call, again.code, again.name, again.hint, type(again)) == (
        error.call,
        error.code,
        error.name,
        error.hint,
        DriverError,
    )


def test_calls_are_counted_by_kind() -> None:
    with_counts = CallCounter(AccountingDriver(PAGE, budget=16 * PAGE))
    va = with_counts.reserve(4 * PAGE)
    handles = [with_counts.create(PAGE) for _ in range(3)]
    for index, handle in enumerate(handles):
        with_counts.map(va + index * PAGE, PAGE, handle)
    with_counts.set_access(va, 3 * PAGE, RW)
    raises(with_counts.map, va, PAGE, handles[0])
    with_counts.unmap(va, 3 * PAGE)
    assert with_counts.counts == {
        "reserve": 1,
        "free": 0,
        "create": 3,
        "release": 0,
        "map": 4,
        "set_access": 1,
        "unmap": 1,
    }
    assert with_counts.total == 10
    assert all((with_counts.seconds[kind] > 0) == (n > 0) for kind, n in with_counts.counts.items())
    with_counts.reset()
    assert with_counts.total == 0 and not any(with_counts.seconds.values())


def test_the_factory_knows_cpu_and_cuda_only() -> None:
    driver = open_driver("cpu", granularity=2 << 20, budget=4 << 20)
    assert (driver.name, driver.granularity, driver.device.type) == ("host", 2 << 20, "cpu")
    driver.close()
    with pytest.raises(ValueError, match="xpu"):
        open_driver("xpu")


def test_no_cuda_driver_without_a_gpu_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vattn.vmm.cuda._bindings", _no_library)
    with pytest.raises(DriverUnavailable, match="CUDA device 0 cannot be used: no libcuda"):
        open_driver("cuda:0")


class _no_library:
    class cuda_error(RuntimeError):
        pass

    @staticmethod
    def cuInit(flags: int) -> None:
        raise RuntimeError("no libcuda")
