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

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from vattn.kv.base import AttentionInputs, Chunk, ContiguousInputs, KVCache, KVStats
from vattn.kv.holders import Holders
from vattn.kv.layout import KVLayout, KVShape, RowLayout, kv_views
from vattn.kv.plan import contiguous_inputs
from vattn.kv.prefix import PrefixCache
from vattn.kv.sharing import Content, Hit, Memory, continuation, find_hit
from vattn.kv.slots import Slots
from vattn.kv.tails import TailCopier
from vattn.kv.usage import MemoryUsage
from vattn.vmm.driver import CallCounter, Driver, OutOfMemory
from vattn.vmm.mapper import Mapper
from vattn.vmm.pool import PagePool
from vattn.vmm.retire import Event
from vattn.vmm.space import AddressSpace

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
        self._driver = CallCounter(driver)
        self._pool = PagePool(self._driver, page_bytes, budget_bytes)
        ranges = self.layout.ranges
        self._space = AddressSpace(self._driver, self._pool, rows * ranges, self.layout.row_bytes)
        self._slots = Slots(self._space, rows, ranges)
        self._scratch = None if fingerprint is None else self._slots.set_apart()
        self._tails = TailCopier(self._slots, self._scratch)
        memory = self._space.tensor(self.layout.memory_shape, self.layout.memory_strides, shape.dtype)
        self._kv = kv_views(memory, shape)
        self._live: dict[str, _Live] = {}
        self._holders = Holders()
        self.prefix: PrefixCache[Memory] | None = None
        if fingerprint is not None:
            self.prefix = PrefixCache(unit, fingerprint, self._uncache)
        self._contents: dict[int, Content] = {}
        """What parked slots held when they were left, where a later request may go on."""
        self._mapper = Mapper() if background else None
        self._stats = KVStats()
        self._closed = False

    # ------------------------------------------------------------------ pages
    def _surplus(self, live: _Live) -> int:
        return self._slots.mapped(live.slot) - self.layout.pages(live.tokens)

    @property
    def _pages_in_use(self) -> int:
        return self._holders.num_needed * self.layout.ranges

    @property
    def _total_pages(self) -> int:
        return self._pool.budget_bytes // self.layout.page_bytes

    def _reclaim(self, pages: int, keep: int, *, device_short: bool = False) -> None:
        """Unmap what nobody needs until `pages` pages can be acquired, or nothing is left to take.

        Slot `keep` is the one that needs them: what it has mapped already stays. `device_short`: the
        device has run out before the budget did, so only pages that exist count.
        """
        free = self._pool.free_bytes // self.layout.page_bytes

        def short() -> int:
            if not device_short:
                return pages - self._pool.available_pages
            return pages - (self._pool.free_bytes // self.layout.page_bytes - free)

        if short() > 0 and self._mapper is not None:
            self._mapper.drain()  # or it would map again what is taken here
        for live in self._live.values():
            if short() <= 0:
                return
            if live.slot != keep:
                self._slots.truncate(live.slot, self.layout.pages(live.tokens))
        while short() > 0 and self._slots.reclaim(short()):
            pass
        while short() > 0 and self.prefix is not None and self.prefix.evict(self._idle):
            self._stats.prefix_evictions += 1
        if short() > 0:
            self._space.retirement.drain()  # pages given up may still be read by the step in flight

    def _map(self, slot: int, tokens: int) -> bool:
        """Map what `tokens` tokens of `slot` need and do not have. All or nothing."""
        if self.layout.pages(tokens) <= self._slots.mapped(slot):
            return True
        started = time.perf_counter()
        try:
            if self._mapper is not None:
                self._mapper.wait([slot])
            missing = self.layout.pages(tokens) - self._slots.mapped(slot)
            if missing <= 0:
                return True
            self._reclaim(missing * self.layout.ranges, keep=slot)
            if self._extend(slot, missing):
                return True
            self._reclaim(missing * self.layout.ranges, keep=slot, device_short=True)
            return self._extend(slot, missing)
        finally:
            self._stats.map_stall_seconds += time.perf_counter() - started

    def _extend(self, slot: int, n_pages: int) -> bool:
        """False when pages are short, whether by the budget or on the machine: the remedy is the same."""
        try:
            return self._slots.extend(slot, n_pages)
        except OutOfMemory:
            return False

    def _map_ahead(self) -> None:
        """Have the thread map one page more wherever the next token starts a new one."""
        if self._mapper is None:
            return
        for live in self._live.values():
            want = self.layout.pages(min(live.tokens + 1, self.layout.max_tokens))
            missing = want - self._slots.mapped(live.slot)
            if missing > 0:
                self._mapper.submit(live.slot, partial(self._extend_if_possible, live.slot, missing))

    def _extend_if_possible(self, slot: int, n_pages: int) -> None:
        with suppress(OutOfMemory):  # nobody needs these pages yet; who does will ask, and reclaim
            self._slots.extend(slot, n_pages)

    # ------------------------------------------------------------------ the contract
    @property
    def table_width(self) -> int:
        return 0

    def describe(self) -> dict[str, str | int]:
        layout = self.layout
        return {
            "layout": str(layout.kind),
            "page_bytes": layout.page_bytes,
            "pages": self._total_pages,
            "rows": self.max_rows,
        }

    @property
    def capacity_tokens(self) -> int:
        return min(self.layout.max_tokens, self.layout.tokens(self._total_pages // self.layout.ranges))

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix is not None

    def can_admit(self, tokens: int, token_ids: Sequence[int] = (), *, salt: str | None = None) -> bool:
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return False
        spare = max(1, int(WATERMARK * self._total_pages)) if self._live else 0
        for hit in (self._hit(token_ids, salt), Hit()):
            # Shared pages that requests need already cost nothing; a tail's source must stay for the copy.
            new = self.layout.pages(tokens) - sum(bool(self._holders.needs(s[0])) for s in hit.shared)
            new += hit.tail is not None and not self._holders.needs(hit.tail[0])
            if (self._holders.num_needed + new) * self.layout.ranges + spare <= self._total_pages:
                return True
        return False

    def awaits(self, token_ids: Sequence[int], *, salt: str | None = None) -> bool:
        return self.prefix is not None and salt is not None and self.prefix.awaits(token_ids, salt)

    def attach(
        self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None, resumed: bool = False
    ) -> int | None:
        if request_id in self._live:
            raise KeyError(f"request {request_id!r} is attached already")
        tokens = len(token_ids)
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return None
        hit = self._hit(token_ids, salt)
        live = self._go_on(token_ids, salt, hit) or self._start(token_ids, salt, hit)
        if live is None and hit.cached:
            live = self._start(token_ids, salt, Hit())
        if live is None:
            return None
        self._live[request_id] = live
        if self.prefix is not None and salt is not None:
            self.prefix.touch(hit.entries)
            self.prefix.claim(request_id, token_ids, salt)
            self._stats.count_hit(live.written, tokens, resumed=resumed)
        return live.written

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        if child_id in self._live:
            raise KeyError(f"request {child_id!r} is attached already")
        parent = self._live[parent_id]
        if not self._slots.num_untaken:
            return False
        full, rest = self.layout.whole_pages(tokens)
        hit = Hit(cached=tokens, shared=self._slots.page_sets(parent.slot, 0, full))
        live = self._start(range(tokens), parent.salt, hit)
        if live is None:
            return False
        if rest:
            page = self.layout.page_bytes
            self._tails.copy(parent.slot, live.slot, full * page, full * page + rest)
            self._count_tail(tokens, full)
        live.text, live.entered = parent.text, min(parent.entered, tokens // self._unit)
        self._live[child_id] = live
        self._stats.forks += 1
        return True

    def grow(self, request_id: str, tokens: int) -> bool:
        live = self._live[request_id]
        if tokens > self.layout.max_tokens or not self._map(live.slot, tokens):
            return False
        if tokens > live.tokens:
            had, has = self.layout.pages(live.tokens), self.layout.pages(tokens)
            if has > had:
                self._holders.need(self._slots.first_pages(live.slot, had, has))
            live.tokens = tokens
        return True

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:
        live = self._live[request_id]
        live.text, live.written = token_ids, min(n, len(token_ids))
        if self.prefix is None or live.salt is None:
            return
        units = live.written // self.prefix.unit
        if units > live.entered:
            self.prefix.insert(
                token_ids, live.salt, units, lambda i: self._enter(live.slot, i), start=live.entered
            )
            live.entered = units

    def free(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        if self._mapper is not None:
            self._mapper.wait([live.slot])
        if self.prefix is not None:
            self.prefix.unclaim(request_id)
            if live.salt is not None and live.entered:
                key = self.prefix.keys(live.text, live.salt)[live.entered - 1]
                self._contents[live.slot] = Content(live.text, live.written, live.entered, key)
        self._leave(live)

    def reset_prefix_cache(self) -> None:
        self._contents.clear()
        if self.prefix is not None:
            self.prefix.clear()

    # ------------------------------------------------------------------ sharing
    @property
    def _unit(self) -> int:
        return self.prefix.unit if self.prefix is not None else 1

    def _hit(self, token_ids: Sequence[int], salt: str | None) -> Hit:
        if self.prefix is None or salt is None:
            return Hit()
        return find_hit(self.prefix, self.layout, token_ids, salt)

    def _enter(self, slot: int, unit: int) -> Memory:
        """The prefix cache holds the pages of a unit of a live slot's text."""
        first, last = self.layout.page_span(unit * self._unit, (unit + 1) * self._unit)
        memory = tuple(enumerate(self._slots.page_sets(slot, first, last), first))
        for _, pages in memory:
            if self._holders.cache(pages[0]):
                self._pool.retain_all(pages)
        return memory

    def _uncache(self, memory: Memory) -> None:
        for _, pages in memory:
            if self._holders.uncache(pages[0]):
                self._pool.release_all(pages)

    def _idle(self, memory: Memory) -> bool:
        return any(not self._holders.needs(pages[0]) for _, pages in memory)

    def _held(self, page: int) -> int:
        return int(self._holders.cached(page))

    def _go_on(self, token_ids: Sequence[int], salt: str | None, hit: Hit) -> _Live | None:
        """Take over the parked slot that holds the longest match, as it lies: no mapping, no copy."""
        found = continuation(self._contents, token_ids, hit)
        if found is None or salt is None:
            return None
        slot, cached = found
        first = cached * self.layout.token_bytes // self.layout.page_bytes
        mapped = self._slots.mapped(slot)
        if not self._slots.is_parked(slot) or mapped < self.layout.pages(cached):
            return None  # its pages were reclaimed meanwhile
        if not self._slots.private(slot, first, self._held):
            return None
        self._slots.take_parked(slot)
        content = self._contents.pop(slot)
        live = self._settle(_Live(slot, len(token_ids), salt, token_ids, cached, content.entered), first)
        if live is not None:
            self._stats.rows_continued += 1
        return live

    def _start(self, token_ids: Sequence[int], salt: str | None, hit: Hit) -> _Live | None:
        """A slot that begins with `hit`: its full pages by reference, the tail copied."""
        tokens = len(token_ids)
        adopted = False
        if hit.shared:
            slot = self._slots.take_empty()
        else:
            slot, adopted = self._slots.take(self.layout.pages(tokens))
        self._contents.pop(slot, None)
        tail = hit.tail or ()
        self._pool.retain_all(tail)
        try:
            try:
                self._slots.alias(slot, hit.shared)
            except BaseException:
                self._slots.leave(slot)
                raise
            full = len(hit.shared)
            entered = min(len(hit.entries), hit.cached // self._unit)
            live = self._settle(_Live(slot, tokens, salt, token_ids, hit.cached, entered), full)
            if live is None:
                return None
            if hit.tail is not None:
                start = full * self.layout.page_bytes
                end = hit.cached * self.layout.token_bytes
                try:
                    self._tails.copy_set(hit.tail, slot, start, end)
                except BaseException:
                    self._leave(live)
                    raise
                self._count_tail(hit.cached, full)
            self._stats.rows_adopted += adopted
            self._stats.units_shared += full * self.layout.ranges
            return live
        finally:
            self._pool.release_all(tail)

    def _settle(self, live: _Live, have: int) -> _Live | None:
        """Map a new request's remaining pages; its first `have` are there. None: short, the slot is left."""
        need = self.layout.pages(live.tokens)
        self._holders.need(self._slots.first_pages(live.slot, 0, have))  # so that they are not evicted
        mapped = False
        try:
            mapped = self._map(live.slot, live.tokens)
        finally:
            self._holders.release(self._slots.first_pages(live.slot, 0, have))
            if not mapped:
                self._slots.leave(live.slot)
        if not mapped:
            return None
        self._holders.need(self._slots.first_pages(live.slot, 0, need))
        return live

    def _leave(self, live: _Live) -> None:
        self._holders.release(self._slots.first_pages(live.slot, 0, self.layout.pages(live.tokens)))
        self._slots.leave(live.slot)

    def _count_tail(self, tokens: int, full: int) -> None:
        """The tail behind `full` shared pages of `tokens` tokens was copied."""
        page = self.layout.page_bytes
        alone = tokens - full * page // self.layout.token_bytes
        nbytes = (tokens * self.layout.token_bytes - full * page) * self.layout.ranges
        self._stats.count_copy(alone, nbytes)

    # ------------------------------------------------------------------ steps
    def begin_step(self, chunks: Sequence[Chunk]) -> ContiguousInputs:
        slots = [self._live[c.request_id].slot for c in chunks]
        self._map_ahead()
        return contiguous_inputs(self.tensor, self.layout.row_tokens, chunks, slots, self.scales)

    def submitted(self, event: Event | None) -> None:
        self._space.retirement.submit(event)
        self._space.retirement.poll()

    def live(self) -> Iterable[str]:
        return self._live.keys()

    def usage(self) -> MemoryUsage:
        page = self.layout.page_bytes
        in_use = self._pages_in_use * page
        cached = self._holders.num_cached_only * self.layout.ranges * page
        mapped = sum(self.layout.pages(v.tokens) for v in self._live.values()) * self.layout.ranges * page
        logical = sum(live.tokens for live in self._live.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=self._space.reserved_bytes,
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

    def stats(self) -> KVStats:
        return replace(self._stats, driver_calls=dict(self._driver.counts))

    def check(self) -> None:
        if self._closed:
            assert not self._live
            return
        if self._mapper is not None:
            self._mapper.drain()
        apart = [] if self._scratch is None else [self._scratch]
        needs: Counter[int] = Counter()
        for request_id, live in self._live.items():
            assert self._surplus(live) >= 0, f"{request_id}: {live.tokens} tokens are not mapped"
            assert live.written <= live.tokens, f"{request_id}: more written than there is room for"
            needs.update(self._slots.first_pages(live.slot, 0, self.layout.pages(live.tokens)))
            first = live.written * self.layout.token_bytes // self.layout.page_bytes
            assert self._slots.private(live.slot, first, self._held), (
                f"{request_id} would write a shared page"
            )
        sets = {pages[0]: pages for memory in self._memories() for _, pages in memory}
        held = Counter(pages[0] for memory in self._memories() for _, pages in memory)
        self._holders.check(dict(needs), dict(held))
        self._slots.check(
            [*(live.slot for live in self._live.values()), *apart],
            {page: 1 for pages in sets.values() for page in pages},
        )
        self._pool.check()
        if self.prefix is not None:
            self.prefix.check(list(self._live))
        assert not any(live.slot in self._contents for live in self._live.values())
        assert self.usage().tail_waste <= len(self._live) * self.layout.page_bytes * self.layout.ranges
        self.usage().check()

    def _memories(self) -> list[Memory]:
        return [] if self.prefix is None else self.prefix.memories()

    def close(self) -> None:
        """Give everything back. The KV tensor must not be touched afterwards."""
        if self._closed:
            return
        self._closed = True
        self._kv = None
        self._tails.close()
        if self._mapper is not None:
            self._mapper.close()
        self.reset_prefix_cache()
        self._live.clear()
        self._holders = Holders()
        self._space.close()
        self._pool.trim()
