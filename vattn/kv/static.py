"""`static`: every request reserves its maximum length in physical memory. The baseline.

row 0  | used used used ............................ max_tokens |
row 1  | used .............................................. |    dots are reserved and never used
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch

from vattn.kv.base import AttentionInputs, Chunk, ContiguousInputs, KVCache, KVStats
from vattn.kv.layout import KVLayout, KVShape, KVViews, RowLayout, kv_views
from vattn.kv.page_map import MapRow, PageMap, PageState
from vattn.kv.plan import contiguous_inputs
from vattn.kv.usage import MemoryUsage


class StaticKVCache(KVCache):
    """As many rows of `max_tokens` as the budget holds (at most `max_rows`), allocated at once."""

    name: ClassVar[str] = "static"
    reads: ClassVar[type[AttentionInputs]] = ContiguousInputs

    def __init__(
        self,
        shape: KVShape,
        *,
        device: torch.device,
        budget_bytes: int,
        max_tokens: int,
        max_rows: int,
        layout: KVLayout,
    ) -> None:
        row_bytes = max_tokens * shape.token_bytes
        rows = min(max_rows, budget_bytes // row_bytes)
        if rows < 1:
            raise ValueError(
                f"one static row of {max_tokens:,} tokens takes {row_bytes:,} bytes of KV; "
                f"the budget is {budget_bytes:,} bytes"
            )
        self.shape = shape
        self._max_rows = max_rows
        self._kind = layout
        self._device = device
        self._row_bytes = row_bytes
        self._budget = budget_bytes
        self.layout = self._layout(rows, max_tokens)
        self._kv = self._allocate(self.layout)
        self._slots: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._stats = KVStats()

    def _layout(self, rows: int, max_tokens: int) -> RowLayout:
        # No pages here: with "pages" of one token the row needs no padding.
        page_bytes = RowLayout(self._kind, self.shape, rows, max_tokens, 1).token_bytes
        return RowLayout(self._kind, self.shape, rows, max_tokens, page_bytes)

    def _allocate(self, layout: RowLayout) -> KVViews:
        shape = self.shape
        elems = layout.rows * layout.max_tokens * shape.token_elems
        storage = torch.empty(elems, dtype=shape.dtype, device=self._device)
        return kv_views(storage.as_strided(layout.memory_shape, layout.memory_strides), shape)

    @property
    def table_width(self) -> int:
        return 0

    def describe(self) -> dict[str, str | int]:
        return {"layout": str(self.layout.kind), "rows": self.layout.rows}

    def tokens_in(self, budget_bytes: int) -> int:
        return self.layout.max_tokens if budget_bytes >= self._row_bytes else 0

    @property
    def shares_prefixes(self) -> bool:
        return False

    def can_admit(self, tokens: int, token_ids: Sequence[int] = (), *, salt: str | None = None) -> bool:
        return bool(self._free) and tokens <= self.layout.max_tokens

    def attach(
        self, request_id: str, token_ids: Sequence[int], *, salt: str | None = None, resumed: bool = False
    ) -> int | None:
        if request_id in self._slots:
            raise KeyError(f"request {request_id!r} is attached already")
        if not self.can_admit(len(token_ids)):
            return None
        self._slots[request_id] = self._free.pop()
        self._tokens[request_id] = len(token_ids)
        self._written[request_id] = 0
        return 0

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        if child_id in self._slots:
            raise KeyError(f"request {child_id!r} is attached already")
        source = self._slots[parent_id]
        if not self._free:
            return False
        slot, memory = self._free[-1], self.views.memory
        memory[:, :, slot, :tokens] = memory[:, :, source, :tokens]
        self._slots[child_id] = self._free.pop()
        self._tokens[child_id] = self._written[child_id] = tokens
        self._stats.forks += 1
        self._stats.bytes_copied += tokens * self.shape.token_bytes
        return True

    def grow(self, request_id: str, tokens: int) -> bool:
        if tokens > self.layout.max_tokens:
            return False
        self._tokens[request_id] = max(self._tokens[request_id], tokens)
        return True

    def free(self, request_id: str) -> None:
        self._free.append(self._slots.pop(request_id))
        del self._tokens[request_id], self._written[request_id]

    def computed(self, request_id: str, token_ids: Sequence[int], n: int) -> None:
        self._written[request_id] = n

    def written(self, request_id: str) -> int:
        return self._written[request_id]

    def shared_tokens(self, request_id: str) -> int:
        return 0

    def _read(self, request_id: str, n: int) -> torch.Tensor:
        return self.views.memory[:, :, self._slots[request_id], :n]

    def _write(self, request_id: str, start: int, data: torch.Tensor) -> int:
        target = self.views.memory[:, :, self._slots[request_id], start : data.shape[2]]
        target.copy_(data[:, :, start:])
        return target.numel() * target.element_size()

    @property
    def budget_bytes(self) -> int:
        return self._budget

    def resize(self, budget_bytes: int) -> bool:
        rows = min(self._max_rows, budget_bytes // self._row_bytes)
        if rows < len(self._slots):
            return False
        old, layout = self.views.memory, self._layout(rows, self.layout.max_tokens)
        new = self._allocate(layout)
        slots = {request_id: row for row, request_id in enumerate(self._slots)}
        for request_id, row in slots.items():
            n = self._written[request_id]
            new.memory[:, :, row, :n] = old[:, :, self._slots[request_id], :n]
        self._kv, self.layout, self._slots, self._budget = new, layout, slots, budget_bytes
        self._free = list(range(rows - 1, len(slots) - 1, -1))
        self.generation += 1
        return True

    def begin_step(self, chunks: Sequence[Chunk]) -> ContiguousInputs:
        slots = [self._slots[c.request_id] for c in chunks]
        return contiguous_inputs(self.tensor, self.layout.row_tokens, chunks, slots, self.scales)

    def live(self) -> Iterable[str]:
        return self._slots.keys()

    def usage(self) -> MemoryUsage:
        physical = 0 if self._kv is None else self.layout.rows * self._row_bytes
        in_use = len(self._slots) * self._row_bytes
        logical = sum(self._tokens.values()) * self.shape.token_bytes
        return MemoryUsage(
            virtual_reserved=physical,
            physical=physical,
            in_use=in_use,
            parked=0,
            cached=0,
            free=physical - in_use,
            logical=logical,
            shared_saved=0,
            tail_waste=0,
            external_waste=in_use - logical,
        )

    def page_map(self) -> PageMap:
        usage = self.usage()
        owners = {row: request_id for request_id, row in self._slots.items()}
        rows = range(self.layout.rows if usage.physical else 0)
        return PageMap(
            backend=self.name,
            unit="row",
            unit_bytes=self._row_bytes,
            unit_tokens=self.layout.max_tokens,
            row_units=1,
            rows=tuple(MapRow(owners[r], self._tokens[owners[r]], (r,)) for r in rows if r in owners),
            states={r: PageState.PRIVATE if r in owners else PageState.FREE for r in rows},
            in_prefix_cache=frozenset(),
            loose={},
            budget_bytes=self._budget,
            usage=usage,
        )

    def stats(self) -> KVStats:
        return self._stats.add_swaps(self.swap)

    def check(self) -> None:
        taken = sorted([*self._slots.values(), *self._free])
        assert taken == list(range(self.layout.rows)), "every row is either free or one request's"
        assert self._slots.keys() == self._tokens.keys() == self._written.keys()
        assert all(self._written[r] <= n for r, n in self._tokens.items())
        if self.swap is not None:
            self.swap.check()
        assert all(0 <= n <= self.layout.max_tokens for n in self._tokens.values())
        self.usage().check()

    def close(self) -> None:
        for request_id in list(self._slots):
            self.free(request_id)
        self._kv = None
