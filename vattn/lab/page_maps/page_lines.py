"""A moment of a page map as lines of cells: what a drawing of it shows, whatever it is drawn with.

virtual    a line per row (live ones first), then cached pages without an address, then free ones
paged      the pool, `BLOCKS_PER_LINE` blocks a line
static     a line per row, its one cell as long as the row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vattn.kv.page_map import IN_USE, PageState

BLOCKS_PER_LINE = 64
LOOSE = -1
"""Id of a page that is one of many alike."""


class Cell(NamedTuple):
    """One unit at one place."""

    unit: int
    state: PageState
    fill: float
    """Share of it that tokens of a live request fill; 1 where it is nobody's."""


class Line(NamedTuple):
    """Cells beside each other; `room`: so many could be there."""

    label: str
    cells: list[Cell]
    room: int


def unit_states(frame: Mapping[str, Any]) -> dict[int, PageState]:
    """State by id."""
    return {unit: PageState(state) for state, units in frame["units"].items() for unit in units}


def owners(frame: Mapping[str, Any]) -> dict[int, list[str]]:
    """By id, who needs it, and at which position of its row: `"request 7, position 3"`."""
    states, found = unit_states(frame), dict[int, list[str]]()
    for row in frame["rows"]:
        for position, unit in enumerate(row["units"]):
            if row["owner"] is not None and states[unit] in IN_USE:
                found.setdefault(unit, []).append(f"request {row['owner']}, position {position}")
    return found


def fills(header: Mapping[str, Any], frame: Mapping[str, Any]) -> dict[int, float]:
    """By id, the share that is filled with tokens of the owner who fills it most."""
    size, found = header["unit_tokens"], dict[int, float]()
    for row in frame["rows"]:
        for position, unit in enumerate(row["units"]):
            if row["owner"] is not None:
                share = min(1.0, max(0.0, row["tokens"] / size - position))
                found[unit] = max(found.get(unit, 0.0), share)
    return found


def lines(header: Mapping[str, Any], frame: Mapping[str, Any]) -> list[Line]:
    """The drawing of one moment."""
    states, filled = unit_states(frame), fills(header, frame)

    def cell(unit: int) -> Cell:
        state = states[unit]
        return Cell(unit, state, round(filled.get(unit, 1.0), 3) if state in IN_USE else 1.0)

    if header["unit"] == "page":
        return list(_rows(header, frame, states, cell))
    if header["unit"] == "row":
        who = {row["units"][0]: row for row in frame["rows"]}
        return [
            Line(f"request {who[u]['owner']}" if u in who else "free", [cell(u)], 1) for u in sorted(states)
        ]
    blocks = sorted(states)
    groups = [blocks[at : at + BLOCKS_PER_LINE] for at in range(0, len(blocks), BLOCKS_PER_LINE)]
    return [Line(f"{group[0]} … {group[-1]}", [cell(u) for u in group], len(group)) for group in groups]


def _rows(
    header: Mapping[str, Any], frame: Mapping[str, Any], states: Mapping[int, PageState], cell: Any
) -> Iterator[Line]:
    seen: set[int] = set()
    for row in frame["rows"]:
        label = "parked" if row["owner"] is None else f"request {row['owner']}"
        yield Line(label, [cell(unit) for unit in row["units"]], header["row_units"])
        seen.update(row["units"])
    unseen = [cell(unit) for unit in sorted(states.keys() - seen)]
    unmapped = [("cached, no address", [c for c in unseen if c.state is PageState.CACHED])]
    for state in (PageState.RETIRING, PageState.FREE):
        count = frame["bytes"][state] // header["unit_bytes"]
        unmapped.append((str(state), [Cell(LOOSE, state, 1.0)] * count))
    for label, cells in unmapped:
        for at in range(0, len(cells), BLOCKS_PER_LINE):
            part = cells[at : at + BLOCKS_PER_LINE]
            yield Line(label if not at else "", part, len(part))
