"""Books and memories that share wrongly, in one way each: to show that the tests would notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vattn.kv.books import books as books_module
from vattn.kv.books import rows as rows_module
from vattn.kv.books.books import Books, Live
from vattn.kv.books.counts import UnitCounts
from vattn.kv.books.hits import Hit, find_hit
from vattn.kv.books.prefix import PrefixCache
from vattn.kv.books.rows import MappedBooks
from vattn.kv.memory.base import Memory
from vattn.kv.memory.mapped import MappedMemory
from vattn.kv.memory.tensor import TensorMemory

Mutant = Callable[[pytest.MonkeyPatch], None]


# ---------------------------------------------------------------------------- hits
def _hits(patch: pytest.MonkeyPatch, change: Callable[[Hit, Any], Hit]) -> None:
    def changed(prefix: Any, layout: Any, text: Any, *, copy_tails: bool) -> Hit:
        return change(find_hit(prefix, layout, text, copy_tails=copy_tails), layout)

    patch.setattr(books_module, "find_hit", changed)


def _first_units(hit: Hit) -> dict[int, int]:
    """Two entries of a chain may hold different units for one position; only the last one's has all."""
    units: dict[int, int] = {}
    for entry in hit.entries:
        for position, unit in entry.memory:
            units.setdefault(position, unit)
    return units


