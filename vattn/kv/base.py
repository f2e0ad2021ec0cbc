"""The contract every KV backend keeps. The scheduler and the runner see only this."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch

from vattn.kv.layout import KVShape, KVViews
from vattn.kv.page_map import PageMap
from vattn.kv.swap import SwapSpace
from vattn.kv.usage import MemoryUsage
from vattn.vmm.retire import Event


class Chunk(NamedTuple):
    """One request's share of a step: tokens `start .. start + length` are computed and stored."""

    request_id: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's K and V go and where attention reads: decided once per step, used by every layer.

    Packed queries `[T, heads, dim]` hold the chunks one behind the other:

        chunk     0           1    2
        tokens  | . . . . . | . | . . |        cu_seqlens = [0, 5, 6, 8]
    """

    kv: torch.Tensor
    """`[layer, 2, row, position, kv_head, head_dim]`; rows are slots or blocks."""
    cu_seqlens: list[int]
    """B + 1 offsets of the chunks in the packed tokens."""
    seq_lens: list[int]
    """B lengths after this step: what each request attends to."""
    slot_mapping: torch.Tensor
    """int64 `[T]`: row x positions-per-row + position, where each new token is stored."""
    scales: torch.Tensor | None = field(default=None, kw_only=True)
    """float32 factors of a quantised `kv`, value = stored x scale: `[layer, 2, row, position, kv_head]`,
    written with each token, or `[layer, 2, kv_head]`, static. None: `kv` holds the values themselves."""

    @property
    def decode_only(self) -> bool:
        return self.cu_seqlens[-1] == len(self.seq_lens)


@dataclass(frozen=True)
class ContiguousInputs(AttentionInputs):
    """Each request is one row: request b's keys are `kv[layer, 0, slots[b], :seq_lens[b]]`."""

    slots: list[int]


@dataclass(frozen=True)
class PagedInputs(AttentionInputs):
    """Each request is a list of blocks of `block_size` positions, the last one partly filled."""

    block_tables: list[list[int]]
    block_size: int


@dataclass
class KVStats:
    """Counters of a backend, since its creation."""

    rows_adopted: int = 0
    """Requests that took over a finished row as it lay, mapped."""
    prefix_query_tokens: int = 0
    """Tokens of requests that were looked up in the prefix cache, once per request, at admission."""
    prefix_hit_tokens: int = 0
    """Of these, tokens found there: computed by other requests."""
    resumed_hit_tokens: int = 0
    """Tokens that preempted requests found when they came back and did not compute again."""
    rows_continued: int = 0
    """Requests whose prefix was a finished row, taken over as it lay: nothing mapped, nothing copied."""
    forks: int = 0
    """Requests that began as a copy of another."""
    units_shared: int = 0
    """Blocks, or pages (over all ranges), that a request took by reference instead of filling its own."""
    tails_copied: int = 0
    """Partly filled last blocks or pages (one per hit or fork) that were copied."""
    bytes_copied: int = 0
    """Bytes of these copies."""
    prefix_tokens_unshared_by_page_size: int = 0
    """Tokens found by hits and forks that lay on a page or block that could not be shared whole: copied, or
    (`paged`, prefix hits) computed again."""
    prefix_evictions: int = 0
    """Entries the prefix cache gave up for memory."""
    swap_out_bytes: int = 0
    """Bytes of K and V copied to host memory."""
    swap_in_bytes: int = 0
    """Bytes copied back."""
    swap_seconds: float = 0.0
    """Time of the host in these copies."""
    map_stall_seconds: float = 0.0
    """Time steps waited for pages that were not mapped ahead."""
    driver_calls: dict[str, int] = field(default_factory=dict)
    """Driver calls by kind; empty where no driver is involved."""

    def add_swaps(self, swap: SwapSpace | None) -> KVStats:
        """These counters and those of the swap space."""
        if swap is None:
            return replace(self)
        return replace(
            self, swap_out_bytes=swap.out_bytes, swap_in_bytes=swap.in_bytes, swap_seconds=swap.seconds
        )

    def count_hit(self, cached: int, tokens: int, *, resumed: bool) -> None:
        """A request of `tokens` tokens was admitted and found `cached` of them."""
        if resumed:
            self.resumed_hit_tokens += cached
        else:
            self.prefix_query_tokens += tokens
            self.prefix_hit_tokens += cached

    def count_copy(self, tokens: int, nbytes: int) -> None:
        """The tail of something shared was copied."""
        self.tails_copied += 1
        self.bytes_copied += nbytes
        self.prefix_tokens_unshared_by_page_size += tokens


