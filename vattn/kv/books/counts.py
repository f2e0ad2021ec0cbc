"""Who wants a unit: rows that show it, requests that need it, entries of the prefix cache that hold it.

                             in the cache    not in the cache
    needed by requests          in use            in use
    in a row, not needed        cached            parked
    in no row                   cached            free

A request needs the units its tokens lie on; what its row shows beyond is there in advance.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int32]
"""Unit numbers; within one call no number comes twice."""


def as_units(units: Iterable[int]) -> Units:
    return np.fromiter(units, np.int32)


class UnitCounts:
    """Three counts for each unit, and how many units are in which cell of the table above."""

    def __init__(self, ids: int) -> None:
        self.shown = np.zeros(ids, np.int32)
        self.needs = np.zeros(ids, np.int32)
        self.cached = np.zeros(ids, np.int32)
        self.num_needed = 0
        """Units needed by a request."""
        self.num_cached_only = 0
        """Units held by the cache and needed by nobody."""
        self.total_needs = 0
        """Needs of all requests together: units they would hold if they shared nothing."""

    def reserve(self, ids: int) -> None:
        """There will be numbers up to `ids`."""
        more = ids - len(self.needs)
        if more > 0:
            for name in ("shown", "needs", "cached"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(more, np.int32)]))

    def show(self, units: Units) -> None:
        """One row more shows each of these."""
        self.shown[units] += 1

    def hide(self, units: Units) -> list[int]:
        """One row less; those that are nobody's by that."""
        self.shown[units] -= 1
        gone: list[int] = units[(self.shown[units] == 0) & (self.cached[units] == 0)].tolist()
        return gone

    def need(self, units: Units) -> None:
        """One request more needs each of these."""
        fresh = units[self.needs[units] == 0]
        self.num_needed += len(fresh)
        self.num_cached_only -= int(np.count_nonzero(self.cached[fresh]))
        self.needs[units] += 1
        self.total_needs += len(units)

    def release(self, units: Units) -> None:
        """One request less."""
        self.needs[units] -= 1
        left = units[self.needs[units] == 0]
        self.num_needed -= len(left)
        self.num_cached_only += int(np.count_nonzero(self.cached[left]))
        self.total_needs -= len(units)

    def cache(self, unit: int) -> None:
        """One cache entry more holds it."""
        if not self.cached[unit] and not self.needs[unit]:
            self.num_cached_only += 1
        self.cached[unit] += 1

    def uncache(self, unit: int) -> bool:
        """One cache entry less; True if it is nobody's by that."""
        self.cached[unit] -= 1
        if self.cached[unit]:
            return False
        if not self.needs[unit]:
            self.num_cached_only -= 1
        return not self.shown[unit]

    def unneeded(self, units: Units) -> int:
        """How many of these nobody needs."""
        return len(units) - int(np.count_nonzero(self.needs[units]))

    def held(self) -> list[int]:
        """Units that are somebody's."""
        found: list[int] = np.flatnonzero(self.shown + self.cached).tolist()
        return found

    def check(self, shown: dict[int, int], needs: dict[int, int], cached: dict[int, int]) -> None:
        """Raise AssertionError unless the counts are these."""
        for name, counts in (("shown", shown), ("needs", needs), ("cached", cached)):
            array = getattr(self, name)
            found = {unit: int(array[unit]) for unit in np.flatnonzero(array).tolist()}
            assert found == counts, f"{name} miscounted"
        assert self.num_needed == len(needs), "needed units miscounted"
        assert self.total_needs == sum(needs.values()), "needs miscounted"
        assert self.num_cached_only == len(cached.keys() - needs.keys()), "cached units miscounted"
        assert not needs.keys() - shown.keys(), "a needed unit is in no row"
