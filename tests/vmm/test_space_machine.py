"""Any order of calls on an address space, over real memory, with steps in flight and a driver that fails.

The model is plain: a row is a list of cells, a cell is the content of one page; rows that share a page share
its cell. After every rule the books are checked, and everything the model knows is read back.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.vmm.events import FakeEvent
from tests.vmm.faulty import FaultyDriver
from vattn.vmm.driver import DriverError
from vattn.vmm.host import HostDriver
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

PAGE = 4096
ROWS, PER_ROW, BUDGET = 4, 5, 14

rows = st.integers(0, ROWS - 1)
few = st.integers(0, 3)
position = st.integers(0, PER_ROW)


class Cell:
    """Content of one page: every byte of it the same."""

    def __init__(self, value: int) -> None:
        self.value = value


class SpaceMachine(RuleBasedStateMachine):
    @initialize()
    def build(self) -> None:
        self.host = HostDriver(PAGE, budget=BUDGET * PAGE)
        self.driver = FaultyDriver(self.host, kinds=["create", "map", "set_access", "unmap", "release"])
        self.pool = PagePool(self.driver, PAGE, BUDGET * PAGE)
        self.space = AddressSpace(self.driver, self.pool, ROWS, PER_ROW * PAGE)
        self.memory = self.space.tensor((ROWS, PER_ROW, PAGE), None, torch.uint8)
        self.rows: list[list[Cell]] = [[] for _ in range(ROWS)]
        self.parked: list[int] = []
        self.held: Counter[int] = Counter()  # references of a holder, such as a prefix cache
        self.cells: dict[int, Cell] = {}  # by page, for pages held
        self.events: list[FakeEvent] = []
        self.value = 0

    def fresh(self) -> int:
        self.value = self.value % 255 + 1
        return self.value

    def write(self, row: int, index: int) -> None:
        """Fill a page that the row may write, in memory and in the model."""
        cell = self.rows[row][index]
        cell.value = self.fresh()
        self.memory[row, index].fill_(cell.value)

    def grown(self, row: int, count: int) -> None:
        start = len(self.rows[row])
        self.rows[row] += [Cell(0) for _ in range(count)]
        assert self.space.private(row, start), "grown pages are the row's own"
        for index in range(start, start + count):
            self.write(row, index)

    # Growth

    @rule(wanted=st.dictionaries(rows, few, min_size=1))
    def extend_all(self, wanted: dict[int, int]) -> None:
        legal = all(r not in self.parked and len(self.rows[r]) + n <= PER_ROW for r, n in wanted.items())
        try:
            done = self.space.extend_all(list(wanted), list(wanted.values()))
        except ValueError:
            assert not legal
        except DriverError:
            assert self.driver.failures
        else:
            assert legal
            if done:
                for row, count in wanted.items():
                    self.grown(row, count)
            else:
                assert self.pool.available_pages < sum(wanted.values()) or self.driver.failures

    @rule(row=rows, source=rows, left_out=few)
    def alias(self, row: int, source: int, left_out: int) -> None:
        count = max(len(self.rows[source]) - left_out, 0)
        pages = self.space.pages(source)[:count]
        legal = row not in self.parked and len(self.rows[row]) + count <= PER_ROW
        try:
            self.space.alias(row, pages)
        except ValueError:
            assert not legal
        except DriverError:
            assert self.driver.failures
        else:
            assert legal
            self.rows[row] += self.rows[source][:count]

    @precondition(lambda self: self.held)
    @rule(row=rows, which=position)
    def alias_held(self, row: int, which: int) -> None:
        page = sorted(self.held)[which % len(self.held)]
        if row in self.parked or len(self.rows[row]) == PER_ROW:
            return
        try:
            self.space.alias(row, [page])
        except DriverError:
            assert self.driver.failures
        else:
            self.rows[row].append(self.cells[page])

    @rule(row=rows, start=position)
    def write_where_allowed(self, row: int, start: int) -> None:
        if row not in self.parked and self.space.private(row, start):
            for index in range(start, len(self.rows[row])):
                self.write(row, index)

    # Shrinking

    @rule(row=rows, keep=position)
    def truncate(self, row: int, keep: int) -> None:
        keep = min(keep, len(self.rows[row]))
        if row in self.parked:
            return
        try:
            self.space.truncate(row, keep)
        except DriverError:
            assert self.driver.failures
        del self.rows[row][keep:]

    @rule(row=rows)
    def park(self, row: int) -> None:
        if row not in self.parked:
            self.space.park(row)
            self.parked.append(row)

    @precondition(lambda self: self.parked)
    @rule(which=position)
    def adopt(self, which: int) -> None:
        row = self.parked[which % len(self.parked)]
        self.space.adopt(row)
        self.parked.remove(row)

    @rule(n=st.integers(0, 6))
    def reclaim(self, n: int) -> None:
        before = {row: self.space.pages(row) for row in self.parked}
        references = Counter(self.space.references()) + self.held
        for pages in before.values():
            references.subtract(pages)
        freeable = {page for pages in before.values() for page in pages if references[page] == 0}
        try:
            freed = self.space.reclaim(n)
        except DriverError:
            assert self.driver.failures
        else:
            assert freed == min(n, len(freeable))
        for row, pages in before.items():
            left = self.space.pages(row)
            assert left == pages[: len(left)]
            del self.rows[row][len(left) :]

    # Holders

    @rule(row=rows, index=position)
    def hold(self, row: int, index: int) -> None:
        if index < len(self.rows[row]):
            page = self.space.pages(row)[index]
            self.pool.retain(page)
            self.held[page] += 1
            self.cells[page] = self.rows[row][index]

    @precondition(lambda self: self.held)
    @rule(which=position)
    def let_go(self, which: int) -> None:
        page = sorted(self.held)[which % len(self.held)]
        self.pool.release(page)
        self.held -= Counter([page])

    # The device

    @rule()
    def submit_a_step(self) -> None:
        touched = [(row, index) for row in range(ROWS) for index in range(self.space.mapped(row))]

        def read_all() -> None:
            for row, index in touched:
                self.memory[row, index, ::512].sum()  # kills the process if it was unmapped too early

        self.events.append(FakeEvent(on_finish=read_all))
        self.space.retirement.submit(self.events[-1])

    @precondition(lambda self: self.events)
    @rule()
    def finish_a_step(self) -> None:
        self.events.pop(0).finish()

    @rule()
    def poll(self) -> None:
        try:
            self.space.retirement.poll()
        except DriverError:
            assert self.driver.failures

    @rule()
    def trim(self) -> None:
        try:
            self.pool.trim()
        except DriverError:
            assert self.driver.failures

    @rule(n=st.integers(1, 6))
    def break_the_driver_soon(self, n: int) -> None:
        self.driver.failures.clear()
        self.driver.arm(n)

    # What must always hold

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "space"):
            return
        self.space.check(self.held)
        self.pool.check()
        self.host.check()
        self.space.retirement.check()
        assert self.space.parked == tuple(self.parked)

    @invariant()
    def every_page_holds_what_was_written(self) -> None:
        if not hasattr(self, "space"):
            return
        for row, cells in enumerate(self.rows):
            assert self.space.mapped(row) == len(cells)
            if cells:
                seen = self.memory[row, : len(cells), :: PAGE - 1]
                assert seen.tolist() == [[cell.value, cell.value] for cell in cells]

    def teardown(self) -> None:
        if not hasattr(self, "space"):
            return
        self.driver.heal()
        self.space.close()
        self.pool.release_all(self.held.elements())
        self.pool.close()
        assert self.host.memory_info()[0] == BUDGET * PAGE
        self.host.check()
        self.host.close()


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk(seed: int) -> None:
    """The same rules, many steps deep, where short examples do not reach."""
    draw = random.Random(seed)
    machine = SpaceMachine()
    machine.build()

    def row() -> int:
        return draw.randrange(ROWS)

    def at() -> int:
        return draw.randrange(PER_ROW + 1)

    moves = [
        lambda: machine.extend_all({row(): draw.randrange(1, 4)}),
        lambda: machine.extend_all({row(): draw.randrange(3) for _ in range(3)}),
        lambda: machine.alias(row(), row(), draw.randrange(3)),
        lambda: machine.held and machine.alias_held(row(), at()),
        lambda: machine.write_where_allowed(row(), at()),
        lambda: machine.truncate(row(), at()),
        lambda: machine.truncate(row(), 0),
        lambda: machine.park(row()),
        lambda: machine.parked and machine.adopt(at()),
        lambda: machine.parked and machine.adopt(at()),
        lambda: machine.reclaim(draw.randrange(6)),
        lambda: machine.hold(row(), at()),
        lambda: machine.held and machine.let_go(at()),
        lambda: machine.held and machine.let_go(at()),
        lambda: machine.submit_a_step(),
        lambda: machine.events and machine.finish_a_step(),
        lambda: machine.events and machine.finish_a_step(),
        lambda: machine.poll(),
        lambda: draw.random() < 0.3 and machine.trim(),
        lambda: draw.random() < 0.3 and machine.break_the_driver_soon(draw.randrange(1, 7)),
    ]
    for _ in range(4000):
        draw.choice(moves)()
        machine.books_balance()
        machine.every_page_holds_what_was_written()
    machine.teardown()
