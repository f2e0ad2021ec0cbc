"""`paged`: a pool of blocks and a block table per request (PagedAttention). Kernels read the block table.

request A   table [ 7, 2, 5 ]        pool  | 0 | 1 | 2 AB| 3 B| 4 | 5 A| 6 | 7 AB|
request B   table [ 7, 2, 3 ]              each block: block_size positions, all layers

A and B begin with the same text, so its full blocks (7, 2) are in both block tables. A block in two tables
is never written again: each request continues in a block of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vattn.kv.backends.base import Backend, paged_inputs
from vattn.kv.books.books import Books
from vattn.kv.books.units import UnitLayout
from vattn.kv.inputs import Chunk, PagedInputs
from vattn.kv.memory.base import Memory
from vattn.kv.memory.tensor import TensorMemory

if TYPE_CHECKING:
    from vattn.kv.cache import KVCache


class PagedBackend(Backend):
    """As many blocks of `block_size` tokens as the budget holds, in one tensor."""

    name = "paged"
    unit = "block"
    reads = PagedInputs
    has_tables = True

    def layout(self) -> UnitLayout:
        token = self.setting.shape.token_bytes
        return UnitLayout(token, self.setting.config.block_size * token, 1, self.setting.max_tokens)

    def books(self, layout: UnitLayout) -> Books:
        return Books(
            layout,
            self.setting.budget_bytes // layout.bytes,
            fingerprint=self.setting.fingerprint,
            entry_tokens=self.setting.config.block_size,
        )

    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        return TensorMemory(layout, self.setting.shape, self.setting.driver, books.limit)

    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> PagedInputs:
        return paged_inputs(cache, chunks, self.setting.config.block_size)

    def describe(self, books: Books) -> dict[str, str | int]:
        return {"block_size": self.setting.config.block_size, "blocks": books.limit}

    def smallest(self) -> str:
        return f"one block of {self.setting.config.block_size} tokens"
