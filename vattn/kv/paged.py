"""`paged`: a block pool and a block table per request (PagedAttention). The kernel translates.

request A   table [ 7, 2, 5 ]        pool  | 0 | 1 | 2 A| 3 B| 4 | 5 A| 6 | 7 A|
request B   table [ 3 ]                    each block: block_size positions, all layers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch

from vattn.kv.base import AttentionInputs, Chunk, KVCache, KVStats, PagedInputs
from vattn.kv.blocks import BlockPool
from vattn.kv.layout import KVShape, kv_views
from vattn.kv.plan import offsets
from vattn.kv.usage import MemoryUsage

WATERMARK = 0.01  # share of the pool that a new request leaves to the growth of those that live


class PagedKVCache(KVCache):
    """As many blocks of `block_size` tokens as the budget holds, allocated at once."""

    name: ClassVar[str] = "paged"
    reads: ClassVar[type[AttentionInputs]] = PagedInputs

    def __init__(
        self, shape: KVShape, *, device: torch.device, budget_bytes: int, block_size: int, max_tokens: int
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
        # Zeros: some kernels (FlexAttention) mask by weights of 0, and 0 x NaN of fresh memory is NaN.
        memory = torch.zeros(
            (shape.num_layers, 2, num_blocks, block_size, shape.unit_elems), dtype=shape.dtype, device=device
        )
        self._kv = kv_views(memory, shape)
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def table_width(self) -> int:
        return self._blocks(self.max_tokens)

    def describe(self) -> dict[str, str | int]:
        return {"block_size": self.block_size, "blocks": self.pool.num_blocks}

    @property
    def capacity_tokens(self) -> int:
        return min(self.max_tokens, self.pool.num_blocks * self.block_size)

    def can_admit(self, tokens: int) -> bool:
        spare = max(1, int(WATERMARK * self.pool.num_blocks)) if self._tables else 0
        return self._blocks(tokens) + spare <= self.pool.num_free

    def attach(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        if request_id in self._tables:
            raise KeyError(f"request {request_id!r} is attached already")
        blocks = self.pool.acquire(self._blocks(len(token_ids)))
        if blocks is None:
            return None
        self._tables[request_id] = blocks
        self._tokens[request_id] = len(token_ids)
        return 0

    def grow(self, request_id: str, tokens: int) -> bool:
        table = self._tables[request_id]
        missing = self._blocks(tokens) - len(table)
        if missing > 0:
            blocks = self.pool.acquire(missing)
            if blocks is None:
                return False
            table.extend(blocks)
        self._tokens[request_id] = max(self._tokens[request_id], tokens)
        return True

    def free(self, request_id: str) -> None:
        for block in self._tables.pop(request_id):
            self.pool.release(block)
        del self._tokens[request_id]

    def begin_step(self, chunks: Sequence[Chunk]) -> PagedInputs:
        size = self.block_size
        # Blocks past a request's end this step (the rest of a chunked prompt) are no business of kernels.
        tables = [self._tables[c.request_id][: self._blocks(c.end)] for c in chunks]
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
        return self._tables.keys()

    def usage(self) -> MemoryUsage:
        physical = 0 if self._kv is None else self.pool.num_blocks * self.block_bytes
        mapped = sum(len(table) for table in self._tables.values()) * self.block_bytes
        in_use = (self.pool.num_blocks - self.pool.num_free) * self.block_bytes
        logical = sum(self._tokens.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=physical,
            physical=physical,
            in_use=in_use,
            parked=0,
            cached=0,
            free=physical - in_use,
            logical=logical,
            shared_saved=mapped - in_use,
            tail_waste=mapped - logical,
            external_waste=0,
        )

    def stats(self) -> KVStats:
        return KVStats()

    def check(self) -> None:
        self.pool.check()
        holders = [0] * self.pool.num_blocks
        for request_id, table in self._tables.items():
            assert len(table) == self._blocks(self._tokens[request_id]), f"{request_id}: table length"
            for block in table:
                holders[block] += 1
        assert holders == [self.pool.refs(b) for b in range(self.pool.num_blocks)], "references"
        self.usage().check()

    def close(self) -> None:
        for request_id in list(self._tables):
            self.free(request_id)
        self._kv = None
