"""`static`: every request reserves its maximum length in physical memory. This is the baseline.

row 0  | used used used ............................ max_tokens |
row 1  | used .............................................. |    dots: reserved, perhaps never used
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vattn.kv.backends.base import Backend, contiguous_inputs
from vattn.kv.books.books import Books
from vattn.kv.books.units import UnitLayout
from vattn.kv.inputs import Chunk, ContiguousInputs
from vattn.kv.layout import KVLayout, KVShape, RowLayout
from vattn.kv.memory.base import Memory
from vattn.kv.memory.tensor import TensorMemory
from vattn.kv.memory.views import KVViews, kv_views
from vattn.vmm.driver import Driver

if TYPE_CHECKING:
    from vattn.kv.cache import KVCache


class StaticBackend(Backend):
    """As many rows of `max_tokens` as the budget holds (at most `max_rows`), in one tensor."""

    name = "static"
    unit = "row"
    reads = ContiguousInputs

    def layout(self) -> UnitLayout:
        token, tokens = self.setting.shape.token_bytes, self.setting.max_tokens
        return UnitLayout(token, tokens * token, 1, tokens)

    def books(self, layout: UnitLayout) -> Books:
        rows = self.setting.budget_bytes // layout.bytes
        return Books(layout, rows, reserves=True, most=self.setting.max_rows)

    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        setting = self.setting
        return RowTensorMemory(layout, setting.shape, setting.driver, books.limit, setting.kind)

    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> ContiguousInputs:
        slots = cache.books.tables[cache.rows(chunks), 0].tolist()
        return contiguous_inputs(cache.tensor, chunks, slots, self.setting.max_tokens, cache.scales)

    def describe(self, books: Books) -> dict[str, str | int]:
        return {"layout": str(self.setting.kind), "rows": books.limit}

    def smallest(self) -> str:
        return "one token"


class RowTensorMemory(TensorMemory):
    """Memory whose units are rows, in the same layout as the rows of `virtual`."""

    def __init__(
        self, layout: UnitLayout, shape: KVShape, driver: Driver, count: int, kind: KVLayout
    ) -> None:
        self.kind = kind
        super().__init__(layout, shape, driver, count)

    def allocate(self, count: int) -> KVViews:
        import torch

        # There are no pages here. With "pages" of one token, rows need no padding.
        shape, tokens = self.shape, self.layout.max_tokens
        page = RowLayout(self.kind, shape, count, tokens, 1).token_bytes
        rows = RowLayout(self.kind, shape, count, tokens, page)
        storage = torch.empty(count * tokens * shape.token_elems, dtype=shape.dtype, device=self.device)
        return kv_views(storage.as_strided(rows.memory_shape, rows.memory_strides), shape)
