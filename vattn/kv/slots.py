"""A slot is one request's room: one row of the address space, or one row in each of its ranges.

    interleaved    slot s = row s
    per_layer      slot s = rows s, s + count, s + 2 x count, …     (layer 0 K, layer 0 V, layer 1 K, …)

The rows of a slot always have equally many pages, so a slot grows, shrinks and parks as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from vattn.vmm.driver import DriverError
from vattn.vmm.space import AddressSpace


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
        """Take the slot that suits `n_pages` pages per row best; True if it was parked.

        The parked slot with just enough; else the one with most; else an empty one. No driver call.
        """
        mapped = [(self.mapped(slot), slot) for slot in self._parked]
        fitting = [entry for entry in mapped if entry[0] >= n_pages]
        if not mapped:
            return self._empty.pop(), False
        slot = min(fitting)[1] if fitting else max(mapped)[1]
        self._unpark(slot)
        return slot, True

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

    def reclaim(self, n_pages: int) -> None:
        """Take at least `n_pages` pages from the ends of parked slots, least recently parked first."""
        for slot in list(self._parked):
            if n_pages <= 0:
                return
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

    def check(self, taken: Iterable[int]) -> None:
        """`taken`: the slots their takers know of."""
        for slot in range(self.count):
            assert len({self.space.mapped(row) for row in self.rows(slot)}) == 1, f"slot {slot} is uneven"
        assert sorted([*taken, *self._parked, *self._empty]) == list(range(self.count)), "a slot is lost"
        assert not any(self.mapped(slot) for slot in self._empty), "an empty slot is mapped"
        assert set(self.space.parked) == {row for slot in self._parked for row in self.rows(slot)}
        self.space.check()