class KVCache(ABC):
    """KV memory for many requests. Not thread-safe: one engine drives it.

    Life of a request:  attach or fork -> (grow -> begin_step -> computed)* -> free,
    or swap_out -> swap_in, and on. `check()` may be called at any time.

    Sharing: what `computed` says is written may be given to later requests with the same prefix. Memory
    that two requests can see is never written again.
    """

    name: ClassVar[str]
    reads: ClassVar[type[AttentionInputs]]
    """The kind of inputs `begin_step` gives, which the attention must be able to read."""
    shape: KVShape

    static_scales: torch.Tensor | None = None
    """float32 `[layer, 2, kv_head]` of a cache quantised with scales that are known beforehand."""
    _kv: KVViews | None
    """None once closed."""
    swap: SwapSpace | None = None
    """Where swapped requests wait; None: nobody is swapped."""
    generation: int = 0
    """Counts the times the memory moved to other addresses: `views` of before are void."""

    @property
    def views(self) -> KVViews:
        """The cache's memory, all of it, at addresses that change with `generation` only."""
        if self._kv is None:
            raise RuntimeError("the KV cache is closed")
        return self._kv

    @property
    def tensor(self) -> torch.Tensor:
        """`kv[layer, 2, row, position, kv_head, head_dim]`."""
        return self.views.kv

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of a quantised cache, as `AttentionInputs.scales` has them."""
        return self.views.scales if self.static_scales is None else self.static_scales

    @property
    @abstractmethod
    def table_width(self) -> int:
        """Blocks of the longest request; 0 where a request is one row."""

    @abstractmethod
    def describe(self) -> dict[str, str | int]:
        """The choices that make up this cache, for reports: layout, page or block size, number of them."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens the whole cache can give to one request that is alone."""
        return self.tokens_in(self.budget_bytes)

    @abstractmethod
    def tokens_in(self, budget_bytes: int) -> int:
        """Tokens that a cache of this budget could give to one request that is alone."""

    @property
    @abstractmethod
    def shares_prefixes(self) -> bool:
        """Whether there is a prefix cache."""

    @abstractmethod
    def can_admit(self, tokens: int, token_ids: Sequence[int] = (), *, salt: str | None = None) -> bool:
        """Could a new request hold `tokens` tokens now, counting what reclaim would bring back?

        `token_ids`, `salt`: as for `attach`; what they find in the prefix cache needs no room.
        Leaves a little room for the growth of those that live, unless there are none.
        """

    def awaits(self, token_ids: Sequence[int], *, salt: str | None = None) -> bool:
        """Is a live request just computing a prefix that this one could share if it waited?"""
        return False

    @abstractmethod
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

    @abstractmethod
    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        """Admit a request that has the first `tokens` tokens of another, all of them computed.

        Whole blocks or pages are shared, the rest is copied (`static`: all of it). False when memory is
        short: then nothing has changed. Raises KeyError when the child lives, or the parent does not.
        """

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:  # noqa: B027
        """K and V of the first `n` of `token_ids` (a list that only grows) are written.

        They may be shared from here on.
        """

    # ------------------------------------------------------------------ swap
    def swap_out(self, request_id: str) -> bool:
        """Copy what a request has written to host memory, then let its memory go, as `free` does.

        False when there is no (more) swap space, or nothing written: then nothing has changed.
        """
        written = self.written(request_id)
        if self.swap is None or not written or not self.swap.fits(written * self.shape.token_bytes):
            return False
        self.swap.put(request_id, self._read(request_id, written), written, self.salt(request_id))
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
                moved = self._write(request_id, cached, self.swap.on_device(out.data))
                cached = out.tokens
            self.computed(request_id, token_ids, cached)
        except BaseException:
            self.free(request_id)
            raise
        self.swap.restored(request_id, moved, time.perf_counter() - started)
        return min(cached, len(token_ids) - 1)

    def discard(self, request_id: str) -> None:
        """Forget a swapped request, if it is one."""
        if self.swap is not None:
            self.swap.discard(request_id)

    def salt(self, request_id: str) -> str | None:
        """With whom a live request shares prefixes; None: with nobody."""
        return None

    @abstractmethod
    def written(self, request_id: str) -> int:
        """Tokens of a live request whose K and V `computed` (or `attach`, `fork`) said are there."""

    @abstractmethod
    def shared_tokens(self, request_id: str) -> int:
        """Leading tokens of a live request that another live request holds as well, in the same memory."""

    @abstractmethod
    def _read(self, request_id: str, n: int) -> torch.Tensor:
        """The first `n` tokens of a request, as one tensor of `n` x token_bytes bytes; may be a view."""

    @abstractmethod
    def _write(self, request_id: str, start: int, data: torch.Tensor) -> int:
        """Put back what `_read` gave, from token `start` on. Returns the bytes written."""

    # ------------------------------------------------------------------ size
    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """Bytes of KV memory this cache may hold."""

    @abstractmethod
    def resize(self, budget_bytes: int) -> bool:
        """Change the budget while requests live; 0 gives everything back.

        What is cached or parked gives way. False when live requests hold more: then nothing has changed
        but that; preempt somebody. `virtual` maps and unmaps pages. The others move to other memory
        (`generation` rises), so for a moment they hold both.
        """

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Requests that share one keep it, and leave none behind from now on.

        So what was computed before, perhaps with other weights, is never found again.
        """
        if self.swap is not None:
            self.swap.unshare()

    @abstractmethod
    def grow(self, request_id: str, tokens: int) -> bool:
        """Make room for `tokens` tokens in all. All or nothing; False means: preempt somebody."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Forget a request. Its memory is parked, cached or given back. Raises KeyError if unknown."""

    @abstractmethod
    def begin_step(self, chunks: Sequence[Chunk]) -> AttentionInputs:
        """Plan a step. Room must have been grown. From here on each request holds `chunk.end` tokens."""

    def submitted(self, event: Event | None) -> None:  # noqa: B027
        """The step was handed to the device; `event` marks its end (None: it is over).

        Memory it may touch is not unmapped before.
        """

    @abstractmethod
    def live(self) -> Iterable[str]:
        """Ids of the attached requests."""

    @abstractmethod
    def usage(self) -> MemoryUsage: ...

    @abstractmethod
    def page_map(self) -> PageMap:
        """Who holds which page, block or row; `check()` proves that it adds up to its `usage`."""

    @abstractmethod
    def stats(self) -> KVStats: ...

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless the books balance (and `usage()`'s identities hold)."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