def tail_of_the_page_before(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return replace(hit, tail=int(hit.shared[-1])) if hit.tail is not None and len(hit.shared) else hit

    _hits(patch, change)


def tail_of_the_first_entry_on_its_page(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return hit if hit.tail is None else replace(hit, tail=_first_units(hit)[len(hit.shared)])

    _hits(patch, change)


def units_of_the_first_entries(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        units = _first_units(hit)
        return replace(hit, shared=np.array([units[i] for i in range(len(hit.shared))], np.int32))

    _hits(patch, change)


def a_unit_too_many(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return hit if hit.tail is None else replace(hit, shared=hit.beside(), tail=None)

    _hits(patch, change)


def all_tokens_cached(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return replace(hit, cached=len(hit.entries) * len(hit.entries[0].tokens)) if hit.entries else hit

    _hits(patch, change)


def units_of_evicted_entries_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """What was once found for a waiting request is taken for granted."""

    def match(self: PrefixCache[Any], text: Any) -> Any:
        return text.found or matched(self, text)

    matched = PrefixCache.match
    patch.setattr(PrefixCache, "match", match)


# ---------------------------------------------------------------------------- counts
def entries_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A cached unit is free once no row shows it."""

    def hide(self: UnitCounts, units: Any) -> list[int]:
        self.shown[units] -= 1
        gone: list[int] = units[self.shown[units] == 0].tolist()
        return gone

    patch.setattr(UnitCounts, "hide", hide)


def entries_release_early(patch: pytest.MonkeyPatch) -> None:
    """The first of two entries that goes takes the unit along."""

    def uncache(self: UnitCounts, unit: int) -> bool:
        return method(self, unit) or bool(self.cached[unit] == 1 and not self.shown[unit])

    method = UnitCounts.uncache
    patch.setattr(UnitCounts, "uncache", uncache)


def needs_of_shared_units_count_once(patch: pytest.MonkeyPatch) -> None:
    def need(self: UnitCounts, units: Any) -> None:
        method(self, units[self.needs[units] == 0])

    method = UnitCounts.need
    patch.setattr(UnitCounts, "need", need)


def hits_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """They may be evicted for the request that takes them."""
    patch.setattr(Books, "_pin", lambda *args: None)
    patch.setattr(Books, "_unpin", lambda *args: None)


# ---------------------------------------------------------------------------- rows
def every_row_is_its_own(patch: pytest.MonkeyPatch) -> None:
    """Also in the eyes of `check`: contents and protection must tell."""
    patch.setattr(MappedBooks, "writable", lambda *args: True)
    patch.setattr(MappedBooks, "_is_own", lambda *args: True)


def writable_from_the_next_unit(patch: pytest.MonkeyPatch) -> None:
    writable = MappedBooks.writable
    patch.setattr(MappedBooks, "writable", lambda self, row, first: writable(self, row, first + 1))


def cached_units_count_as_nobodys(patch: pytest.MonkeyPatch) -> None:
    """A parked row is taken for another text although the prefix cache holds its units."""
    patch.setattr(MappedBooks, "_is_own", lambda self, row: self.writable(row, 0))


def continues_behind_another_text(patch: pytest.MonkeyPatch) -> None:
    """The row's text is trusted behind the units that match."""

    def careless(contents: Any, token_ids: Any, hit: Hit) -> Any:
        found = continuation(contents, token_ids, hit)
        if found is None:
            return None
        return found[0], min(contents[found[0]].written, len(token_ids) - 1)

    continuation = rows_module.continuation
    patch.setattr(rows_module, "continuation", careless)


def continues_what_was_cut(patch: pytest.MonkeyPatch) -> None:
    """Any row that holds a longer text is cut back, though its later units are in the prefix cache."""

    def careless(contents: Any, token_ids: Any, hit: Hit) -> Any:
        known = len(hit.entries) * len(hit.entries[0].tokens) if hit.entries else 0
        for row, content in contents.items():
            if 0 < known < len(token_ids) and content.token_ids[:known] == token_ids[:known]:
                return (row, known) if known <= content.written else None
        return None

    patch.setattr(rows_module, "continuation", careless)


def a_row_is_remembered_after_it_was_taken(patch: pytest.MonkeyPatch) -> None:
    class Sticky(dict[int, Any]):
        def pop(self, key: int, *default: Any) -> Any:
            return self.get(key, *default)

    made = MappedBooks.__init__

    def make(self: MappedBooks, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.contents = Sticky()

    patch.setattr(MappedBooks, "__init__", make)


def a_parked_row_is_cut_without_telling_the_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MappedMemory, "unmap", lambda *args: None)


# ---------------------------------------------------------------------------- copies
def no_copy_of_a_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MappedMemory, "copy", lambda *args: None)
    patch.setattr(TensorMemory, "copy", lambda *args: None)


def tail_one_byte_short(patch: pytest.MonkeyPatch) -> None:
    copy = MappedMemory.copy
    patch.setattr(MappedMemory, "copy", lambda self, op: copy(self, op._replace(nbytes=op.nbytes - 1)))


def tail_one_token_short(patch: pytest.MonkeyPatch) -> None:
    copy = TensorMemory.copy

    def shorter(self: TensorMemory, op: Any) -> None:
        copy(self, op._replace(nbytes=op.nbytes - self.layout.token_bytes))

    patch.setattr(TensorMemory, "copy", shorter)


def a_fork_shares_the_unit_it_will_write(patch: pytest.MonkeyPatch) -> None:
    def fill(self: Books, row: int, live: Live, hit: Hit) -> Any:
        return (yield from method(self, row, live, replace(hit, shared=hit.beside(), tail=None)))

    method = Books._fill
    patch.setattr(Books, "_fill", fill)


def what_comes_back_is_written_a_token_off(patch: pytest.MonkeyPatch) -> None:
    copy_in = Memory.copy_in

    def off(self: Memory, row: int, units: Any, start: int, data: Any) -> int:
        return copy_in(self, row, units, start, data.roll(8, -1))

    patch.setattr(Memory, "copy_in", off)


# ---------------------------------------------------------------------------- texts
def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    text = Books.text
    patch.setattr(Books, "text", lambda self, request_id, ids, salt: text(self, request_id, ids, "same"))


def a_unit_is_entered_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    def early(self: Books, live: Live, token_ids: Any, n: int) -> None:
        computed(self, live, token_ids, min(len(token_ids), live.tokens))
        live.written = n

    computed = Books.computed
    patch.setattr(Books, "computed", early)


BOTH: list[Mutant] = [
    units_of_evicted_entries_are_trusted,
    entries_hold_nothing,
    needs_of_shared_units_count_once,
    no_copy_of_a_tail,
    a_fork_shares_the_unit_it_will_write,
    what_comes_back_is_written_a_token_off,
    salts_are_ignored,
    a_unit_is_entered_before_it_is_written,
]
VIRTUAL: list[Mutant] = [
    *BOTH,
    hits_are_not_pinned,
    tail_of_the_page_before,
    tail_of_the_first_entry_on_its_page,
    units_of_the_first_entries,
    a_unit_too_many,
    all_tokens_cached,
    entries_release_early,
    every_row_is_its_own,
    writable_from_the_next_unit,
    cached_units_count_as_nobodys,
    continues_behind_another_text,
    continues_what_was_cut,
    a_row_is_remembered_after_it_was_taken,
    a_parked_row_is_cut_without_telling_the_memory,
    tail_one_byte_short,
]
PAGED: list[Mutant] = [*BOTH, tail_one_token_short]
