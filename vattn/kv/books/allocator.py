"""Which units are free.

    limit    [ held | free: exists, nobody's | not made ]
             └────── made ───────────────────┘

Numbers are handed out lowest first: on the host driver that keeps neighbours in memory neighbours in the
address space, which the kernel then merges into one mapping.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping


class UnitAllocator:
    """At most `limit` units. `made`: all of them exist from the start; else each is made when first taken."""

    def __init__(self, limit: int, *, made: bool) -> None:
        if limit < 0:
            raise ValueError(f"there can't be {limit} units")
        self.limit = limit
        self._free = list(range(limit)) if made else []  # heap: exist and are nobody's
        self._vacant: list[int] = []  # heap: were given back
        self._next = len(self._free)
        """Numbers from here on were never made."""

    @property
    def num_made(self) -> int:
        """Units that exist."""
        return self._next - len(self._vacant)

    @property
    def num_free(self) -> int:
        """Units that exist and are nobody's."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_made - len(self._free)

    @property
    def available(self) -> int:
        """Units that could be taken: free ones and those that may still be made."""
        return self.limit - self.num_held

    @property
    def ids(self) -> int:
        """All numbers are below this."""
        return max(self._next, self.limit)

    def take(self, n: int, after: int | None = None) -> tuple[list[int], list[int]] | None:
        """`n` units, and which of them have to be made; None, and nothing taken, when fewer are available.

        `after`: the unit that they will stand behind; an allocator may like them to be neighbours.
        """
        if n > self.available:
            return None
        old = [heapq.heappop(self._free) for _ in range(min(n, len(self._free)))]
        new = []
        for _ in range(n - len(old)):
            if self._vacant:
                new.append(heapq.heappop(self._vacant))
            else:
                new.append(self._next)
                self._next += 1
        return [*old, *new], new

    def give(self, units: Iterable[int]) -> None:
        """Units are nobody's now."""
        for unit in units:
            heapq.heappush(self._free, unit)

    def unmake(self, units: Iterable[int]) -> None:
        """Units that were taken or given do not exist (any more)."""
        for unit in units:
            heapq.heappush(self._vacant, unit)

    def spare(self, n: int) -> list[int]:
        """The `n` highest free units, or all; they are still free. `forget` them once they are gone."""
        return heapq.nlargest(n, self._free)

    def forget(self, units: Iterable[int]) -> None:
        """Free units were given back to the device."""
        gone = set(units)
        self._free = [unit for unit in self._free if unit not in gone]
        heapq.heapify(self._free)
        self.unmake(gone)

    def renumbered(self, limit: int, numbers: Mapping[int, int]) -> UnitAllocator:
        """Another allocator of this kind with `limit` units, for held ones that got new numbers, by old ones.

        New numbers are the lowest: 0 and up, in the old order.
        """
        new = type(self)(limit, made=True)
        taken = new.take(len(numbers))
        assert taken is not None and taken[0] == list(range(len(numbers)))
        return new

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless exactly `held` are held and every number is in one place."""
        held = set(held)
        free, vacant = set(self._free), set(self._vacant)
        assert len(free) == len(self._free) and len(vacant) == len(self._vacant), "a unit is free twice"
        assert not free & vacant and not held & (free | vacant), "a unit is in two places"
        assert held | free | vacant == set(range(self._next)), "a unit is lost"
        assert self.num_made <= self.limit, "over budget"
