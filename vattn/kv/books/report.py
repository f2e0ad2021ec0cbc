"""Reports from the books: bytes in use, which request holds which unit, and a check of consistency."""

from __future__ import annotations

from collections import Counter

from vattn.kv.books.books import Books
from vattn.kv.page_map import MapRow, PageMap, PageState, UnitName, unit_states
from vattn.kv.usage import MemoryUsage


def usage(books: Books, token_bytes: int, *, closed: bool = False) -> MemoryUsage:
    """Memory usage now; `token_bytes` is of all layers. Takes the same time for any number of requests."""
    unit, counts, allocator = books.layout.bytes, books.counts, books.allocator
    in_use, cached = counts.num_needed * unit, counts.num_cached_only * unit
    mapped, logical = counts.total_needs * unit, books.logical * token_bytes
    waste = mapped - logical
    return MemoryUsage(
        virtual_reserved=0 if closed else books.address_bytes,
        physical=0 if closed else allocator.num_made * unit,
        in_use=in_use,
        parked=0 if closed else allocator.num_held * unit - in_use - cached,
        cached=cached,
        free=0 if closed else allocator.num_free * unit,
        logical=logical,
        shared_saved=mapped - in_use,
        tail_waste=0 if books.reserves else waste,
        external_waste=waste if books.reserves else 0,
    )


def page_map(
    books: Books, backend: str, unit: UnitName, budget_bytes: int, moment: MemoryUsage
) -> PageMap:
    """The page map now: every row with units, live ones first, and the state of each unit."""
    rows: list[tuple[MapRow, int]] = []
    for request_id, live in books.live.items():
        units = tuple(books.tables[live.row, : books.lengths[live.row]].tolist())
        rows.append((MapRow(request_id, live.tokens, units), live.units))
    taken = {live.row for live in books.live.values()}
    for row, length in enumerate(books.lengths):
        if length and row not in taken:
            rows.append((MapRow(None, 0, tuple(books.tables[row, :length].tolist())), 0))
    needs = {u: int(books.counts.needs[u]) for u in books.counts.needs.nonzero()[0].tolist()}
    cached = books.counts.cached.nonzero()[0].tolist()
    states = unit_states(rows, needs, cached)
    loose: dict[PageState, int] = {}
    if books.keeps_addresses:
        loose[PageState.FREE] = moment.free
    elif moment.physical:
        states = {unit: states.get(unit, PageState.FREE) for unit in range(books.limit)}
    return PageMap(
        backend=backend,
        unit=unit,
        unit_bytes=books.layout.bytes,
        unit_tokens=books.layout.tokens_per_unit,
        row_units=books.layout.width,
        rows=tuple(row for row, _ in rows),
        states=states,
        in_prefix_cache=frozenset(cached),
        loose=loose,
        budget_bytes=budget_bytes,
        usage=moment,
    )


def check(books: Books) -> None:
    """Raise AssertionError unless the books are consistent."""
    shown: Counter[int] = Counter()
    needs: Counter[int] = Counter()
    for row, length in enumerate(books.lengths):
        units = books.tables[row, :length].tolist()
        assert len(set(units)) == length, f"row {row} shows a unit twice"
        shown.update(units)
    rows = [live.row for live in books.live.values()]
    assert len(set(rows)) == len(rows), "two requests have one row"
    for request_id, live in books.live.items():
        assert live.units == books.layout.units(live.tokens), f"{request_id}: units of its tokens"
        assert live.written <= live.tokens, f"{request_id}: more written than there is room for"
        assert live.tokens <= live.room or not live.room, f"{request_id}: room"
        units = books.tables[live.row, : books.lengths[live.row]].tolist()
        assert len(units) >= live.units, f"{request_id}: units are missing"
        needs.update(units[: live.units])
    for request_id, live in books.live.items():
        first = books.layout.whole(live.written)[0]
        for unit in books.tables[live.row, first : books.lengths[live.row]].tolist():
            assert shown[unit] == 1, f"{request_id} would write unit {unit}, which others can see"
    memories = [] if books.prefix is None else books.prefix.memories()
    cached = Counter(unit for memory in memories for _, unit in memory)
    books.counts.check(dict(shown), dict(needs), dict(cached))
    books.allocator.check(shown.keys() | cached.keys())
    if books.prefix is not None:
        books.prefix.check(list(books.live))
    assert books.logical == sum(live.tokens for live in books.live.values()), "tokens miscounted"
    books.check_rows()


