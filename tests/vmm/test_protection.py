"""What may not be touched kills whoever touches it: shown on children of this process."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.vmm.events import FakeEvent
from vattn.vmm.driver import Access
from vattn.vmm.growable import GrowableTensor
from vattn.vmm.host import HostDriver
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

PAGE = 64 << 10
ROWS, PER_ROW = 4, 8


def dies(act: Callable[[], object]) -> bool:
    """Whether a child that does `act` is killed by SIGSEGV (True) or lives (False)."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            torch.set_num_threads(1)  # the parent's worker threads do not exist here
            act()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGSEGV), f"the child failed otherwise: {status}"
    return status == -signal.SIGSEGV


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    driver = HostDriver(PAGE, budget=32 * PAGE)
    space = AddressSpace(driver, PagePool(driver, PAGE, 32 * PAGE), ROWS, PER_ROW * PAGE)
    yield space
    space.close()
    driver.close()


def page_of(space: AddressSpace, row: int, index: int) -> torch.Tensor:
    return space.tensor((ROWS, PER_ROW, PAGE), None, torch.uint8)[row, index]


def test_reading_or_writing_a_page_that_was_never_mapped(space: AddressSpace) -> None:
    space.extend(0, 2)
    assert not dies(lambda: page_of(space, 0, 1).sum())
    assert dies(lambda: page_of(space, 0, 2).sum())
    assert dies(lambda: page_of(space, 0, 2).fill_(1))
    assert dies(lambda: page_of(space, 1, 0)[0].item())


def test_reading_past_the_last_page_by_one_byte(space: AddressSpace) -> None:
    space.extend(0, 2)
    row = space.tensor((ROWS * PER_ROW * PAGE,), None, torch.uint8)
    assert not dies(lambda: row[2 * PAGE - 1].item())
    assert dies(lambda: row[2 * PAGE].item())


def test_writing_through_a_read_only_alias(space: AddressSpace) -> None:
    space.extend(0, 2)
    page_of(space, 0, 1).fill_(5)
    space.alias(1, space.pages(0))
    assert not dies(lambda: page_of(space, 1, 1).sum().item() == 5 * PAGE or os._exit(1))
    assert dies(lambda: page_of(space, 1, 1)[0].fill_(6))
    assert dies(lambda: page_of(space, 1, 0).add_(1))
    assert page_of(space, 0, 1).eq(5).all()


def test_the_private_page_behind_an_alias_is_writable(space: AddressSpace) -> None:
    space.extend(0, 2)
    space.alias(1, space.pages(0))
    space.extend(1, 1)
    assert not dies(lambda: page_of(space, 1, 2).fill_(1))
    assert dies(lambda: page_of(space, 1, 1).fill_(1))


def test_a_truncated_page_is_out_of_reach(space: AddressSpace) -> None:
    space.extend(0, 3)
    space.truncate(0, 1)
    assert not dies(lambda: page_of(space, 0, 0).sum())
    assert dies(lambda: page_of(space, 0, 1).sum())


def test_a_retiring_page_stays_in_reach_of_the_step_that_may_read_it(space: AddressSpace) -> None:
    space.extend(0, 3)
    event = FakeEvent()
    space.retirement.submit(event)
    space.clear(0)
    assert not dies(lambda: page_of(space, 0, 2).sum())
    event.finish()
    space.retirement.poll()
    assert dies(lambda: page_of(space, 0, 2).sum())


def test_a_parked_row_stays_in_reach_and_a_reclaimed_tail_does_not(space: AddressSpace) -> None:
    space.extend(0, 3)
    space.park(0)
    assert not dies(lambda: page_of(space, 0, 2).sum())
    space.reclaim(1)
    assert dies(lambda: page_of(space, 0, 2).sum())
    assert not dies(lambda: page_of(space, 0, 1).sum())


def test_mapped_pages_are_out_of_reach_until_access_is_granted() -> None:
    driver = HostDriver(PAGE, budget=PAGE)
    va = driver.reserve(PAGE)
    page = driver.tensor(va, (PAGE,), (1,), torch.uint8)
    driver.map(va, PAGE, driver.create(PAGE))
    assert dies(lambda: page.sum())
    driver.set_access(va, PAGE, Access.READ)
    assert not dies(lambda: page.sum())
    assert dies(lambda: page.fill_(1))
    driver.set_access(va, PAGE, Access.READ_WRITE)
    assert not dies(lambda: page.fill_(1))
    driver.set_access(va, PAGE, Access.NONE)
    assert dies(lambda: page.sum())
    driver.close()


def test_a_growable_tensor_ends_where_its_memory_ends() -> None:
    tensor = GrowableTensor((PAGE,), torch.uint8, 8)
    tensor.grow(2)
    beyond = torch.as_strided(tensor.view(), (2, PAGE), (PAGE, 1))
    assert not dies(lambda: beyond.sum())
    old = tensor.view()
    tensor.shrink(1)
    assert not dies(lambda: old[0].sum())
    assert dies(lambda: old[1].sum()), "shrink takes memory from under old views, as documented"
