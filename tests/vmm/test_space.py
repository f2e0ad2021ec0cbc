"""Rows that grow, share, shrink and rest: what each call does to pages, memory and the driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.vmm.events import FakeEvent
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import Access, CallCounter
from vattn.vmm.host import HostDriver
from vattn.vmm.pool import PagePool
from vattn.vmm.retire import Retirement
from vattn.vmm.space import AddressSpace

PAGE = 64 << 10
ROWS, PER_ROW, BUDGET = 4, 8, 16


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    """4 rows of 8 pages over a pool of 16, on real memory, with every driver call counted."""
    driver = CallCounter(HostDriver(PAGE, budget=(BUDGET + 4) * PAGE))
    space = AddressSpace(driver, PagePool(driver, PAGE, BUDGET * PAGE), ROWS, PER_ROW * PAGE)
    driver.reset()
    yield space
    space.check()
    space.pool.check()
    space.close()
    driver.close()


def counts(space: AddressSpace) -> dict[str, int]:
    """Driver calls since the last look, without zeros."""
    assert isinstance(space.driver, CallCounter)
    found = {kind: n for kind, n in space.driver.counts.items() if n}
    space.driver.reset()
    return found


def row_bytes(space: AddressSpace, row: int) -> torch.Tensor:
    return space.tensor((ROWS, space.pitch), None, torch.uint8)[row]


# Growth


def test_a_new_space_holds_addresses_and_nothing_else(space: AddressSpace) -> None:
    assert space.reserved_bytes == ROWS * PER_ROW * PAGE
    assert (space.mapped_bytes, space.pool.created_bytes) == (0, 0)
    assert (space.pitch, space.pages_per_row) == (PER_ROW * PAGE, PER_ROW)
    assert [space.address(row) - space.base for row in range(ROWS)] == [
        row * space.pitch for row in range(ROWS)
    ]


def test_the_pitch_is_rounded_up_to_a_page() -> None:
    driver = AccountingDriver(PAGE)
    space = AddressSpace(driver, PagePool(driver, PAGE, PAGE), 3, 2 * PAGE + 1)
    assert (space.pitch, space.pages_per_row) == (3 * PAGE, 3)


def test_extend_maps_each_page_and_grants_access_once(space: AddressSpace) -> None:
    assert space.extend(1, 5)
    assert counts(space) == {"create": 5, "map": 5, "set_access": 1}
    assert space.pages(1) == (0, 1, 2, 3, 4) and space.mapped(1) == 5
    row_bytes(space, 1)[: 5 * PAGE].fill_(1)
    assert space.extend(1, 2)
    assert counts(space) == {"create": 2, "map": 2, "set_access": 1}
    row_bytes(space, 1)[5 * PAGE : 7 * PAGE].fill_(2)
    assert row_bytes(space, 1)[: 5 * PAGE].eq(1).all(), "what was there stays there"


def test_extend_all_grants_access_once_per_contiguous_span(space: AddressSpace) -> None:
    assert space.extend_all([0, 2, 3], [PER_ROW, 3, 2])
    assert counts(space) == {"create": 13, "map": 13, "set_access": 3}


def test_rows_that_meet_are_one_span(space: AddressSpace) -> None:
    assert space.extend_all([1, 0], [3, PER_ROW])
    assert counts(space)["set_access"] == 1
    space.tensor((space.pitch + 3 * PAGE,), None, torch.uint8).fill_(1)


def test_extend_all_takes_one_count_for_all_rows(space: AddressSpace) -> None:
    assert space.extend_all(range(ROWS), 2)
    assert [space.mapped(row) for row in range(ROWS)] == [2, 2, 2, 2]


def test_a_short_pool_is_false_and_changes_nothing(space: AddressSpace) -> None:
    assert space.extend_all([0, 1], PER_ROW - 1)
    before = [space.pages(row) for row in range(ROWS)], space.pool.in_use_bytes
    counts(space)
    assert not space.extend_all([2, 3], [2, 1])
    assert counts(space) == {}
    assert ([space.pages(row) for row in range(ROWS)], space.pool.in_use_bytes) == before
    assert space.extend_all([2, 3], [1, 1])


def test_extending_by_nothing_calls_nobody(space: AddressSpace) -> None:
    assert space.extend(0, 0) and space.extend_all([], 3) and space.extend_all([1, 2], [0, 0])
    assert counts(space) == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda space: space.extend(0, -1),
        lambda space: space.extend(0, PER_ROW + 1),
        lambda space: space.extend(ROWS, 1),
        lambda space: space.extend(-1, 1),
        lambda space: space.extend_all([1, 1], 1),
        lambda space: space.extend_all([1, 2], [1]),
        lambda space: space.extend_all([1, 2], [1, PER_ROW + 1]),
        lambda space: space.alias(1, [0] * (PER_ROW + 1)),
        lambda space: space.alias(1, [7]),
        lambda space: space.alias(1, [0, 7]),
        lambda space: space.truncate(0, 4),
        lambda space: space.truncate(0, -1),
        lambda space: space.adopt(0),
        lambda space: space.pages(9),
        lambda space: space.tensor((ROWS, PER_ROW * PAGE + 1), None, torch.uint8),
        lambda space: space.tensor((1,), None, torch.uint8, offset=-1),
        lambda space: space.tensor((1,), None, torch.float32, offset=2),
        lambda space: space.tensor((2,), (ROWS * PER_ROW * PAGE,), torch.uint8),
    ],
)
def test_wrong_arguments_are_refused_before_anything_happens(space: AddressSpace, call: object) -> None:
    assert space.extend(0, 3)
    counts(space)
    with pytest.raises(ValueError):
        call(space)  # type: ignore[operator]
    assert counts(space) == {} and space.pages(0) == (0, 1, 2) and space.pool.in_use_bytes == 3 * PAGE
    space.check({})


# Sharing


def test_an_alias_is_the_same_memory_and_takes_none(space: AddressSpace) -> None:
    space.extend(0, 3)
    row_bytes(space, 0)[: 3 * PAGE].fill_(5)
    in_use = space.pool.in_use_bytes
    counts(space)
    space.alias(2, space.pages(0)[:2])
    assert counts(space) == {"map": 2, "set_access": 1} and space.pool.in_use_bytes == in_use
    assert row_bytes(space, 2)[: 2 * PAGE].eq(5).all()
    row_bytes(space, 0)[17] = 6
    assert row_bytes(space, 2)[17] == 6
    assert [m.access for m in space.driver.mappings(space.address(2), space.pitch) or []] == [Access.READ] * 2
    assert [space.pool.refs(page) for page in space.pages(0)] == [2, 2, 1]


def test_behind_an_alias_a_row_grows_on_pages_of_its_own(space: AddressSpace) -> None:
    space.extend(0, 2)
    space.alias(1, space.pages(0))
    assert space.extend(1, 2)
    row_bytes(space, 1)[2 * PAGE : 4 * PAGE].fill_(9)
    assert not set(space.pages(1)[2:]) & set(space.pages(0))
    assert not space.private(1) and space.private(1, 2)
    assert not space.private(0), "its pages are seen by others now"


def test_a_read_only_page_is_not_private_even_when_nobody_else_is_left(space: AddressSpace) -> None:
    space.extend(0, 1)
    space.alias(1, space.pages(0))
    space.clear(0)
    assert space.pool.refs(space.pages(1)[0]) == 1 and not space.private(1)


def test_shared_pages_outlive_the_row_they_came_from(space: AddressSpace) -> None:
    space.extend(0, 2)
    row_bytes(space, 0)[: 2 * PAGE].fill_(3)
    space.alias(1, space.pages(0))
    space.clear(0)
    assert space.pool.in_use_bytes == 2 * PAGE and row_bytes(space, 1)[: 2 * PAGE].eq(3).all()
    space.clear(1)
    assert space.pool.in_use_bytes == 0


def test_pages_kept_by_a_holder_can_be_aliased_later(space: AddressSpace) -> None:
    space.extend(0, 1)
    row_bytes(space, 0)[:PAGE].fill_(4)
    (page,) = space.pages(0)
    space.pool.retain(page)
    space.clear(0)
    space.check({page: 1})
    space.alias(3, [page])
    assert row_bytes(space, 3)[:PAGE].eq(4).all()
    space.pool.release(page)
    space.check({})


def test_one_page_may_be_mapped_twice_in_a_row(space: AddressSpace) -> None:
    space.extend(0, 1)
    space.alias(1, [*space.pages(0), *space.pages(0)])
    assert space.pool.refs(0) == 3
    space.truncate(1, 1)
    assert space.pool.refs(0) == 2


# Shrinking


def test_truncate_unmaps_in_one_call_and_keeps_the_memory_in_the_pool(space: AddressSpace) -> None:
    space.extend(0, 6)
    row_bytes(space, 0)[: 6 * PAGE].fill_(1)
    counts(space)
    space.truncate(0, 2)
    assert counts(space) == {"unmap": 1}
    assert space.mapped(0) == 2 and space.pool.free_bytes == 4 * PAGE
    assert row_bytes(space, 0)[: 2 * PAGE].eq(1).all()
    space.truncate(0, 2)
    assert counts(space) == {}
    space.clear(0)
    assert counts(space) == {"unmap": 1} and space.mapped_bytes == 0


def test_growing_again_needs_no_new_memory(space: AddressSpace) -> None:
    space.extend(0, 6)
    space.clear(0)
    counts(space)
    space.extend(1, 6)
    assert counts(space) == {"map": 6, "set_access": 1}


# Retirement


@pytest.fixture
def running(space: AddressSpace) -> tuple[AddressSpace, FakeEvent]:
    """Row 0 has 4 pages and a step that reads all of them is in flight."""
    space.extend(0, 4)
    row_bytes(space, 0)[: 4 * PAGE].fill_(1)
    event = FakeEvent(on_finish=lambda: row_bytes(space, 0)[: 4 * PAGE].sum())  # dies if unmapped
    space.retirement.submit(event)
    counts(space)
    return space, event


def test_nothing_is_unmapped_under_a_running_step(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, event = running
    space.truncate(0, 1)
    assert counts(space) == {} and space.mapped(0) == 1
    assert space.retiring_bytes == 3 * PAGE and space.pool.in_use_bytes == 4 * PAGE
    assert (space.retiring(0), space.retiring(1)) == (3, 0)
    space.check({})
    event.finish()
    assert space.retirement.poll() == 1 and counts(space) == {"unmap": 1}
    assert space.retiring_bytes == 0 and space.pool.in_use_bytes == PAGE


def test_truncated_pages_are_taken_back_without_a_driver_call(
    running: tuple[AddressSpace, FakeEvent],
) -> None:
    space, event = running
    pages = space.pages(0)
    space.clear(0)
    assert space.extend(0, 3) and counts(space) == {}
    assert space.pages(0) == pages[:3] and space.retiring_bytes == PAGE
    event.finish()
    space.retirement.poll()
    assert space.mapped(0) == 3 and space.retiring_bytes == 0
    row_bytes(space, 0)[: 3 * PAGE].fill_(2)


def test_taking_back_and_growing_on_are_one_transaction(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, _ = running
    space.truncate(0, 1)
    assert space.extend(0, 5) and counts(space) == {"create": 2, "map": 2, "set_access": 1}
    assert space.mapped(0) == 6 and space.retiring_bytes == 0
    space.check({})


def test_a_shared_page_is_never_taken_back(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, event = running
    shared = space.pages(0)[2]
    space.alias(1, [shared])
    counts(space)
    space.truncate(0, 1)
    assert space.extend(0, 1) and counts(space) == {}, "page 1 is private"
    assert space.extend(0, 1), "page 2 is not"
    assert event.waited == 1 and counts(space)["unmap"] == 1
    assert shared not in space.pages(0) and space.private(0)


def test_a_page_a_holder_refers_to_is_never_taken_back(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, event = running
    held = space.pages(0)[0]
    space.pool.retain(held)
    space.clear(0)
    assert space.extend(0, 1) and event.waited == 1
    assert held not in space.pages(0)
    space.pool.release(held)


def test_an_alias_waits_for_the_tail_it_would_lie_on(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, event = running
    space.extend(1, 1)
    space.clear(0)
    space.alias(0, space.pages(1))
    assert event.waited == 1 and space.pages(0) == space.pages(1)


def test_a_short_pool_first_takes_what_has_retired_meanwhile(running: tuple[AddressSpace, FakeEvent]) -> None:
    space, event = running
    space.extend_all([1, 2], [8, 4])
    space.clear(0)
    assert not space.extend(3, 1), "the step may still read row 0"
    event.finish()
    assert space.extend(3, 4)


def test_cuts_of_different_epochs_are_unmapped_as_their_steps_end(space: AddressSpace) -> None:
    space.extend(0, 6)
    first, second = FakeEvent(), FakeEvent()
    space.retirement.submit(first)
    space.truncate(0, 4)
    space.retirement.submit(second)
    space.truncate(0, 1)
    assert space.retiring_bytes == 5 * PAGE
    first.finish()
    space.retirement.poll()
    assert space.retiring_bytes == 3 * PAGE
    second.finish()
    space.retirement.poll()
    assert space.retiring_bytes == 0 and space.mapped(0) == 1


def test_a_retirement_can_be_shared_by_spaces() -> None:
    driver, retirement = AccountingDriver(PAGE), Retirement()
    pool = PagePool(driver, PAGE, 8 * PAGE)
    spaces = [AddressSpace(driver, pool, 1, 4 * PAGE, retirement) for _ in range(2)]
    event = FakeEvent()
    for space in spaces:
        space.extend(0, 2)
    retirement.submit(event)
    for space in spaces:
        space.clear(0)
    assert pool.in_use_bytes == 4 * PAGE
    event.finish()
    assert retirement.poll() == 2 and pool.in_use_bytes == 0


# Parking


def test_a_parked_row_is_adopted_as_it_lies(space: AddressSpace) -> None:
    space.extend(2, 3)
    row_bytes(space, 2)[: 3 * PAGE].fill_(8)
    counts(space)
    space.park(2)
    assert space.parked == (2,)
    space.adopt(2)
    assert space.parked == () and counts(space) == {}
    assert space.mapped(2) == 3 and row_bytes(space, 2)[: 3 * PAGE].eq(8).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda space: space.extend(0, 1),
        lambda space: space.alias(0, [0]),
        lambda space: space.truncate(0, 0),
        lambda space: space.clear(0),
        lambda space: space.park(0),
    ],
)
def test_a_parked_row_is_left_alone(space: AddressSpace, call: object) -> None:
    space.extend(0, 2)
    space.park(0)
    with pytest.raises(ValueError, match="parked"):
        call(space)  # type: ignore[operator]


def test_reclaim_takes_tails_least_recently_parked_first(space: AddressSpace) -> None:
    space.extend_all([0, 1, 2], [3, 4, 2])
    for row in (1, 0, 2):
        space.park(row)
    assert space.parked == (1, 0, 2)
    counts(space)
    assert space.reclaim(2) == 2
    assert [space.mapped(row) for row in (1, 0, 2)] == [2, 3, 2] and counts(space) == {"unmap": 1}
    assert space.reclaim(4) == 4
    assert [space.mapped(row) for row in (1, 0, 2)] == [0, 1, 2]
    assert space.parked == (1, 0, 2), "an emptied row stays parked"
    assert space.reclaim(100) == 3 and space.reclaim(1) == 0


def test_reclaim_counts_only_pages_that_become_free(space: AddressSpace) -> None:
    space.extend(0, 3)
    space.alias(1, space.pages(0)[:2])
    space.extend(1, 1)
    space.park(1)
    assert space.reclaim(3) == 1
    assert space.mapped(1) == 2, "unmapping what row 0 uses anyway frees nothing"
    space.park(0)
    assert space.reclaim(3) == 3
    assert space.pool.in_use_bytes == 0


def test_pages_shared_by_parked_rows_alone_are_reclaimed(space: AddressSpace) -> None:
    space.extend(0, 2)
    space.alias(1, space.pages(0))
    space.park(0)
    space.park(1)
    assert space.reclaim(1) == 1
    assert (space.mapped(0), space.mapped(1)) == (1, 1)


def test_live_rows_are_never_reclaimed(space: AddressSpace) -> None:
    space.extend_all([0, 1], 2)
    space.park(0)
    assert space.reclaim(4) == 2 and space.mapped(1) == 2


# End of life


def test_close_gives_pages_and_addresses_back(space: AddressSpace) -> None:
    space.extend_all([0, 1], 4)
    space.park(1)
    event = FakeEvent()
    space.retirement.submit(event)
    space.clear(0)
    space.close()
    assert event.waited == 1, "the device first"
    assert (space.pool.in_use_bytes, space.mapped_bytes, space.reserved_bytes) == (0, 0, 0)
    space.close()
    for call in (
        lambda: space.extend(0, 1),
        lambda: space.park(0),
        lambda: space.tensor((1,), None, torch.uint8),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_close_after_the_driver_was_closed_only_settles_the_books(space: AddressSpace) -> None:
    space.extend(0, 4)
    space.driver.close()
    space.close()
    assert space.pool.in_use_bytes == 0 and space.mapped_bytes == 0


def test_the_check_notices_a_mapping_behind_its_back(space: AddressSpace) -> None:
    space.extend(0, 2)
    space.driver.unmap(space.address(0) + PAGE, PAGE)
    with pytest.raises(AssertionError, match="other pages than the tables say"):
        space.check()
    space.driver.map(space.address(0) + PAGE, PAGE, space.pool.handle(1))
    with pytest.raises(AssertionError, match="access NONE"):
        space.check()
    space.driver.set_access(space.address(0) + PAGE, PAGE, Access.READ_WRITE)
    space.check({})
    space.pool.retain(0)
    with pytest.raises(AssertionError, match="2 references, 1 accounted for"):
        space.check({})
    space.pool.release(0)


@pytest.mark.parametrize(("rows", "row_size"), [(0, PAGE), (4, 0), (-1, PAGE), (1, -5)])
def test_a_space_without_rows_or_bytes_is_refused(rows: int, row_size: int) -> None:
    driver = AccountingDriver(PAGE)
    with pytest.raises(ValueError):
        AddressSpace(driver, PagePool(driver, PAGE, PAGE), rows, row_size)
    assert not driver.shadow.reservations


def test_a_thousand_rows_of_a_terabyte_each_need_no_memory() -> None:
    driver = AccountingDriver(2 << 20, budget=1 << 50)
    pool = PagePool(driver, 2 << 20, 1 << 50)
    space = AddressSpace(driver, pool, 1000, 1 << 40)
    assert space.extend_all(range(1000), 16)
    assert space.mapped_bytes == 16_000 * (2 << 20) and space.tensor((1 << 40,), None, torch.uint8).is_meta
    for row in range(1000):
        space.clear(row)
    assert pool.in_use_bytes == 0
    space.check({})
