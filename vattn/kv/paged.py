"""`paged`: a block pool and a block table per request (PagedAttention). The kernel translates.

request A   table [ 7, 2, 5 ]        pool  | 0 | 1 | 2 AB| 3 B| 4 | 5 A| 6 | 7 AB|
request B   table [ 7, 2, 3 ]              each block: block_size positions, all layers

A and B begin with the same text: full blocks of it (7, 2) are in both tables. A block in two tables is
never written again; who continues does so in a block of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from vattn.kv.base import AttentionInputs, Chunk, KVCache, KVStats, PagedInputs
from vattn.kv.blocks import BlockPool
from vattn.kv.holders import Holders
from vattn.kv.layout import KVShape, KVViews, kv_views
from vattn.kv.page_map import MapRow, PageMap, PageState, unit_states
from vattn.kv.plan import offsets
from vattn.kv.prefix import PrefixCache
from vattn.kv.usage import MemoryUsage

WATERMARK = 0.01  # share of the pool that a new request leaves to the growth of those that live


@dataclass
class _Live:
    """A live request: its block table, the tokens it has room for, and what others may share."""

    table: list[int]
    tokens: int
    salt: str | None = None
    text: Sequence[int] = ()
    """Its tokens, of which the first `written` have K and V."""
    written: int = 0
    entered: int = 0
    """Blocks that are in the prefix cache by now."""


class PagedKVCache(KVCache):
    """As many blocks of `block_size` tokens as the budget holds, allocated at once.

    `fingerprint`: of the model, for the prefix cache; None: no prefix cache.
    """

    name: ClassVar[str] = "paged"
    reads: ClassVar[type[AttentionInputs]] = PagedInputs

    def __init__(
        self,
        shape: KVShape,
        *,
        device: torch.device,
        budget_bytes: int,
        block_size: int,
        max_tokens: int,
        fingerprint: str | None = None,
    ) -> None:
        self.block_bytes = block_size * shape.token_bytes
        num_blocks = budget_bytes // self.block_bytes
        if num_blocks < 1:
            raise ValueError(
                f"one block of {block_size} tokens takes {self.block_bytes:,} bytes of KV; "
                f"the budget is {budget_bytes:,} bytes"
            )
        self.shape = shape
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.pool = BlockPool(num_blocks)
        self._device = device
        self._kv = self._allocate(num_blocks)
        self._live: dict[str, _Live] = {}
        self._holders = Holders()
        self.prefix = (
            None if fingerprint is None else PrefixCache[int](block_size, fingerprint, self._uncache)
        )
        self._stats = KVStats()

    def _allocate(self, num_blocks: int) -> KVViews:
        # Zeros: some kernels (FlexAttention) mask by weights of 0, and 0 x NaN of fresh memory is NaN.
        shape = self.shape
        size = (shape.num_layers, 2, num_blocks, self.block_size, shape.unit_elems)
        return kv_views(torch.zeros(size, dtype=shape.dtype, device=self._device), shape)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def table_width(self) -> int:
        return self._blocks(self.max_tokens)

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix is not None

    def describe(self) -> dict[str, str | int]:
        return {"block_size": self.block_size, "blocks": self.pool.num_blocks}

    def tokens_in(self, budget_bytes: int) -> int:
        return min(self.max_tokens, budget_bytes // self.block_bytes * self.block_size)

    # ------------------------------------------------------------------ blocks
    def _take(self, n: int) -> list[int] | None:
        """`n` blocks, cached ones evicted as needed; None when even that is not enough: nothing changed."""
        if n > self.pool.num_free + self._holders.num_cached_only:
            return None
        while self.pool.num_free < n:
            self._evict()
        return self.pool.acquire(n)

    def _evict(self) -> None:
        assert self.prefix is not None
        evicted = self.prefix.evict(lambda block: not self._holders.needs(block))
        assert evicted, "cached blocks without an entry"
        self._stats.prefix_evictions += 1

    def _enter(self, block: int) -> int:
        """The prefix cache holds a block."""
        self._holders.cache(block)
        self.pool.retain(block)
        return block

    def _uncache(self, block: int) -> None:
        self._holders.uncache(block)
        self.pool.release(block)

    def _hit(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        """Blocks of the longest cached prefix that leaves a token to compute."""
        if self.prefix is None or salt is None:
            return []
        entries = self.prefix.match(token_ids, salt)
        del entries[max(len(token_ids) - 1, 0) // self.block_size :]
        return [entry.memory for entry in entries]

    # ------------------------------------------------------------------ the contract
    def can_admit(self, tokens: int, token_ids: Sequence[int] = (), *, salt: str | None = None) -> bool:
        hit = self._hit(token_ids, salt)
        spare = max(1, int(WATERMARK * self.pool.num_blocks)) if self._live else 0
        idle = sum(not self._holders.needs(block) for block in hit)
        available = self.pool.num_free + self._holders.num_cached_only - idle
        return self._blocks(tokens) - len(hit) + spare <= available

    def awaits(self, token_ids: Sequence[int], *, salt: str | None = None) -> bool:
        return self.prefix is not None and salt is not None and self.prefix.awaits(token_ids, salt)

    def attach(
        self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None, resumed: bool = False
    ) -> int | None:
        if request_id in self._live:
            raise KeyError(f"request {request_id!r} is attached already")
        hit = self._hit(token_ids, salt)
        self.pool.retain_all(hit)  # before eviction could take them
        self._holders.need(hit)
        own = self._take(self._blocks(len(token_ids)) - len(hit))
        if own is None:
            self._holders.release(hit)
            self.pool.release_all(hit)
            return None
        self._holders.need(own)
        cached = len(hit) * self.block_size
        self._live[request_id] = _Live(
            [*hit, *own], len(token_ids), salt, token_ids, written=cached, entered=len(hit)
        )
        if self.prefix is not None and salt is not None:
            entries = self.prefix.match(token_ids, salt)
            self.prefix.touch(entries)
            self.prefix.claim(request_id, token_ids, salt)
            self._stats.count_hit(cached, len(token_ids), resumed=resumed)
            self._stats.units_shared += len(hit)
            if entries and len(hit) < len(entries):  # all of the text is there, but not in whole blocks
                self._stats.prefix_tokens_unshared_by_page_size += len(token_ids) - 1 - cached
        return cached

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        if child_id in self._live:
            raise KeyError(f"request {child_id!r} is attached already")
        parent = self._live[parent_id]
        parent.written = max(parent.written, tokens)
        shared = parent.table[: tokens // self.block_size]
        rest = tokens % self.block_size
        own = self._take(1 if rest else 0)
        if own is None:
            return False
        if rest:
            memory = self.views.memory
            try:
                memory[:, :, own[0], :rest] = memory[:, :, parent.table[len(shared)], :rest]
            except BaseException:
                self.pool.release_all(own)
                raise
            self._stats.count_copy(rest, rest * self.shape.token_bytes)
        self.pool.retain_all(shared)
        table = [*shared, *own]
        self._holders.need(table)
        self._live[child_id] = _Live(table, tokens, parent.salt, parent.text, tokens, len(shared))
        self._stats.forks += 1
        self._stats.units_shared += len(shared)
        return True

    def grow(self, request_id: str, tokens: int) -> bool:
        live = self._live[request_id]
        if tokens > len(live.table) * self.block_size:
            blocks = self._take(self._blocks(tokens) - len(live.table))
            if blocks is None:
                return False
            live.table.extend(blocks)
            self._holders.need(blocks)
        live.tokens = max(live.tokens, tokens)
        return True

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:
        live = self._live[request_id]
        live.text, live.written = token_ids, min(n, len(token_ids))
        full = live.written // self.block_size
        if full > live.entered and self.prefix is not None and live.salt is not None:
            self.prefix.insert(
                token_ids, live.salt, full, lambda i: self._enter(live.table[i]), start=live.entered
            )
            live.entered = full

    def free(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        if self.prefix is not None:
            self.prefix.unclaim(request_id)
        self._holders.release(live.table)
        self.pool.release_all(reversed(live.table))

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        if self.prefix is None:
            return
        self.prefix.clear()
        for request_id, live in self._live.items():
            live.salt = None
            self.prefix.unclaim(request_id)

    # ------------------------------------------------------------------ swap, size
    def salt(self, request_id: str) -> str | None:
        return self._live[request_id].salt

    def written(self, request_id: str) -> int:
        return self._live[request_id].written

    def shared_tokens(self, request_id: str) -> int:
        live = self._live[request_id]
        full, shared = live.written // self.block_size, 0
        while shared < full and self._holders.needs(live.table[shared]) > 1:
            shared += 1
        return shared * self.block_size

    def _read(self, request_id: str, n: int) -> torch.Tensor:
        table = self._live[request_id].table[: self._blocks(n)]
        return self.views.memory[:, :, table].flatten(2, 3)[:, :, :n]

    def _write(self, request_id: str, start: int, data: torch.Tensor) -> int:
        at = np.arange(start, data.shape[2])
        table = np.asarray(self._live[request_id].table, np.int64)
        places = torch.from_numpy(table[at // self.block_size] * self.block_size + at % self.block_size)
        memory = self.views.memory.flatten(2, 3)
        memory[:, :, places.to(memory.device)] = data[:, :, start:]
        return len(at) * self.shape.token_bytes

    @property
    def budget_bytes(self) -> int:
        return self.pool.num_blocks * self.block_bytes

    def resize(self, budget_bytes: int) -> bool:
        num_blocks = budget_bytes // self.block_bytes
        if self._holders.num_needed > num_blocks:
            return False
        while self.pool.num_blocks - self.pool.num_free > num_blocks:
            self._evict()
        pool, numbers = self.pool.renumbered(num_blocks)
        new = self._allocate(num_blocks)
        new.memory[:, :, list(numbers.values())] = self.views.memory[:, :, list(numbers)]
        self._kv, self.pool = new, pool
        self._holders.renumber(numbers)
        for live in self._live.values():
            live.table = [numbers[block] for block in live.table]
        if self.prefix is not None:
            self.prefix.replace_memory(numbers.__getitem__)
        self.generation += 1
        return True

    # ------------------------------------------------------------------ steps
    def begin_step(self, chunks: Sequence[Chunk]) -> PagedInputs:
        size = self.block_size
        # Blocks past a request's end this step (the rest of a chunked prompt) are no business of kernels.
        tables = [self._live[c.request_id].table[: self._blocks(c.end)] for c in chunks]
        runs = [
            np.asarray(table, np.int64)[positions // size] * size + positions % size
            for table, c in zip(tables, chunks, strict=True)
            for positions in (np.arange(c.start, c.end),)
        ]
        return PagedInputs(
            kv=self.tensor,
            cu_seqlens=offsets(chunks),
            seq_lens=[c.end for c in chunks],
            slot_mapping=torch.from_numpy(np.concatenate(runs) if runs else np.empty(0, np.int64)),
            block_tables=tables,
            block_size=size,
            scales=self.scales,
        )

    def live(self) -> Iterable[str]:
        return self._live.keys()

    def usage(self) -> MemoryUsage:
        block = self.block_bytes
        physical = 0 if self._kv is None else self.pool.num_blocks * block
        mapped = sum(len(live.table) for live in self._live.values()) * block
        in_use = self._holders.num_needed * block
        cached = self._holders.num_cached_only * block
        logical = sum(live.tokens for live in self._live.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=physical,
            physical=physical,
            in_use=in_use,
            parked=0,
            cached=cached,
            free=physical - in_use - cached,
            logical=logical,
            shared_saved=mapped - in_use,
            tail_waste=mapped - logical,
            external_waste=0,
        )

    def page_map(self) -> PageMap:
        usage, holders = self.usage(), self._holders
        rows = [MapRow(request_id, live.tokens, tuple(live.table)) for request_id, live in self._live.items()]
        held = unit_states([(row, len(row.units)) for row in rows], holders.all_needs(), holders.all_cached())
        blocks = range(self.pool.num_blocks if usage.physical else 0)
        return PageMap(
            backend=self.name,
            unit="block",
            unit_bytes=self.block_bytes,
            unit_tokens=self.block_size,
            row_units=self.table_width,
            rows=tuple(rows),
            states={block: held.get(block, PageState.FREE) for block in blocks},
            in_prefix_cache=frozenset(holders.all_cached()),
            loose={},
            budget_bytes=self.budget_bytes,
            usage=usage,
        )

    def stats(self) -> KVStats:
        return self._stats.add_swaps(self.swap)

    def check(self) -> None:
        self.pool.check()
        needs: Counter[int] = Counter()
        for request_id, live in self._live.items():
            assert len(live.table) == self._blocks(live.tokens), f"{request_id}: table length"
            needs.update(live.table)
        for request_id, live in self._live.items():
            for block in live.table[live.written // self.block_size :]:
                assert needs[block] == 1, f"{request_id}: block {block} is shared and will be written"
        cached = Counter(self.prefix.memories()) if self.prefix is not None else Counter[int]()
        self._holders.check(dict(needs), dict(cached))
        expected = [needs[b] + cached[b] for b in range(self.pool.num_blocks)]
        assert expected == [self.pool.refs(b) for b in range(self.pool.num_blocks)], "references"
        if self.prefix is not None:
            self.prefix.check(list(self._live))
        self.usage().check()
        if self.swap is not None:
            self.swap.check()

    def close(self) -> None:
        for request_id in list(self._live):
            self.free(request_id)
        self.reset_prefix_cache()
        self._kv = None
