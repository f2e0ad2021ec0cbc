"""Caches that share wrongly, in one way each: to show that the tests would notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vattn.kv import shared_pages, sharing
from vattn.kv.blocks import BlockPool
from vattn.kv.holders import Holders
from vattn.kv.layout import RowLayout
from vattn.kv.paged import PagedKVCache
from vattn.kv.prefix import PrefixCache
from vattn.kv.shared_pages import SharedPages
from vattn.kv.sharing import Hit, find_hit
from vattn.kv.slots import Slots
from vattn.kv.tails import TailCopier
from vattn.kv.virtual import VirtualKVCache
from vattn.vmm.pool import PagePool

Mutant = Callable[[pytest.MonkeyPatch], None]


# ---------------------------------------------------------------------------- virtual
def no_tail_of_a_hit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TailCopier, "copy_set", lambda *args: None)


def no_tail_of_a_fork(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TailCopier, "copy", lambda *args: None)


def tail_one_byte_short(patch: pytest.MonkeyPatch) -> None:
    copy, copy_set = TailCopier.copy, TailCopier.copy_set
    patch.setattr(TailCopier, "copy", lambda self, a, b, start, end: copy(self, a, b, start, end - 1))
    patch.setattr(TailCopier, "copy_set", lambda self, a, b, start, end: copy_set(self, a, b, start, end - 1))


def _hits(patch: pytest.MonkeyPatch, change: Callable[[Hit, Any], Hit]) -> None:
    def changed(prefix: Any, layout: Any, token_ids: Any, salt: str) -> Hit:
        return change(find_hit(prefix, layout, token_ids, salt), layout)

    patch.setattr(shared_pages, "find_hit", changed)


def tail_of_the_page_before(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return replace(hit, tail=hit.shared[-1]) if hit.tail and hit.shared else hit

    _hits(patch, change)


def _first_pages(hit: Hit) -> dict[int, Any]:
    """Two entries of a chain may hold different pages for one position; only the last one's has all."""
    pages: dict[int, Any] = {}
    for entry in hit.entries:
        for index, held in entry.memory:
            pages.setdefault(index, held)
    return pages


def tail_of_the_first_entry_on_its_page(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return replace(hit, tail=hit.tail and _first_pages(hit)[len(hit.shared)])

    _hits(patch, change)


def pages_of_the_first_entries(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        pages = _first_pages(hit)
        return replace(hit, shared=[pages[i] for i in range(len(hit.shared))])

    _hits(patch, change)


def a_page_too_many(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        return replace(hit, shared=[*hit.shared, hit.tail], tail=None) if hit.tail else hit

    _hits(patch, change)


def a_page_too_many_in_a_fork(patch: pytest.MonkeyPatch) -> None:
    def fork(self: VirtualKVCache, parent_id: str, child_id: str, tokens: int) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowLayout, "whole_pages", lambda layout, n: (layout.pages(n), 0))
            return forked(self, parent_id, child_id, tokens)

    forked = VirtualKVCache.fork
    patch.setattr(VirtualKVCache, "fork", fork)


def all_tokens_cached(patch: pytest.MonkeyPatch) -> None:
    def change(hit: Hit, layout: Any) -> Hit:
        cached = len(hit.entries) * len(hit.entries[0].tokens) if hit.entries else 0
        return replace(hit, cached=cached)

    _hits(patch, change)


def entries_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """Neither on entering nor on eviction: the books of the pool agree."""
    patch.setattr(Holders, "cache", _unheld(Holders.cache))
    patch.setattr(Holders, "uncache", _unheld(Holders.uncache))


def _unheld(method: Any) -> Any:
    def act(self: Holders, page: int) -> bool:
        method(self, page)
        return False

    return act


def entries_release_early(patch: pytest.MonkeyPatch) -> None:
    def uncache(self: Holders, page: int) -> bool:
        last = method(self, page)
        return last or self._cached[page] == 1

    method = Holders.uncache
    patch.setattr(Holders, "uncache", uncache)


def the_tail_is_not_kept_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    start = VirtualKVCache._start

    def careless(self: VirtualKVCache, *args: Any) -> Any:
        tail, retain, release = args[2].tail, self._pool.retain_all, self._pool.release_all
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PagePool, "retain_all", lambda _, pages: pages is tail or retain(pages))
            inner.setattr(PagePool, "release_all", lambda _, pages: pages is tail or release(pages))
            return start(self, *args)

    patch.setattr(VirtualKVCache, "_start", careless)


def every_slot_is_private(patch: pytest.MonkeyPatch) -> None:
    """Also in the eyes of `check`: contents and protection must tell."""
    patch.setattr(Slots, "private", lambda *args: True)


def writable_from_the_next_page(patch: pytest.MonkeyPatch) -> None:
    private = Slots.private
    patch.setattr(Slots, "private", lambda self, slot, start=0, *held: private(self, slot, start + 1, *held))


def cached_pages_count_as_nobodys(patch: pytest.MonkeyPatch) -> None:
    """A parked slot is taken for another text although the prefix cache holds its pages."""
    take = Slots.take

    def careless(self: Slots, n_pages: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Slots, "private", lambda *args: True)
            return take(self, n_pages)

    patch.setattr(Slots, "take", careless)


def continues_behind_another_text(patch: pytest.MonkeyPatch) -> None:
    """The slot's text is trusted behind the units that match."""

    def careless(contents: Any, token_ids: Any, hit: Hit) -> Any:
        found = continuation(contents, token_ids, hit)
        if found is None:
            return None
        return found[0], min(contents[found[0]].written, len(token_ids) - 1)

    continuation = sharing.continuation
    patch.setattr(shared_pages, "continuation", careless)


def continues_what_was_cut(patch: pytest.MonkeyPatch) -> None:
    """Any slot that holds a longer text is cut back, though its later units are in the prefix cache."""

    def careless(contents: Any, token_ids: Any, hit: Hit) -> Any:
        known = len(hit.entries) * len(hit.entries[0].tokens) if hit.entries else 0
        for slot, content in contents.items():
            if 0 < known < len(token_ids) and content.text[:known] == token_ids[:known]:
                return (slot, known) if known <= content.written else None
        return None

    patch.setattr(shared_pages, "continuation", careless)


def a_slot_is_remembered_after_it_was_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedPages, "forget", lambda *args: None)


