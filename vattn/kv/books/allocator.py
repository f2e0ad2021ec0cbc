"""Which units are free.

    limit    [ held | free: made, not held   | not made ]
             └────── made ───────────────────┘

The lowest numbers are handed out first. On the host driver, units with neighbouring numbers then tend to be
neighbours in the address space too, and the operating system merges their mappings into one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping


class UnitAllocator:
    """Hands out at most `limit` units.

    `made`: all units exist from the start. Otherwise each unit is made when it is first taken.
    """

    def __init__(self, limit: int, *, made: bool) -> None:
        if limit < 0:
            raise ValueError(f"there can't be {limit} units")
        self.limit = limit
        self._free = list(range(limit)) if made else []  # heap: exist, and nothing holds them
        self._vacant: list[int] = []  # heap: given back, so they don't exist now
        self._next = len(self._free)
        """The lowest number that was never made."""

    @property
    def num_made(self) -> int:
        """Units that exist."""
        return self._next - len(self._vacant)

    @property
    def num_free(self) -> int:
        """Units that exist and that nothing holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_made - len(self._free)

    @property
    def available(self) -> int:
        """Units that could be taken: free units, and units that may still be made."""
        return self.limit - self.num_held

    @property
    def ids(self) -> int:
        """All numbers are below this."""
        return max(self._next, self.limit)

    def take(self, n: int, after: int | None = None) -> tuple[list[int], list[int]] | None:
        """Take `n` units. Returns them, and those of them that have to be made.

        Returns None and takes nothing if fewer than `n` are available. `after` is the unit that comes before
        them in the row; an allocator may use it to choose neighbours.
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
        """Make held units free."""
        for unit in units:
            heapq.heappush(self._free, unit)

    def unmake(self, units: Iterable[int]) -> None:
        """Record that taken or freed units do not exist (any more)."""
        for unit in units:
            heapq.heappush(self._vacant, unit)

    def spare(self, n: int) -> list[int]:
        """The `n` highest free units, or all if there are fewer. They stay free until `forget` is called."""
        return heapq.nlargest(n, self._free)

    def forget(self, units: Iterable[int]) -> None:
        """Record that free units were given back to the device."""
        gone = set(units)
        self._free = [unit for unit in self._free if unit not in gone]
        heapq.heapify(self._free)
        self.unmake(gone)

    def renumbered(self, limit: int, numbers: Mapping[int, int]) -> UnitAllocator:
        """A new allocator of the same kind with `limit` units, of which the renumbered ones are held.

        `numbers` maps the old numbers of held units to new ones: 0 and up, in the old order.
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
