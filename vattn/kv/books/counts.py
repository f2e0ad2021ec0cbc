"""How many rows show a unit, how many requests need it, how many prefix-cache entries hold it.

                             in the cache    not in the cache
    needed by requests          in use            in use
    in a row, not needed        cached            parked
    in no row                   cached            free

A request needs the units on which its tokens lie. Its row may show more units, which are there in advance.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int32]
"""Unit numbers. One call never gets the same number twice."""


def as_units(units: Iterable[int]) -> Units:
    return np.fromiter(units, np.int32)


class UnitCounts:
    """Three counts for each unit, and the totals that `usage` needs."""

    def __init__(self, ids: int) -> None:
        self.shown = np.zeros(ids, np.int32)
        self.needs = np.zeros(ids, np.int32)
        self.cached = np.zeros(ids, np.int32)
        self.num_needed = 0
        """Units that at least one request needs."""
        self.num_cached_only = 0
        """Units that the prefix cache holds and no request needs."""
        self.total_needs = 0
        """Sum of the needs of all requests: the units they would hold if they shared nothing."""

    def reserve(self, ids: int) -> None:
        """Make room for unit numbers below `ids`."""
        more = ids - len(self.needs)
        if more > 0:
            for name in ("shown", "needs", "cached"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(more, np.int32)]))

    def show(self, units: Units) -> None:
        """Count one more row that shows each of these units."""
        self.shown[units] += 1

    def hide(self, units: Units) -> list[int]:
        """Count one row less for each unit. Returns the units that nothing holds any more."""
        self.shown[units] -= 1
        gone: list[int] = units[(self.shown[units] == 0) & (self.cached[units] == 0)].tolist()
        return gone

    def need(self, units: Units) -> None:
        """Count one more request that needs each of these units."""
        fresh = units[self.needs[units] == 0]
        self.num_needed += len(fresh)
        self.num_cached_only -= int(np.count_nonzero(self.cached[fresh]))
        self.needs[units] += 1
        self.total_needs += len(units)

    def release(self, units: Units) -> None:
        """Count one request less that needs each of these units."""
        self.needs[units] -= 1
        left = units[self.needs[units] == 0]
        self.num_needed -= len(left)
        self.num_cached_only += int(np.count_nonzero(self.cached[left]))
        self.total_needs -= len(units)

    def cache(self, unit: int) -> None:
        """Count one more prefix-cache entry that holds the unit."""
        if not self.cached[unit] and not self.needs[unit]:
            self.num_cached_only += 1
        self.cached[unit] += 1

    def uncache(self, unit: int) -> bool:
        """Count one prefix-cache entry less. True if nothing holds the unit any more."""
        self.cached[unit] -= 1
        if self.cached[unit]:
            return False
        if not self.needs[unit]:
            self.num_cached_only -= 1
        return not self.shown[unit]

    def unneeded(self, units: Units) -> int:
        """How many of these units no request needs."""
        return len(units) - int(np.count_nonzero(self.needs[units]))

    def held(self) -> list[int]:
        """Units that are in a row or in the prefix cache."""
        found: list[int] = np.flatnonzero(self.shown + self.cached).tolist()
        return found

    def check(self, shown: dict[int, int], needs: dict[int, int], cached: dict[int, int]) -> None:
        """Raise AssertionError unless the counts equal the given ones."""
        for name, counts in (("shown", shown), ("needs", needs), ("cached", cached)):
            array = getattr(self, name)
            found = {unit: int(array[unit]) for unit in np.flatnonzero(array).tolist()}
            assert found == counts, f"{name} miscounted"
        assert self.num_needed == len(needs), "needed units miscounted"
        assert self.total_needs == sum(needs.values()), "needs miscounted"
        assert self.num_cached_only == len(cached.keys() - needs.keys()), "cached units miscounted"
        assert not needs.keys() - shown.keys(), "a needed unit is in no row"
