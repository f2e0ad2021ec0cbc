"""The KV cache as the engine sees it. Its books decide; its memory carries the decisions out.

    scheduler, pipeline ──> KVCache ──┬─ Books    which request holds what, what to evict   vattn/kv/books
                                      └─ Memory   the bytes of one device, and epochs       vattn/kv/memory

A `Backend` (`vattn/kv/backends`) decides which kind of cache it is.
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

    Life of a request:  attach or fork -> (grow -> begin_step -> computed)* -> free.
    A preempted request may also go through swap_out -> swap_in and continue. `check()` may be called at
    any time.

    Sharing: tokens reported to `computed` may be shared with later requests that have the same prefix.
    Memory that two requests can see is never written again.

    When memory is short, a method returns False or None and has changed nothing. When a driver call, a copy
    or an allocation fails, the method raises and has changed nothing either.
    """

    def __init__(self, backend: Backend) -> None:
        setting = backend.setting
        self.backend = backend
        self.shape = setting.shape
        layout = backend.layout()
        self.books = backend.books(layout)
        self.memory = backend.memory(layout, self.books)
        self.swap: SwapSpace | None = None
        """Host memory for swapped requests. None if swapping is off."""
        self.static_scales: torch.Tensor | None = None
        """float32 `[layer, 2, kv_head]`, for a cache quantised with scales known in advance; else None."""
        self.generation = 0
        """How often the memory has moved to other addresses. `views` taken before a move are invalid."""
        self._budget = setting.budget_bytes
        self._closed = False

    # ------------------------------------------------------------------ what it is
    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.backend.name

    @property
    def reads(self) -> type[AttentionInputs]:
        """The kind of inputs that `begin_step` returns. The attention must be able to read it."""
        return self.backend.reads

    def describe(self) -> dict[str, str | int]:
        """The settings of this cache, for reports: layout, size and number of pages, blocks or rows."""
        return self.backend.describe(self.books)

    @property
    def table_width(self) -> int:
        """Blocks of the longest request; 0 if a request is one row."""
        return self.books.layout.width if self.backend.has_tables else 0

    @property
    def shares_prefixes(self) -> bool:
        """Whether there is a prefix cache."""
        return self.books.prefix is not None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can have if it is the only one."""
        return self.tokens_in(self.budget_bytes)

    def tokens_in(self, budget_bytes: int) -> int:
        """Tokens that one request could have in a cache of this budget if it were the only one."""
        layout = self.books.layout
        return min(layout.max_tokens, layout.tokens(budget_bytes // layout.bytes))

    def room(self, tokens: int) -> int:
        """Tokens to which a request of `tokens` tokens can grow without another page or block."""
        layout = self.books.layout
        return min(layout.max_tokens, layout.tokens(layout.units(tokens)))

    @property
    def reserves(self) -> bool:
        """Whether a request takes memory for its maximum length when it is admitted."""
        return self.books.reserves

    # ------------------------------------------------------------------ memory
    @property
    def views(self) -> KVViews:
        """All memory of the cache. Its addresses change only when `generation` changes."""
        return self.memory.views

    @property
    def tensor(self) -> torch.Tensor:
        """`kv[layer, 2, row, position, kv_head, head_dim]`."""
        return self.views.kv

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of a quantised cache, in the form of `AttentionInputs.scales`."""
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
        """Whether a new request could hold `tokens` tokens now, counting memory that can be reclaimed.

        `token_ids` and `salt` are as for `attach`; tokens found in the prefix cache need no room. With a
        `request_id` the lookup is kept until `attach`, `free` or `discard`, so asking again is cheap.
        While other requests live, a little room is kept back so that they can grow.
        """
        books = self.books
        shares = books.prefix is not None and salt is not None
        return books.can_admit(tokens, books.text(request_id, token_ids, salt) if shares else None)

    def awaits(
        self, token_ids: Sequence[int], *, salt: str | None = None, request_id: str | None = None
    ) -> bool:
        """Whether a live request is computing a prefix that this request could share if it waited."""
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

        `salt`: requests with equal salts share prefixes. With None the request shares nothing.
        `resumed`: the request was admitted before and was preempted.
        Returns how many of its tokens are already in the cache (at most len - 1), or None if memory is
        short; nothing has changed then. Raises KeyError if the request is already attached.
        """
        self._require_new(request_id)
        return carry_out(self.books.attach(request_id, token_ids, salt, resumed=resumed), self.memory)

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        """Admit a request that begins with the first `tokens` tokens of another, all of them computed.

        Whole blocks or pages are shared and the rest is copied (`static` copies everything). Returns False
        if memory is short; nothing has changed then. Raises KeyError if the child is already attached or the
        parent is not.
        """
        self._require_new(child_id)
        return carry_out(self.books.fork(parent_id, child_id, tokens), self.memory)

    def _require_new(self, request_id: str) -> None:
        if request_id in self.books.live:
            raise KeyError(f"request {request_id!r} is attached already")

    def grow(self, request_id: str, tokens: int) -> bool:
        """Make room for `tokens` tokens in total, or return False and change nothing: preempt a request."""
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
        """Record that K and V of the first `n` tokens are written. From now on they may be shared.

        `token_ids` must be a list that only grows. It may lack token `n` while the id of that token is still
        on its way from the device.
        """
        self.books.computed(self.books.live[request_id], token_ids, n)

    def free(self, request_id: str) -> None:
        """Forget a request and park, cache or give back its memory. Raises KeyError if it is unknown."""
        carry_out(self.books.free(request_id), self.memory)

    def live(self) -> Iterable[str]:
        """Ids of the attached requests."""
        return self.books.live.keys()

    def salt(self, request_id: str) -> str | None:
        """The salt under which a live request shares prefixes; None if it shares nothing."""
        live = self.books.live[request_id]
        return live.text.salt if live.shares else None

    def written(self, request_id: str) -> int:
        """Tokens of a live request whose K and V are written, according to `computed`, `attach` or `fork`."""
        return self.books.live[request_id].written

    def shared_tokens(self, request_id: str) -> int:
        """Number of leading tokens that a live request shares with another one, in the same memory."""
        return self.books.shared_tokens(self.books.live[request_id])

    # ------------------------------------------------------------------ swap
    def swap_out(self, request_id: str) -> bool:
        """Copy the written K and V of a request to host memory, then free the request as `free` does.

        Returns False if there is not enough swap space or nothing is written; nothing has changed then.
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
        """Whether K and V of this request are in host memory."""
        return self.swap is not None and request_id in self.swap

    def swap_in(self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None) -> int | None:
        """`attach` a swapped request and copy its K and V back.

        Returns how many tokens need not be computed, or None if memory is short. If memory is short or the
        copy fails, the request is not attached and stays swapped.
        """
        assert self.swap is not None
        out = self.swap[request_id]
        salt = salt if salt == out.salt else None  # its K and V were not meant to be shared
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
        """Forget a request that is not live: its swapped K and V and its prefix lookup."""
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
        """Bytes of KV memory that this cache may hold, rounded down to whole pages, blocks or rows."""
        return self._budget // self.books.layout.bytes * self.books.layout.bytes

    def resize(self, budget_bytes: int) -> bool:
        """Change the budget while requests live; 0 gives everything back.

        Cached and parked memory is reclaimed if needed. Returns False if live requests hold more than the
        new budget; preempt requests first. `virtual` maps and unmaps pages. The other backends copy to new
        memory (`generation` rises), so for a moment they hold both the old and the new.
        """
        limit = budget_bytes // self.books.layout.bytes
        if not carry_out(self.books.resize(limit), self.memory):
            return False
        self._budget = budget_bytes
        self.generation += not self.books.keeps_addresses
        return True

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Live requests keep the prefixes they share but add no new ones.

        Nothing computed before this call, perhaps with other weights, is ever found again.
        """
        if self.swap is not None:
            self.swap.unshare()
        self.books.reset()

    # ------------------------------------------------------------------ steps
    def begin_step(self, chunks: Sequence[Chunk]) -> AttentionInputs:
        """Plan a step. `grow` must have made room: each request holds `chunk.end` tokens from now on."""
        return self.backend.inputs(self, chunks)

    def rows(self, chunks: Sequence[Chunk]) -> list[int]:
        """For each chunk, the row of its request in the books."""
        live = self.books.live
        return [live[chunk.request_id].row for chunk in chunks]

    def look_ahead(self) -> None:
        """Start mapping, in the background, the pages that the next step needs."""
        if isinstance(self.books, MappedBooks) and self.memory.works_ahead:
            carry_out(self.books.look_ahead(), self.memory)

    def submitted(self, event: Event | None) -> None:
        """Record that a step was submitted to the device. `event` marks its end; None if it is over.

        Memory that the step may touch is not unmapped before it ends.
        """
        self.memory.submitted(event)

    # ------------------------------------------------------------------ what it holds
    def usage(self) -> MemoryUsage:
        """What the cache holds now, in bytes."""
        return report.usage(self.books, self.shape.token_bytes, closed=self._closed)

    def page_map(self) -> PageMap:
        """Which request holds which page, block or row. Its `check()` proves that it adds up to `usage`."""
        backend = self.backend
        return report.page_map(self.books, backend.name, backend.unit, self.budget_bytes, self.usage())

    def stats(self) -> KVStats:
        """Counters since the cache was created."""
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
        """Raise AssertionError unless the books are consistent and the memory agrees with them."""
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

        After a DriverError, call it again to give the rest back.
        """
        if not self._closed:
            for request_id in list(self.books.live):
                self.free(request_id)
            self._closed = True
            self.reset_prefix_cache()
        self.memory.close()
