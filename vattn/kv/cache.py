"""The KV cache as the engine sees it: books that decide and a memory that carries it out, under one roof.

    scheduler, pipeline ──> KVCache ──┬─ Books    who holds what, what gives way        vattn/kv/books
                                      └─ Memory   one device's bytes, and its time      vattn/kv/memory

What kind of cache it is says its `Backend` (`vattn/kv/backends`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vattn.kv.backends.base import Backend
from vattn.kv.books import report
from vattn.kv.books.operations import carry_out
from vattn.kv.books.rows import MappedBooks
from vattn.kv.inputs import AttentionInputs, Chunk
from vattn.kv.memory.swap import SwapSpace
from vattn.kv.memory.views import KVViews
from vattn.kv.page_map import PageMap
from vattn.kv.stats import KVStats
from vattn.kv.usage import MemoryUsage
from vattn.vmm.retire import Event

if TYPE_CHECKING:
    import torch


class KVCache:
    """KV memory for many requests. Not thread-safe: one engine drives it.

    Life of a request:  attach or fork -> (grow -> begin_step -> computed)* -> free,
    or swap_out -> swap_in, and on. `check()` may be called at any time.

    Sharing: what `computed` says is written may be given to later requests with the same prefix. Memory
    that two requests can see is never written again.

    Exhaustion is a value: False or None, and nothing has changed. A failed driver call, copy or allocation is
    raised, and nothing has changed either.
    """

    def __init__(self, backend: Backend) -> None:
        setting = backend.setting
        self.backend = backend
        self.shape = setting.shape
        layout = backend.layout()
        self.books = backend.books(layout)
        self.memory = backend.memory(layout, self.books)
        self.swap: SwapSpace | None = None
        """Where swapped requests wait; None: nobody is swapped."""
        self.static_scales: torch.Tensor | None = None
        """float32 `[layer, 2, kv_head]` of a cache quantised with scales that are known beforehand."""
        self.generation = 0
        """Counts the times the memory moved to other addresses: `views` of before are void."""
        self._budget = setting.budget_bytes
        self._closed = False

    # ------------------------------------------------------------------ what it is
    @property
    def name(self) -> str:
        """Of its backend."""
        return self.backend.name

    @property
    def reads(self) -> type[AttentionInputs]:
        """The kind of inputs `begin_step` gives, which the attention must be able to read."""
        return self.backend.reads

    def describe(self) -> dict[str, str | int]:
        """The choices that make up this cache, for reports: layout, page or block size, number of them."""
        return self.backend.describe(self.books)

    @property
    def table_width(self) -> int:
        """Blocks of the longest request; 0 where a request is one row."""
        return self.books.layout.width if self.backend.has_tables else 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether there is a prefix cache."""
        return self.books.prefix is not None

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole cache can give to one request that is alone."""
        return self.tokens_in(self.budget_bytes)

    def tokens_in(self, budget_bytes: int) -> int:
        """Tokens that a cache of this budget could give to one request that is alone."""
        layout = self.books.layout
        return min(layout.max_tokens, layout.tokens(budget_bytes // layout.bytes))

    def room(self, tokens: int) -> int:
        """Tokens that a request of `tokens` tokens may have without another page or block."""
        layout = self.books.layout
        return min(layout.max_tokens, layout.tokens(layout.units(tokens)))

    @property
    def reserves(self) -> bool:
        """Whether a request takes its longest length at once."""
        return self.books.reserves

    # ------------------------------------------------------------------ memory
    @property
    def views(self) -> KVViews:
        """The cache's memory, all of it, at addresses that change with `generation` only."""
        return self.memory.views

    @property
    def tensor(self) -> torch.Tensor:
        """`kv[layer, 2, row, position, kv_head, head_dim]`."""
        return self.views.kv

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of a quantised cache, as `AttentionInputs.scales` has them."""
        return self.views.scales if self.static_scales is None else self.static_scales

    # ------------------------------------------------------------------ requests come and go
    def can_admit(
        self,
        tokens: int,
        token_ids: Sequence[int] = (),
        *,
        salt: str | None = None,
        request_id: str | None = None,
    ) -> bool:
        """Could a new request hold `tokens` tokens now, counting what reclaim would bring back?

        `token_ids`, `salt`: as for `attach`; what they find in the prefix cache needs no room. With a
        `request_id` what was found is kept until `attach`, `free` or `discard`, and asking again is cheap.
        Leaves a little room for the growth of those that live, unless there are none.
        """
        books = self.books
        shares = books.prefix is not None and salt is not None
        return books.can_admit(tokens, books.text(request_id, token_ids, salt) if shares else None)

    def awaits(
        self, token_ids: Sequence[int], *, salt: str | None = None, request_id: str | None = None
    ) -> bool:
        """Is a live request just computing a prefix that this one could share if it waited?"""
        books = self.books
        if books.prefix is None or salt is None:
            return False
        return books.awaits(books.text(request_id, token_ids, salt))

    def attach(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        resumed: bool = False,
    ) -> int | None:
        """Admit a request and make room for all of `token_ids`.

        `salt`: who shares prefixes with whom; None: this request neither finds nor leaves any.
        `resumed`: it was here before and was preempted.
        Returns how many of its tokens are already in the cache (at most len - 1), or None when
        memory is short: then nothing has changed. Raises KeyError when it lives already.
        """
        self._require_new(request_id)
        return carry_out(self.books.attach(request_id, token_ids, salt, resumed=resumed), self.memory)

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        """Admit a request that has the first `tokens` tokens of another, all of them computed.

        Whole blocks or pages are shared, the rest is copied (`static`: all of it). False when memory is
        short: then nothing has changed. Raises KeyError when the child lives, or the parent does not.
        """
        self._require_new(child_id)
        return carry_out(self.books.fork(parent_id, child_id, tokens), self.memory)

    def _require_new(self, request_id: str) -> None:
        if request_id in self.books.live:
            raise KeyError(f"request {request_id!r} is attached already")

    def grow(self, request_id: str, tokens: int) -> bool:
        """Make room for `tokens` tokens in all. All or nothing; False means: preempt somebody."""
        books = self.books
        live = books.live[request_id]
        more = tokens - live.tokens
        if more <= 0:
            return True
        if tokens <= live.room:  # nearly always
            live.tokens = tokens
            books.logical += more
            return True
        return carry_out(books.grow(live, tokens), self.memory)

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:
        """K and V of the first `n` tokens are written. They may be shared from here on.

        `token_ids` only grows; it may lack the last of the `n` while that one's value is on its way.
        """
        self.books.computed(self.books.live[request_id], token_ids, n)

    def free(self, request_id: str) -> None:
        """Forget a request. Its memory is parked, cached or given back. Raises KeyError if unknown."""
        carry_out(self.books.free(request_id), self.memory)

    def live(self) -> Iterable[str]:
        """Ids of the attached requests."""
        return self.books.live.keys()

    def salt(self, request_id: str) -> str | None:
        """With whom a live request shares prefixes; None: with nobody."""
        live = self.books.live[request_id]
        return live.text.salt if live.shares else None

    def written(self, request_id: str) -> int:
        """Tokens of a live request whose K and V `computed` (or `attach`, `fork`) said are there."""
        return self.books.live[request_id].written

    def shared_tokens(self, request_id: str) -> int:
        """Leading tokens of a live request that another live request holds as well, in the same memory."""
        return self.books.shared_tokens(self.books.live[request_id])

    # ------------------------------------------------------------------ swap
    def swap_out(self, request_id: str) -> bool:
        """Copy what a request has written to host memory, then let its memory go, as `free` does.

        False when there is no (more) swap space, or nothing written: then nothing has changed.
        """
        written = self.written(request_id)
        if self.swap is None or not written or not self.swap.fits(written * self.shape.token_bytes):
            return False
        with self.memory.epoch():
            data = self.memory.copy_out(*self._place(request_id), written)
            self.swap.put(request_id, data, written, self.salt(request_id))
        try:
            self.free(request_id)
        except BaseException:
            self.swap.discard(request_id)
            raise
        return True

    def swapped(self, request_id: str) -> bool:
        """Is this request's K and V in host memory?"""
        return self.swap is not None and request_id in self.swap

    def swap_in(self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None) -> int | None:
        """`attach` a swapped request and copy its K and V back.

        Returns how many tokens need not be computed, or None when memory is short: then it stays swapped.
        Should the copy fail, it is neither attached nor lost: it stays swapped.
        """
        assert self.swap is not None
        out = self.swap[request_id]
        salt = salt if salt == out.salt else None  # what it brings back was not to be shared
        cached = self.attach(request_id, token_ids, salt=salt, resumed=True)
        if cached is None:
            return None
        started = time.perf_counter()
        moved = 0
        try:
            if cached < out.tokens:
                with self.memory.epoch():
                    data = self.swap.on_device(out.data)
                    moved = self.memory.copy_in(*self._place(request_id), cached, data)
                cached = out.tokens
            self.computed(request_id, token_ids, cached)
        except BaseException:
            self.free(request_id)
            raise
        self.swap.restored(request_id, moved, time.perf_counter() - started)
        return min(cached, len(token_ids) - 1)

    def discard(self, request_id: str) -> None:
        """Forget a request that is not live: what it has swapped, what was looked up for it."""
        if request_id not in self.books.live:
            self.books.forget(request_id)
        if self.swap is not None:
            self.swap.discard(request_id)

    def _place(self, request_id: str) -> tuple[int, list[int]]:
        """The row and the units of a live request."""
        live = self.books.live[request_id]
        units: list[int] = self.books.tables[live.row, : live.units].tolist()
        return live.row, units

    # ------------------------------------------------------------------ size
    @property
    def budget_bytes(self) -> int:
        """Bytes of KV memory this cache may hold: whole pages, blocks or rows."""
        return self._budget // self.books.layout.bytes * self.books.layout.bytes

    def resize(self, budget_bytes: int) -> bool:
        """Change the budget while requests live; 0 gives everything back.

        What is cached or parked gives way. False when live requests hold more: then nothing has changed;
        preempt somebody. `virtual` maps and unmaps pages. The others move to other memory (`generation`
        rises), so for a moment they hold both.
        """
        limit = budget_bytes // self.books.layout.bytes
        if not carry_out(self.books.resize(limit), self.memory):
            return False
        self._budget = budget_bytes
        self.generation += not self.books.keeps_addresses
        return True

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Requests that share one keep it, and leave none behind from now on.

        So what was computed before, perhaps with other weights, is never found again.
        """
        if self.swap is not None:
            self.swap.unshare()
        self.books.reset()

    # ------------------------------------------------------------------ steps
    def begin_step(self, chunks: Sequence[Chunk]) -> AttentionInputs:
        """Plan a step. Room must have been grown. From here on each request holds `chunk.end` tokens."""
        return self.backend.inputs(self, chunks)

    def rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """The row of each chunk's request in the books."""
        live = self.books.live
        return [live[chunk.request_id].row for chunk in chunks]

    def look_ahead(self) -> None:
        """Map in the background what the next step needs."""
        if isinstance(self.books, MappedBooks) and self.memory.works_ahead:
            carry_out(self.books.look_ahead(), self.memory)

    def submitted(self, event: Event | None) -> None:
        """The step was handed to the device; `event` marks its end (None: it is over).

        Memory it may touch is not unmapped before.
        """
        self.memory.submitted(event)

    # ------------------------------------------------------------------ what it holds
    def usage(self) -> MemoryUsage:
        """Bytes now."""
        return report.usage(self.books, self.shape.token_bytes, closed=self._closed)

    def page_map(self) -> PageMap:
        """Who holds which page, block or row; `check()` proves that it adds up to its `usage`."""
        backend = self.backend
        return report.page_map(self.books, backend.name, backend.unit, self.budget_bytes, self.usage())

    def stats(self) -> KVStats:
        """Counters since its creation."""
        stats = replace(
            self.books.stats,
            map_stall_seconds=self.memory.stall_seconds,
            driver_calls=self.memory.driver_calls,
        )
        if self.swap is not None:
            stats.swap_out_bytes, stats.swap_in_bytes = self.swap.out_bytes, self.swap.in_bytes
            stats.swap_seconds = self.swap.seconds
        return stats

    def check(self) -> None:
        """Raise AssertionError unless the books balance and the memory is as they say."""
        books = self.books
        if isinstance(books, MappedBooks):
            carry_out(books.settle_all(), self.memory)
        if self._closed:
            assert not books.live
            return
        report.check(books)
        rows = {row: books.tables[row, :n].tolist() for row, n in enumerate(books.lengths)}
        self.memory.check(rows, books.allocator.num_made)
        self.usage().check()
        if self.swap is not None:
            self.swap.check()

    def close(self) -> None:
        """Give everything back. The KV tensor must not be touched afterwards. Idempotent.

        A DriverError leaves the rest to another call.
        """
        if not self._closed:
            for request_id in list(self.books.live):
                self.free(request_id)
            self._closed = True
            self.reset_prefix_cache()
        self.memory.close()
