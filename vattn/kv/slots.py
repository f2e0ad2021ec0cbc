"""A slot is one request's room: one row of the address space, or one row in each of its ranges.

    interleaved    slot s = row s
    per_layer      slot s = rows s, s + count, s + 2 x count, …     (layer 0 K, layer 0 V, layer 1 K, …)

The rows of a slot always have equally many pages, so a slot grows, shrinks and parks as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from vattn.vmm.driver import DriverError
from vattn.vmm.space import AddressSpace

PageSet = tuple[int, ...]
"""The pages at one position of a slot: one for each of its rows."""


class Slots:
    """`count` slots of `ranges` rows each over `space`. Each slot is taken, parked or empty.

    empty --take--> taken --leave--> parked (still mapped) --take--> taken
      ^                                |
      +------------ reclaim -----------+
    """

    def __init__(self, space: AddressSpace, count: int, ranges: int) -> None:
        assert space.rows == count * ranges
        self.space = space
        self.count = count
        self.ranges = ranges
        self._empty = list(range(count - 1, -1, -1))
        self._parked: OrderedDict[int, None] = OrderedDict()
        self.num_apart = 0

    def rows(self, slot: int) -> range:
        """The slot's rows in the address space."""
        return range(slot, self.count * self.ranges, self.count)

    def mapped(self, slot: int) -> int:
        """Pages mapped in each of the slot's rows."""
        return self.space.mapped(slot)

    @property
    def num_untaken(self) -> int:
        return len(self._empty) + len(self._parked)

    # ------------------------------------------------------------------ whose is it
    def take(self, n_pages: int) -> tuple[int, bool]:
        """Take the slot that suits `n_pages` pages per row best; True if its pages come with it.

        Of the parked slots whose pages nobody else wants, the one with just enough, else the one with
        most: no driver call. Without any, an empty slot, else the least recently parked, emptied.
        """
        mapped = [(self.mapped(slot), slot) for slot in self._parked if self.private(slot)]
        fitting = [entry for entry in mapped if entry[0] >= n_pages]
        if not mapped:
            return self.take_empty(), False
        slot = min(fitting)[1] if fitting else max(mapped)[1]
        self._unpark(slot)
        return slot, True

    def take_empty(self) -> int:
        """Take a slot without pages; if there is none, the least recently parked is emptied."""
        if self._empty:
            return self._empty.pop()
        slot = next(iter(self._parked))
        self._unpark(slot)
        try:
            self.truncate(slot, 0)
        except BaseException:
            self.leave(slot)
            raise
        return slot

    def take_parked(self, slot: int) -> None:
        """Take this parked slot with what it has mapped."""
        self._unpark(slot)

    def set_apart(self) -> int:
        """Take an empty slot for good: it is nobody's room, and `check` must be told of it."""
        self.num_apart += 1
        return self._empty.pop(0)

    def is_parked(self, slot: int) -> bool:
        return slot in self._parked

    def leave(self, slot: int) -> None:
        """Give up a taken slot: parked if it has pages, the last to be reclaimed; else empty."""
        if not self.mapped(slot):
            self._empty.append(slot)
            return
        for row in self.rows(slot):
            self.space.park(row)
        self._parked[slot] = None

    def _unpark(self, slot: int) -> None:
        for row in self.rows(slot):
            self.space.adopt(row)
        del self._parked[slot]

    # ------------------------------------------------------------------ pages
    def extend(self, slot: int, n_pages: int) -> bool:
        """Map `n_pages` more pages in each row: all or nothing; False when pages are short."""
        return self.space.extend_all(self.rows(slot), n_pages)

    def alias(self, slot: int, sets: Sequence[PageSet]) -> None:
        """Append pages that others hold, read-only where the driver can. All or nothing."""
        before = self.mapped(slot)
        try:
            for index, row in enumerate(self.rows(slot)):
                self.space.alias(row, [pages[index] for pages in sets])
        except BaseException:
            self.truncate(slot, before)
            raise

    def page_sets(self, slot: int, start: int, stop: int) -> list[PageSet]:
        """Pages at positions `start .. stop` of a slot."""
        return list(zip(*(self.space.pages(row)[start:stop] for row in self.rows(slot)), strict=True))

    def first_pages(self, slot: int, start: int, stop: int) -> tuple[int, ...]:
        """The pages at positions `start .. stop` of the slot's first row; they stand for their sets."""
        return self.space.pages(slot)[start:stop]

    def private(self, slot: int, start: int = 0, held: Callable[[int], int] = lambda _: 0) -> bool:
        """Whether pages from position `start` on are writable and mapped nowhere else.

        `held`: how many references a page has from holders that do not map it.
        """
        return self.space.private(slot, start, held)

    def truncate(self, slot: int, n_pages: int) -> None:
        """Keep the first `n_pages` pages of each row. If unmapping fails, the error comes last."""
        failure: Exception | None = None
        for row in self.rows(slot):
            try:
                if self.space.mapped(row) > n_pages:
                    self.space.truncate(row, n_pages)
            except DriverError as error:  # the row's table is cut all the same: see AddressSpace
                failure = failure or error
        if failure is not None:
            raise failure

    def reclaim(self, n_pages: int) -> bool:
        """Unmap at least `n_pages` pages from the ends of parked slots, least recently parked first.

        Those that others hold are not free by that. False: no slot is parked.
        """
        found = bool(self._parked)
        for slot in list(self._parked):
            if n_pages <= 0:
                break
            mapped = self.mapped(slot)
            taken = min(mapped, -(-n_pages // self.ranges))
            n_pages -= taken * self.ranges
            self._unpark(slot)
            try:
                self.truncate(slot, mapped - taken)
            finally:
                self.leave(slot)
                if slot in self._parked:
                    self._parked.move_to_end(slot, last=False)
        return found

    def check(self, taken: Iterable[int], holders: Mapping[int, int] | None = None) -> None:
        """`taken`: the slots their takers know of; `holders`: see `AddressSpace.check`."""
        for slot in range(self.count):
            assert len({self.space.mapped(row) for row in self.rows(slot)}) == 1, f"slot {slot} is uneven"
        assert sorted([*taken, *self._parked, *self._empty]) == list(range(self.count)), "a slot is lost"
        assert not any(self.mapped(slot) for slot in self._empty), "an empty slot is mapped"
        assert set(self.space.parked) == {row for slot in self._parked for row in self.rows(slot)}
        self.space.check(holders)
