"""A driver that fails at its n-th call, for every n of every scenario, leaves the books balanced.

Each scenario is prepared on a healthy driver, then acts once on one that fails. If the act raises, state is
as before or, where the contract says so, as after with pages waiting to be unmapped. Then the driver heals,
the act is tried again where it had not happened, and everything is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.vmm.events import FakeEvent
from tests.vmm.faulty import FaultyDriver
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import Driver, DriverError, OutOfMemory
from vattn.vmm.growable import GrowableTensor
from vattn.vmm.host import HostDriver
from vattn.vmm.mapper import Mapper
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

PAGE = 64 << 10
ROWS, PER_ROW, BUDGET = 4, 8, 20


@dataclass
class Scenario:
    """`prepare` on a healthy driver, then `act` on a failing one."""

    name: str
    prepare: Callable[[AddressSpace], object]
    act: Callable[[AddressSpace], object]
    undone: bool = True  # a failed act leaves the page tables as they were


def shared_rows(space: AddressSpace) -> None:
    space.extend(0, 4)
    space.alias(1, space.pages(0)[:3])
    space.extend(1, 2)


def parked_rows(space: AddressSpace) -> None:
    shared_rows(space)
    space.extend(2, 3)
    for row in (1, 2, 0):
        space.park(row)


def retiring_row(space: AddressSpace) -> None:
    space.extend(0, 5)
    space.alias(1, space.pages(0)[2:3])
    space.retirement.submit(FakeEvent())
    space.truncate(0, 1)


SCENARIOS = [
    Scenario("extend one row", lambda s: s.extend(0, 2), lambda s: s.extend(0, 4)),
    Scenario("extend three rows", shared_rows, lambda s: s.extend_all([0, 2, 3], [2, 5, 1])),
    Scenario("extend neighbours", lambda s: s.extend(0, 3), lambda s: s.extend_all([0, 1], [5, 3])),
    Scenario("alias", shared_rows, lambda s: s.alias(2, s.pages(1))),
    Scenario(
        "alias, then extend", shared_rows, lambda s: (s.alias(2, s.pages(0)), s.extend(2, 2)), undone=False
    ),
    Scenario("truncate", shared_rows, lambda s: s.truncate(1, 1), undone=False),
    Scenario("clear", shared_rows, lambda s: s.clear(0), undone=False),
    Scenario("adopt and grow", parked_rows, lambda s: (s.adopt(2), s.extend(2, 2)), undone=False),
    Scenario("reclaim", parked_rows, lambda s: s.reclaim(7), undone=False),
    Scenario("take back and grow", retiring_row, lambda s: s.extend(0, 6)),
    Scenario("alias over a retiring tail", retiring_row, lambda s: s.alias(0, s.pages(1))),
    Scenario("drain", retiring_row, lambda s: s.retirement.drain()),
    Scenario("trim", lambda s: (s.extend(0, 6), s.clear(0)), lambda s: s.pool.trim()),
    Scenario("lower the budget", lambda s: (s.extend(0, 6), s.clear(0)), lambda s: s.pool.resize(3 * PAGE)),
    Scenario("close", parked_rows, lambda s: s.close(), undone=False),
]


def build(driver: Driver) -> AddressSpace:
    return AddressSpace(driver, PagePool(driver, PAGE, BUDGET * PAGE), ROWS, PER_ROW * PAGE)


def tables(space: AddressSpace) -> list[tuple[int, ...]]:
    return [space.pages(row) for row in range(ROWS)]


def check(space: AddressSpace) -> None:
    space.check({})
    space.pool.check()
    space.driver.check()  # type: ignore[attr-defined]


def calls_of(scenario: Scenario) -> int:
    driver = FaultyDriver(AccountingDriver(PAGE, budget=BUDGET * PAGE))
    space = build(driver)
    scenario.prepare(space)
    driver.arm(1 << 30)
    scenario.act(space)
    return driver.calls


CASES = [(scenario, n) for scenario in SCENARIOS for n in range(1, calls_of(scenario) + 1)]


def test_every_scenario_makes_driver_calls() -> None:
    assert {scenario.name for scenario, _ in CASES} == {scenario.name for scenario in SCENARIOS}
    assert len(CASES) > 80


@pytest.mark.parametrize("lasting", [False, True], ids=["one failure", "failing from there on"])
@pytest.mark.parametrize(("scenario", "n"), CASES, ids=[f"{s.name}, call {n}" for s, n in CASES])
def test_a_failure_at_any_call_leaves_the_books_balanced(scenario: Scenario, n: int, lasting: bool) -> None:
    driver = FaultyDriver(AccountingDriver(PAGE, budget=BUDGET * PAGE), lasting=lasting)
    space = build(driver)
    scenario.prepare(space)
    before = tables(space)
    driver.arm(n)
    result: object = None
    try:
        result = scenario.act(space)
    except DriverError as error:
        assert error.hint == "injected"
        if scenario.undone:
            assert tables(space) == before
    else:
        # Only a create may fail without an exception: that is exhaustion.
        assert driver.failures[0] == "create" and result is not None
        assert result is False or not scenario.undone
    assert driver.failures
    check(space)

    driver.heal()
    if scenario.undone and not lasting:
        assert scenario.act(space) is not False
        check(space)
    space.close()
    check(space)
    assert space.pool.in_use_bytes == 0
    space.pool.close()
    assert driver.memory_info() == (BUDGET * PAGE, BUDGET * PAGE)


def test_pages_that_cannot_be_unmapped_stay_in_use_until_they_can() -> None:
    driver = FaultyDriver(
        AccountingDriver(PAGE, budget=BUDGET * PAGE), kinds=["set_access", "unmap"], lasting=True
    )
    space = build(driver)
    space.extend(0, 1)
    driver.arm(1)
    with pytest.raises(DriverError) as caught:
        space.extend(0, 3)
    assert any("3 pages of row 0 could not be unmapped" in note for note in caught.value.__notes__)
    assert space.mapped(0) == 1 and space.retiring_bytes == 3 * PAGE and space.pool.in_use_bytes == 4 * PAGE
    check(space)
    with pytest.raises(DriverError):
        space.extend(0, 1)
    driver.heal()
    assert space.extend(0, 2)
    assert space.retiring_bytes == 0 and space.pool.in_use_bytes == 3 * PAGE
    check(space)


def test_one_row_that_cannot_be_unmapped_does_not_keep_the_others_from_it() -> None:
    driver = FaultyDriver(AccountingDriver(PAGE, budget=BUDGET * PAGE), kinds=["unmap"])
    space = build(driver)
    space.extend_all([0, 1, 2], 3)
    for row in range(3):
        space.park(row)
    driver.arm(2)
    with pytest.raises(DriverError):
        space.reclaim(9)
    assert [space.mapped(row) for row in range(3)] == [0, 0, 0]
    assert space.retiring_bytes == 3 * PAGE and space.pool.in_use_bytes == 3 * PAGE
    check(space)
    space.adopt(1)
    assert space.extend(1, 3) and space.retiring_bytes == 0, "its pages are as good as before"
    check(space)


@pytest.mark.parametrize("n", range(1, 12))
def test_growing_a_tensor_is_all_or_nothing(n: int) -> None:
    host = HostDriver(PAGE, budget=BUDGET * PAGE)
    driver = FaultyDriver(host)
    tensor = GrowableTensor((PAGE // 8,), torch.float32, 64, driver=driver)
    tensor.grow(3)
    tensor.view().fill_(1)
    address, mapped = tensor.data_ptr(), tensor.nbytes_mapped
    driver.arm(n)
    try:
        tensor.grow(6)
    except DriverError as error:
        assert isinstance(error, OutOfMemory) == (driver.failures[0] == "create")
        driver.heal()
        assert (len(tensor), tensor.nbytes_mapped) == (3, mapped)
        tensor.check()
        tensor.grow(6)
    else:
        assert not driver.failures
    driver.heal()
    assert tensor.data_ptr() == address and tensor.view()[:3].eq(1).all()
    tensor.view().fill_(2)
    tensor.check()
    tensor.close()
    assert host.memory_info() == (BUDGET * PAGE, BUDGET * PAGE)
    host.check()
    host.close()


@pytest.mark.parametrize("n", range(1, 4))
def test_a_tensor_that_cannot_be_made_leaves_nothing_behind(n: int) -> None:
    host = HostDriver(PAGE, budget=BUDGET * PAGE)
    driver = FaultyDriver(host)
    driver.arm(n)
    try:
        tensor = GrowableTensor((16,), torch.float32, 64, driver=driver)
        tensor.grow(1)
    except DriverError:
        driver.heal()
    tensor = None  # type: ignore[assignment]
    assert host.memory_info()[0] == BUDGET * PAGE and not host.shadow.reservations
    host.close()


@pytest.mark.parametrize("n", range(1, 9))
def test_mapping_ahead_reports_the_failure_to_the_row_that_needed_it(n: int) -> None:
    driver = FaultyDriver(AccountingDriver(PAGE, budget=BUDGET * PAGE))
    space = build(driver)
    space.pool.reserve(8)
    mapper = Mapper()
    driver.arm(n)
    for row in range(ROWS):  # two calls each: map and set_access
        mapper.submit(row, lambda row=row: space.extend(row, 1))
    failed = []
    for row in range(ROWS):
        try:
            mapper.wait([row])
        except DriverError:
            failed.append(row)
            assert space.mapped(row) == 0
        else:
            assert space.mapped(row) == 1
    assert len(failed) == len(driver.failures) == 1
    mapper.drain()
    mapper.close()
    check(space)
    driver.heal()
    assert space.extend(failed[0], 1)
    check(space)