def pages_of_a_continued_slot_are_not_needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holders, "need", lambda self, pages: None)


# ---------------------------------------------------------------------------- both
def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    match, insert, keys = PrefixCache.match, PrefixCache.insert, PrefixCache.keys
    patch.setattr(PrefixCache, "match", lambda self, tokens, salt: match(self, tokens, ""))
    patch.setattr(PrefixCache, "keys", lambda self, tokens, salt: keys(self, tokens, ""))
    patch.setattr(
        PrefixCache, "insert", lambda self, tokens, salt, *a, **k: insert(self, tokens, "", *a, **k)
    )


def a_unit_is_entered_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    for cache in (VirtualKVCache, PagedKVCache):
        patch.setattr(cache, "computed", _early(cache.computed))


def _early(computed: Any) -> Any:
    def early(self: Any, request_id: str, token_ids: Any, n: int) -> None:
        computed(self, request_id, token_ids, min(len(token_ids), self._live[request_id].tokens))
        self._live[request_id].written = n

    return early


# ---------------------------------------------------------------------------- paged
def no_copy_of_a_block(patch: pytest.MonkeyPatch) -> None:
    def fork(self: PagedKVCache, parent_id: str, child_id: str, tokens: int) -> bool:
        before = self.views.memory.clone()
        done = forked(self, parent_id, child_id, tokens)
        self.views.memory.copy_(before)
        return done

    forked = PagedKVCache.fork
    patch.setattr(PagedKVCache, "fork", fork)


def a_partial_block_is_shared(patch: pytest.MonkeyPatch) -> None:
    def fork(self: PagedKVCache, parent_id: str, child_id: str, tokens: int) -> bool:
        size = self.block_size
        if tokens % size == 0:
            return forked(self, parent_id, child_id, tokens)
        whole = -(-tokens // size) * size
        done = forked(self, parent_id, child_id, whole)
        if done:
            self._live[child_id].tokens = self._live[child_id].written = tokens
        return done

    forked = PagedKVCache.fork
    patch.setattr(PagedKVCache, "fork", fork)


def hits_are_evicted_while_they_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "retain_all", lambda *args: None)


VIRTUAL: list[Mutant] = [
    no_tail_of_a_hit,
    no_tail_of_a_fork,
    tail_one_byte_short,
    tail_of_the_page_before,
    tail_of_the_first_entry_on_its_page,
    pages_of_the_first_entries,
    a_page_too_many,
    a_page_too_many_in_a_fork,
    all_tokens_cached,
    entries_hold_nothing,
    entries_release_early,
    the_tail_is_not_kept_for_the_copy,
    every_slot_is_private,
    writable_from_the_next_page,
    cached_pages_count_as_nobodys,
    continues_behind_another_text,
    continues_what_was_cut,
    a_slot_is_remembered_after_it_was_taken,
    pages_of_a_continued_slot_are_not_needed,
    salts_are_ignored,
    a_unit_is_entered_before_it_is_written,
]
PAGED: list[Mutant] = [
    no_copy_of_a_block,
    a_partial_block_is_shared,
    hits_are_evicted_while_they_are_taken,
    salts_are_ignored,
    a_unit_is_entered_before_it_is_written,
]
