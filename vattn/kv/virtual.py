"""`virtual`: each request owns a contiguous range of addresses; the driver maps pages as it grows.

    slot 0 (live)    | page 7 | page 2 | page 9 |  . . reserved, unmapped . .  |
    slot 1 (parked)  | page 4 | page 1 |  . . . . . . . . . . . . . . . . . .  |
    slot 2 (empty)   |  . . . . . . . . . . . . . . . . . . . . . . . . . . .  |

A finished request leaves its slot parked, still mapped; the next one of similar size takes it over
without a driver call. What a slot has mapped beyond its tokens' need (adopted surplus, pages mapped
ahead) and parked slots give way, in that order, before anybody is refused memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from vattn.kv.base import AttentionInputs, Chunk, ContiguousInputs, KVCache, KVStats
from vattn.kv.layout import KVLayout, KVShape, RowLayout, kv_views
from vattn.kv.plan import contiguous_inputs
from vattn.kv.slots import Slots
from vattn.kv.usage import MemoryUsage
from vattn.vmm.driver import CallCounter, Driver, OutOfMemory
from vattn.vmm.mapper import Mapper
from vattn.vmm.pool import PagePool
from vattn.vmm.retire import Event
from vattn.vmm.space import AddressSpace

WATERMARK = 0.01  # share of the pool that a new request leaves to the growth of those that live


@dataclass
class _Live:
    """A live request: its slot and the tokens it has room for."""

    slot: int
    tokens: int


class VirtualKVCache(KVCache):
    """`max_rows` slots in one reservation, backed by pages under `budget_bytes`.

    `background`: a thread maps each request's next page while the device computes.
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
    ) -> None:
        self.shape = shape
        self.layout = RowLayout(layout, shape, max_rows, max_tokens, page_bytes)
        self._driver = CallCounter(driver)
        self._pool = PagePool(self._driver, page_bytes, budget_bytes)
        ranges = self.layout.ranges
        self._space = AddressSpace(self._driver, self._pool, max_rows * ranges, self.layout.row_bytes)
        self._slots = Slots(self._space, max_rows, ranges)
        memory = self._space.tensor(self.layout.memory_shape, self.layout.memory_strides, shape.dtype)
        self._kv = kv_views(memory, shape)
        self._live: dict[str, _Live] = {}
        self._mapper = Mapper() if background else None
        self._stats = KVStats()
        self._closed = False

    # ------------------------------------------------------------------ pages
    def _need(self, tokens: int) -> int:
        """Physical pages (over all ranges) that `tokens` tokens need."""
        return self.layout.pages(tokens) * self.layout.ranges

    def _surplus(self, live: _Live) -> int:
        return self._slots.mapped(live.slot) - self.layout.pages(live.tokens)

    @property
    def _pages_in_use(self) -> int:
        return sum(self._need(live.tokens) for live in self._live.values())

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
        self._slots.reclaim(short())
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
            "rows": layout.rows,
        }

    @property
    def capacity_tokens(self) -> int:
        return min(self.layout.max_tokens, self.layout.tokens(self._total_pages // self.layout.ranges))

    def can_admit(self, tokens: int) -> bool:
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return False
        spare = max(1, int(WATERMARK * self._total_pages)) if self._live else 0
        return self._pages_in_use + self._need(tokens) + spare <= self._total_pages

    def attach(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        if request_id in self._live:
            raise KeyError(f"request {request_id!r} is attached already")
        tokens = len(token_ids)
        if tokens > self.layout.max_tokens or not self._slots.num_untaken:
            return None
        slot, adopted = self._slots.take(self.layout.pages(tokens))
        mapped = False
        try:
            mapped = self._map(slot, tokens)
        finally:
            if not mapped:
                self._slots.leave(slot)
        if not mapped:
            return None
        self._live[request_id] = _Live(slot, tokens)
        self._stats.rows_adopted += adopted
        return 0

    def grow(self, request_id: str, tokens: int) -> bool:
        live = self._live[request_id]
        if tokens > self.layout.max_tokens or not self._map(live.slot, tokens):
            return False
        live.tokens = max(live.tokens, tokens)
        return True

    def free(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        if self._mapper is not None:
            self._mapper.wait([live.slot])
        self._slots.leave(live.slot)

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
        logical = sum(live.tokens for live in self._live.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=self._space.reserved_bytes,
            physical=self._pool.created_bytes,
            in_use=in_use,
            parked=self._pool.in_use_bytes - in_use,
            cached=0,
            free=self._pool.free_bytes,
            logical=logical,
            shared_saved=0,
            tail_waste=in_use - logical,
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
        self._slots.check(live.slot for live in self._live.values())
        self._pool.check()
        for request_id, live in self._live.items():
            assert self._surplus(live) >= 0, f"{request_id}: {live.tokens} tokens are not mapped"
        assert self.usage().tail_waste <= len(self._live) * self.layout.page_bytes * self.layout.ranges
        self.usage().check()

    def close(self) -> None:
        """Give everything back. The KV tensor must not be touched afterwards."""
        if self._closed:
            return
        self._closed = True
        self._kv = None
        self._live.clear()
        if self._mapper is not None:
            self._mapper.close()
        self._space.close()
        self._pool.trim()
