"""A snapshot of which request holds which page of a KV cache.

Memory is handed out in units. A unit is a page in each range of a row (`virtual`), a block (`paged`) or a row
(`static`). A request sees a row; a row lists units:

    rows     r7      | 7 | 2 | 9 | 4 |         rows list units by position: an id may be in several
             r8      | 7 | 2 | 3 |
             (left)  | 5 | 1 |
    units    private 9 3   shared 7 2   ahead 4   parked 5 1   cached 6   free 0 8        each id once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vattn.kv.usage import MemoryUsage

if TYPE_CHECKING:
    pass

UnitName = Literal["page", "block", "row"]


class PageState(StrEnum):
    """What a unit is used for. If several apply, the first one counts."""

    SHARED = "shared"
    """Two or more live requests need it."""
    PRIVATE = "private"
    """One live request needs it."""
    CACHED = "cached"
    """Kept for prefix hits only, with or without an address."""
    AHEAD = "ahead"
    """In a live request's row, behind what it needs: mapped ahead, or left over from a parked row."""
    PARKED = "parked"
    """In a row that no live request uses."""
    RETIRING = "retiring"
    """Cut from its row, and unmapped as soon as no step can touch it."""
    FREE = "free"
    """Not held by anything."""


IN_USE = (PageState.SHARED, PageState.PRIVATE)
"""States that make up `MemoryUsage.in_use`."""
PARKED = (PageState.AHEAD, PageState.PARKED, PageState.RETIRING)
"""States that make up `MemoryUsage.parked`."""


class MapRow(NamedTuple):
    """A row of addresses, or a request's block table."""

    owner: str | None
    """The live request; None for a parked row, which is still mapped."""
    tokens: int
    """Tokens its owner has room for; 0 without an owner."""
    units: tuple[int, ...]
    """Ids by position."""


@dataclass(frozen=True)
class PageMap:
    """The state of every unit at one moment. Its totals equal `usage`, taken at the same moment, exactly."""

    backend: str
    unit: UnitName
    unit_bytes: int
    unit_tokens: float
    """Tokens that a unit holds; for `virtual` not always a whole number."""
    row_units: int
    """Units of the longest row."""
    rows: tuple[MapRow, ...]
    states: Mapping[int, PageState]
    """State by unit id. Free pages of `virtual` are left out."""
    in_prefix_cache: frozenset[int]
    """Units that the prefix cache holds, whether or not requests need them too."""
    loose: Mapping[PageState, int]
    """Bytes of pages that belong to no unit: free or retiring pages of `virtual`."""
    budget_bytes: int
    usage: MemoryUsage

    def bytes_by_state(self) -> dict[PageState, int]:
        """Physical bytes in each state, with an entry for every state."""
        counted = Counter(self.states.values())
        return {state: counted[state] * self.unit_bytes + self.loose.get(state, 0) for state in PageState}

    def owners(self) -> dict[int, list[str]]:
        """Unit id -> the live requests that need it. Units that no request needs are left out."""
        found: dict[int, list[str]] = {}
        for row in self.rows:
            for unit in row.units:
                if row.owner is not None and self.states[unit] in IN_USE:
                    found.setdefault(unit, []).append(row.owner)
        return found

    def check(self) -> None:
        """Raise AssertionError unless the map adds up to the usage and owners match states."""
        total, usage = self.bytes_by_state(), self.usage
        assert sum(total[state] for state in IN_USE) == usage.in_use, "in use"
        assert sum(total[state] for state in PARKED) == usage.parked, "parked"
        assert total[PageState.CACHED] == usage.cached, "cached"
        assert total[PageState.FREE] == usage.free, "free"
        assert sum(total.values()) == usage.physical, "physical"
        owners = self.owners()
        saved = sum(len(who) - 1 for who in owners.values()) * self.unit_bytes
        assert saved == usage.shared_saved, "what sharing saves"
        for unit, state in self.states.items():
            assert (state is PageState.SHARED) == (len(owners.get(unit, ())) > 1), f"{unit} is {state}"
            assert (state in IN_USE) == (unit in owners), f"{unit} is {state}"
            assert state is not PageState.CACHED or unit in self.in_prefix_cache, f"{unit} is {state}"
        assert all(unit in self.states for row in self.rows for unit in row.units), "a unit without state"
        assert self.in_prefix_cache <= self.states.keys(), "a cached unit without state"

    def to_dict(self) -> dict[str, Any]:
        """The map as a JSON value, with unit ids listed by state."""
        units: dict[str, list[int]] = {state: [] for state in PageState}
        for unit, state in self.states.items():
            units[state].append(unit)
        return {
            "backend": self.backend,
            "unit": self.unit,
            "unit_bytes": self.unit_bytes,
            "unit_tokens": self.unit_tokens,
            "row_units": self.row_units,
            "budget_bytes": self.budget_bytes,
            "bytes": {str(state): nbytes for state, nbytes in self.bytes_by_state().items()},
            "units": {str(state): sorted(ids) for state, ids in units.items()},
            "in_prefix_cache": sorted(self.in_prefix_cache),
            "rows": [{"owner": r.owner, "tokens": r.tokens, "units": list(r.units)} for r in self.rows],
        }


def unit_states(
    rows: Iterable[tuple[MapRow, int]], needs: Mapping[int, int], cached: Iterable[int]
) -> dict[int, PageState]:
    """States of all units in `rows` (each with the number of leading units its owner needs) and `cached`."""
    states: dict[int, PageState] = {}
    for row, needed in rows:
        behind = PageState.PARKED if row.owner is None else PageState.AHEAD
        for unit in row.units[needed:]:
            states[unit] = behind
    states.update(dict.fromkeys(cached, PageState.CACHED))
    for unit, count in needs.items():
        states[unit] = PageState.SHARED if count > 1 else PageState.PRIVATE
    return states
