"""`virtual`: each request owns a contiguous range of addresses; the driver maps pages as it grows.

    slot 0 (live)    | page 7 | page 2 | page 9 |  . . reserved, unmapped . .  |
    slot 1 (live)    | page 7 | page 2 | page 3 |  . . 7 and 2 are shared: one page, two addresses
    slot 2 (parked)  | page 4 | page 1 |  . . . . . . . . . . . . . . . . . .  |
    slot 3 (empty)   |  . . . . . . . . . . . . . . . . . . . . . . . . . . .  |

A finished request leaves its slot parked, still mapped; a later one takes it over without a driver call:
one of similar size, or one whose text goes on where it ended. A request that begins with text the prefix
cache knows gets the full pages of it by reference and a copy of the partly filled one behind them.

When memory is short, in this order: pages mapped ahead and surplus of adopted rows; parked slots; cached
prefixes. Only then somebody is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from vattn.kv.base import AttentionInputs, Chunk, ContiguousInputs, KVCache, KVStats
from vattn.kv.layout import KVLayout, KVShape, RowLayout, kv_views
from vattn.kv.mapped_slots import MappedSlots
from vattn.kv.page_map import PageMap, mapped_pages
from vattn.kv.plan import contiguous_inputs
from vattn.kv.shared_pages import SharedPages
from vattn.kv.sharing import Content, Hit
from vattn.kv.tails import TailCopier
from vattn.kv.usage import MemoryUsage
from vattn.vmm.driver import Driver, OutOfMemory
from vattn.vmm.retire import Event

WATERMARK = 0.01  # share of the pool that a new request leaves to the growth of those that live


@dataclass
class _Live:
    """A live request: its slot, the tokens it has room for, and what others may share."""

    slot: int
    tokens: int
    salt: str | None = None
    text: Sequence[int] = ()
    """Its tokens, of which the first `written` have K and V."""
    written: int = 0
    entered: int = 0
    """Units that are in the prefix cache by now."""
    room: int = 0
    """Up to so many tokens no page more is needed; 0: not looked up yet."""


class VirtualKVCache(KVCache):
    """`max_rows` slots in one reservation, backed by pages under `budget_bytes`.

    `background`: a thread maps each request's next page while the device computes.
    `fingerprint`: of the model, for the prefix cache; None: no prefix cache. `unit`: tokens of its entries.
    """

    name: ClassVar[str] = "virtual"
    reads: ClassVar[type[AttentionInputs]] = ContiguousInputs

    def __init__(
        self,
        shape: KVShape,
        driver: Driver,
        *,
        budget_bytes: int,
        max_tokens: int,
        max_rows: int,
        layout: KVLayout,
        page_bytes: int,
        background: bool = False,
        fingerprint: str | None = None,
        unit: int = 16,
    ) -> None:
        self.shape = shape
        self.max_rows = max_rows
        rows = max_rows + (fingerprint is not None)  # one set apart, to copy from cached pages
        self.layout = RowLayout(layout, shape, rows, max_tokens, page_bytes)
        self._mapped = MappedSlots(
            driver, self.layout, budget_bytes=budget_bytes, background=background, evict=self._evict
        )
        self._slots, self._pool = self._mapped.slots, self._mapped.pool
        self._scratch = None if fingerprint is None else self._slots.set_apart()
        self._tails = TailCopier(self._slots, self._scratch)
        self._shared = SharedPages(self._slots, self._pool, self.layout, fingerprint, unit)
        space = self._mapped.space
        memory = space.tensor(self.layout.memory_shape, self.layout.memory_strides, shape.dtype)
        self._kv = kv_views(memory, shape)
        self._live: dict[str, _Live] = {}
        self._stats = KVStats()
        self._closed = False

    @property
    def table_width(self) -> int:
        return 0

    @property
    def shares_prefixes(self) -> bool:
        return self._shared.prefix is not None

    def describe(self) -> dict[str, str | int]:
        return {
            "layout": str(self.layout.kind),
            "page_bytes": self.layout.page_bytes,
            "pages": self._mapped.total_pages,
            "rows": self.max_rows,
        }

    def tokens_in(self, budget_bytes: int) -> int:
        pages = budget_bytes // self.layout.page_bytes // self.layout.ranges
        return min(self.layout.max_tokens, self.layout.tokens(pages))

    # ------------------------------------------------------------------ admission
    def can_admit(self, tokens: int, token_ids: Sequence[int] = (), *, salt: str | None = None) -> bool:
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return False
        total, holders = self._mapped.total_pages, self._shared.holders
        spare = max(1, int(WATERMARK * total)) if self._live else 0
        for hit in (self._shared.hit(token_ids, salt), Hit()):
            # Shared pages that requests need already cost nothing; a tail's source must stay for the copy.
            new = self.layout.pages(tokens) - sum(bool(holders.needs(s[0])) for s in hit.shared)
            new += hit.tail is not None and not holders.needs(hit.tail[0])
            if (holders.num_needed + new) * self.layout.ranges + spare <= total:
                return True
        return False

    def awaits(self, token_ids: Sequence[int], *, salt: str | None = None) -> bool:
        prefix = self._shared.prefix
        return prefix is not None and salt is not None and prefix.awaits(token_ids, salt)

    def attach(
        self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None, resumed: bool = False
    ) -> int | None:
        if request_id in self._live:
            raise KeyError(f"request {request_id!r} is attached already")
        tokens = len(token_ids)
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return None
        hit = self._shared.hit(token_ids, salt)
        live, found = None, self._shared.continuation(token_ids, hit)
        if found is not None:
            live = self._go_on(token_ids, salt, *found)
            if live is None:  # what was found may have been evicted on the way
                hit = self._shared.hit(token_ids, salt)
        live = live or self._start(token_ids, salt, hit)
        if live is None and hit.cached:
            live = self._start(token_ids, salt, Hit())
        if live is None:
            return None
        self._add(request_id, live)
        if self._shared.prefix is not None and salt is not None:
            self._shared.prefix.touch(hit.entries)
            self._shared.prefix.claim(request_id, token_ids, salt)
            self._stats.count_hit(live.written, tokens, resumed=resumed)
        return live.written

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        if child_id in self._live:
            raise KeyError(f"request {child_id!r} is attached already")
        parent = self._live[parent_id]
        parent.written = max(parent.written, tokens)
        if not self._slots.num_untaken:
            return False
        full, rest = self.layout.whole_pages(tokens)
        hit = Hit(cached=tokens, shared=self._slots.page_sets(parent.slot, 0, full))
        live = self._start(range(tokens), parent.salt, hit)
        if live is None:
            return False
        if rest:
            start = full * self.layout.page_bytes
            try:
                self._tails.copy(parent.slot, live.slot, start, start + rest)
            except BaseException:
                self._leave(live)
                raise
            self._count_tail(tokens, full)
        live.text, live.entered = parent.text, min(parent.entered, tokens // self._shared.unit)
        self._add(child_id, live)
        self._stats.forks += 1
        return True

    def _go_on(
        self, token_ids: Sequence[int], salt: str | None, slot: int, cached: int, content: Content
    ) -> _Live | None:
        """Take over a parked slot that holds `cached` of the tokens, as it lies: no mapping, no copy."""
        self._slots.take_parked(slot)
        self._shared.forget(slot)
        live = _Live(slot, len(token_ids), salt, token_ids, cached, content.entered)
        if not self._make_room(live, self.layout.whole_pages(cached)[0]):
            return None
        self._stats.rows_continued += 1
        return live

    def _start(self, token_ids: Sequence[int], salt: str | None, hit: Hit) -> _Live | None:
        """A slot that begins with `hit`: its full pages by reference, the tail copied. None: short."""
        tokens, full, adopted = len(token_ids), len(hit.shared), False
        tail = hit.tail or ()
        self._pool.retain_all(tail)  # nobody may evict it before it is copied
        try:
            if full:
                slot = self._slots.take_empty()
            else:
                slot, adopted = self._slots.take(self.layout.pages(tokens))
            self._shared.forget(slot)
            try:
                self._slots.alias(slot, hit.shared)
            except OutOfMemory:  # of mappings: the pages themselves are there
                self._slots.leave(slot)
                return None
            except BaseException:
                self._slots.leave(slot)
                raise
            live = _Live(slot, tokens, salt, token_ids, hit.cached)
            live.entered = min(len(hit.entries), hit.cached // self._shared.unit)
            if not self._make_room(live, full):
                return None
            if hit.tail is not None:
                start, end = full * self.layout.page_bytes, hit.cached * self.layout.token_bytes
                try:
                    self._tails.copy_set(hit.tail, slot, start, end)
                except OutOfMemory:
                    self._leave(live)
                    return None
                except BaseException:
                    self._leave(live)
                    raise
                self._count_tail(hit.cached, full)
            self._stats.rows_adopted += adopted
            self._stats.units_shared += full * self.layout.ranges
            return live
        finally:
            self._pool.release_all(tail)

    def _make_room(self, live: _Live, have: int) -> bool:
        """Map a new request's pages behind the first `have`. False: memory is short and the slot is left."""
        holders, slot = self._shared.holders, live.slot
        holders.need(self._slots.first_pages(slot, 0, have))  # so that they are not evicted meanwhile
        mapped = False
        try:
            mapped = self._mapped.map(slot, live.tokens)
        finally:
            holders.release(self._slots.first_pages(slot, 0, have))
            if not mapped:
                self._slots.leave(slot)
        if mapped:
            holders.need(self._slots.first_pages(slot, 0, self.layout.pages(live.tokens)))
        return mapped

    def _count_tail(self, tokens: int, full: int) -> None:
        """The tail behind `full` shared pages of `tokens` tokens was copied."""
        page = self.layout.page_bytes
        alone = tokens - full * page // self.layout.token_bytes
        nbytes = (tokens * self.layout.token_bytes - full * page) * self.layout.ranges
        self._stats.count_copy(alone, nbytes)

    # ------------------------------------------------------------------ life
    def _add(self, request_id: str, live: _Live) -> None:
        self._live[request_id] = live
        self._mapped.demand[live.slot] = live.tokens

    def grow(self, request_id: str, tokens: int) -> bool:
        live = self._live[request_id]
        if tokens <= live.tokens:
            return True
        if tokens > live.room:
            if tokens > self.layout.max_tokens or not self._mapped.map(live.slot, tokens):
                return False
            had, has = self.layout.pages(live.tokens), self.layout.pages(tokens)
            if has > had:
                self._shared.holders.need(self._slots.first_pages(live.slot, had, has))
            live.room = min(self.layout.tokens(has), self.layout.max_tokens)
        live.tokens = self._mapped.demand[live.slot] = tokens
        return True

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:
        live = self._live[request_id]
        live.text, live.written = token_ids, min(n, len(token_ids))
        live.entered = self._shared.enter(live.slot, token_ids, live.salt, live.written, live.entered)

    def free(self, request_id: str) -> None:
        self._mapped.settle(self._live[request_id].slot)
        live = self._live.pop(request_id)
        del self._mapped.demand[live.slot]
        if self._shared.prefix is not None:
            self._shared.prefix.unclaim(request_id)
            if live.salt is not None:
                self._shared.remember(live.slot, live.text, live.salt, live.written, live.entered)
        self._leave(live)

    def _leave(self, live: _Live) -> None:
        pages = self._slots.first_pages(live.slot, 0, self.layout.pages(live.tokens))
        self._shared.holders.release(pages)
        self._slots.leave(live.slot)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._shared.clear()
        for request_id, live in self._live.items():
            live.salt = None
            if self._shared.prefix is not None:
                self._shared.prefix.unclaim(request_id)

    def _evict(self) -> bool:
        return self._shared.evict()

    # ------------------------------------------------------------------ swap, size
    def salt(self, request_id: str) -> str | None:
        return self._live[request_id].salt

    def written(self, request_id: str) -> int:
        return self._live[request_id].written

    def shared_tokens(self, request_id: str) -> int:
        live, holders = self._live[request_id], self._shared.holders
        pages = self._slots.first_pages(live.slot, 0, self.layout.pages(live.written))
        shared = 0
        while shared < len(pages) and holders.needs(pages[shared]) > 1:
            shared += 1
        return min(live.written, self.layout.tokens(shared))

    def _read(self, request_id: str, n: int) -> torch.Tensor:
        return self._tails.bytes_of(self._live[request_id].slot, 0, n * self.layout.token_bytes)

    def _write(self, request_id: str, start: int, data: torch.Tensor) -> int:
        first = start * self.layout.token_bytes
        target = self._tails.bytes_of(self._live[request_id].slot, first, data.shape[1])
        target.copy_(data[:, first:])
        return target.numel()

    @property
    def budget_bytes(self) -> int:
        return self._pool.budget_bytes

    def resize(self, budget_bytes: int) -> bool:
        return self._mapped.resize(budget_bytes)

    # ------------------------------------------------------------------ steps
    def begin_step(self, chunks: Sequence[Chunk]) -> ContiguousInputs:
        slots = [self._live[c.request_id].slot for c in chunks]
        self._mapped.map_ahead()
        return contiguous_inputs(self.tensor, self.layout.row_tokens, chunks, slots, self.scales)

    def submitted(self, event: Event | None) -> None:
        self._mapped.space.retirement.submit(event)
        self._mapped.space.retirement.poll()

    def live(self) -> Iterable[str]:
        return self._live.keys()

    # ------------------------------------------------------------------ books
    def usage(self) -> MemoryUsage:
        layout, holders = self.layout, self._shared.holders
        set_bytes = layout.ranges * layout.page_bytes
        in_use, cached = holders.num_needed * set_bytes, holders.num_cached_only * set_bytes
        mapped = sum(layout.pages(live.tokens) for live in self._live.values()) * set_bytes
        logical = sum(live.tokens for live in self._live.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=self._mapped.space.reserved_bytes,
            physical=self._pool.created_bytes,
            in_use=in_use,
            parked=self._pool.in_use_bytes - in_use - cached,
            cached=cached,
            free=self._pool.free_bytes,
            logical=logical,
            shared_saved=mapped - in_use,
            tail_waste=mapped - logical,
            external_waste=0,
        )

    def page_map(self) -> PageMap:
        owners = {live.slot: (request_id, live.tokens) for request_id, live in self._live.items()}
        with self._mapped.space.frozen():  # or the thread would map between the two
            rows, states = self._shared.map_rows(owners)
            return mapped_pages(
                self.layout, rows, states, self._shared.holders.all_cached(), self.budget_bytes, self.usage()
            )

    def stats(self) -> KVStats:
        return replace(
            self._stats.add_swaps(self.swap),
            map_stall_seconds=self._mapped.stall_seconds,
            prefix_evictions=self._shared.evictions,
            driver_calls=dict(self._mapped.driver.counts),
        )

    def check(self) -> None:
        if self._closed:
            assert not self._live
            return
        self._mapped.check()
        slots = {live.slot: live.tokens for live in self._live.values()}
        leaving = self._mapped.space.retiring_references()
        assert slots == self._mapped.demand, "demand differs from what requests hold"
        for request_id, live in self._live.items():
            assert live.written <= live.tokens, f"{request_id}: more written than there is room for"
            writable = self._shared.writable(live.slot, live.written, leaving)
            assert writable, f"{request_id} would write a page that others can see"
        references = self._shared.check(slots, list(self._live))
        self._slots.check([*slots, *([] if self._scratch is None else [self._scratch])], references)
        assert self.usage().tail_waste <= len(self._live) * self.layout.page_bytes * self.layout.ranges
        self.usage().check()
        if self.swap is not None:
            self.swap.check()

    def close(self) -> None:
        """Give everything back. The KV tensor must not be touched afterwards.

        A DriverError leaves the rest to another call.
        """
        if not self._closed:
            for request_id in list(self._live):
                self.free(request_id)
            self._closed = True
            self._kv = None
            self._tails.close()
            self.reset_prefix_cache()
        self._mapped.close()
