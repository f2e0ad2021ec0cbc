"""Pages under a budget: exhaustion is a value, nothing is lost, the counts always add up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vmm.faulty import FaultyDriver
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import CallCounter, DriverError
from vattn.vmm.pool import PagePool

PAGE = 64 << 10


def make(pages: int, memory: int = 1 << 20) -> tuple[CallCounter, PagePool]:
    driver = CallCounter(AccountingDriver(PAGE, budget=memory * PAGE))
    return driver, PagePool(driver, PAGE, pages * PAGE)


def test_acquire_is_all_or_nothing() -> None:
    _, pool = make(4)
    assert pool.acquire(5) is None and pool.created_bytes == 0
    assert pool.acquire(3) == [0, 1, 2]
    assert pool.acquire(2) is None and pool.in_use_bytes == 3 * PAGE
    assert pool.acquire(1) == [3]
    assert pool.acquire(0) == []
    pool.check()


def test_a_page_returns_with_its_last_reference() -> None:
    _, pool = make(2)
    (page,) = pool.acquire(1) or []
    pool.retain(page)
    pool.release(page)
    assert (pool.refs(page), pool.free_bytes) == (1, 0)
    pool.release(page)
    assert (pool.refs(page), pool.free_bytes) == (0, PAGE)


def test_pages_are_created_once_and_kept() -> None:
    driver, pool = make(4)
    for _ in range(10):
        pages = pool.acquire(4)
        assert pages is not None
        pool.release_all(pages)
    assert driver.counts["create"] == 4 and driver.counts["release"] == 0


def test_the_lowest_pages_go_first() -> None:
    _, pool = make(8)
    pages = pool.acquire(8) or []
    for page in (6, 1, 4):
        pool.release(pages[page])
    assert pool.acquire(2) == [1, 4]


def test_trim_gives_free_memory_back() -> None:
    driver, pool = make(8)
    pool.acquire(3)
    spare = pool.acquire(5) or []
    pool.release_all(spare)
    assert pool.trim() == 5 * PAGE and pool.trim() == 0
    assert driver.counts["release"] == 5 and pool.created_bytes == 3 * PAGE
    assert pool.available_pages == 5 and len(pool.acquire(5) or []) == 5
    pool.check()


def test_reserve_creates_up_front_within_the_budget() -> None:
    driver, pool = make(8)
    assert pool.reserve(5) == 5 and driver.counts["create"] == 5
    pool.acquire(5)
    assert driver.counts["create"] == 5
    assert pool.reserve(100) == 3 and driver.counts["create"] == 8


def test_a_driver_without_memory_is_exhaustion_too_and_loses_nothing() -> None:
    _, pool = make(8, memory=3)
    assert pool.acquire(5) is None
    assert pool.free_bytes == 3 * PAGE and pool.in_use_bytes == 0
    assert len(pool.acquire(3) or []) == 3
    assert pool.reserve(1) == 0
    pool.check()


def test_any_other_driver_error_is_raised_and_loses_nothing() -> None:
    class Broken(AccountingDriver):
        def create(self, size: int, shareable: bool = False) -> int:
            raise DriverError("create", 700)

    pool = PagePool(Broken(PAGE), PAGE, 8 * PAGE)
    with pytest.raises(DriverError):
        pool.acquire(1)
    assert pool.created_bytes == 0
    pool.check()


def test_the_budget_can_be_raised() -> None:
    _, pool = make(1)
    assert pool.acquire(2) is None
    pool.resize(2 * PAGE)
    assert pool.acquire(2) == [0, 1]


def test_a_lower_budget_takes_free_pages_at_once() -> None:
    _, pool = make(8)
    used, spare = pool.acquire(2) or [], pool.acquire(6) or []
    pool.release_all(spare)
    pool.resize(4 * PAGE)
    assert (pool.created_bytes, pool.in_use_bytes, pool.available_pages) == (4 * PAGE, 2 * PAGE, 2)
    pool.resize(2 * PAGE)
    assert pool.created_bytes == len(used) * PAGE
    pool.check()


def test_the_highest_free_pages_are_given_back_first() -> None:
    _, pool = make(8)
    pages = pool.acquire(8) or []
    pool.release_all([pages[index] for index in (7, 0, 5, 2, 6, 3)])
    pool.resize(4 * PAGE)
    assert pool.acquire(2) == [0, 2], "low pages stay, so that mappings stay neighbours"


def test_a_budget_below_what_is_in_use_is_refused_with_the_figures() -> None:
    _, pool = make(8)
    pool.acquire(3)
    pool.release_all(pool.acquire(2) or [])
    with pytest.raises(ValueError, match=f"{2 * PAGE:,} bytes is less than the {3 * PAGE:,} bytes in use"):
        pool.resize(2 * PAGE)
    assert pool.budget_bytes == 8 * PAGE and pool.free_bytes == 2 * PAGE


def test_a_budget_is_whole_pages() -> None:
    pool = PagePool(AccountingDriver(PAGE), PAGE, 5 * PAGE - 1)
    assert pool.budget_bytes == 4 * PAGE and pool.available_pages == 4


@pytest.mark.parametrize("page_bytes", [0, -PAGE, 1, PAGE + 4096, PAGE // 2])
def test_page_sizes_are_multiples_of_the_granularity(page_bytes: int) -> None:
    with pytest.raises(ValueError, match="granularity"):
        PagePool(AccountingDriver(PAGE), page_bytes, 1 << 20)


def test_wrong_use_is_refused_before_anything_changes() -> None:
    _, pool = make(4)
    (page,) = pool.acquire(1) or []
    for wrong in (-1, 1, 99):
        for call in (pool.retain, pool.release, pool.handle):
            with pytest.raises(ValueError):
                call(wrong)
        assert pool.refs(wrong) == 0
    with pytest.raises(ValueError):
        pool.retain_all([page, 3])
    with pytest.raises(ValueError):
        pool.acquire(-1)
    with pytest.raises(ValueError):
        PagePool(AccountingDriver(PAGE), PAGE, -1)
    with pytest.raises(ValueError, match="still in use"):
        pool.close()
    assert pool.refs(page) == 1
    pool.check()


def test_close_gives_everything_back() -> None:
    driver, pool = make(4)
    pool.release_all(pool.acquire(4) or [])
    pool.close()
    pool.close()
    assert driver.memory_info()[0] == driver.memory_info()[1]


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, over a driver that now and then has no memory, against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FaultyDriver(AccountingDriver(PAGE, budget=24 * PAGE), kinds=["create", "release"])
        self.pool = PagePool(self.driver, PAGE, 16 * PAGE)
        self.refs: dict[int, int] = {}
        self.budget = 16

    @rule(n=st.integers(0, 10))
    def acquire(self, n: int) -> None:
        pages = self.pool.acquire(n)
        if pages is None:
            assert len(self.refs) + n > self.budget or self.driver.failures
        else:
            assert len(set(pages)) == n and not self.refs.keys() & set(pages)
            self.refs.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.retain(page)
        self.refs[page] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release(page)
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.refs[page]

    @rule()
    def trim(self) -> None:
        try:
            self.pool.trim()
        except DriverError:
            assert self.driver.failures
        else:
            assert self.pool.free_bytes == 0

    @rule(pages=st.integers(0, 24))
    def resize(self, pages: int) -> None:
        try:
            self.pool.resize(pages * PAGE)
        except ValueError:
            assert pages < len(self.refs)
        except DriverError:
            assert self.driver.failures
        else:
            self.budget = pages

    @rule(n=st.integers(0, 20))
    def create_up_front(self, n: int) -> None:
        assert self.pool.reserve(n) <= n

    @rule(n=st.integers(1, 4))
    def break_the_driver_soon(self, n: int) -> None:
        self.driver.failures.clear()
        self.driver.arm(n)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        self.driver.check()
        assert {page: self.pool.refs(page) for page in self.refs} == self.refs
        assert self.pool.in_use_bytes == len(self.refs) * PAGE
        assert self.pool.budget_bytes == self.budget * PAGE
        free, total = self.driver.memory_info()
        assert total - free == self.pool.created_bytes


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
