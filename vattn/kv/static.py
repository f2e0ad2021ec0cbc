"""`static`: every request reserves its maximum length in physical memory. The baseline.

row 0  | used used used ............................ max_tokens |
row 1  | used .............................................. |    dots are reserved and never used
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from vattn.kv.base import AttentionInputs, Chunk, ContiguousInputs, KVCache, KVStats
from vattn.kv.layout import KVLayout, KVShape, RowLayout, kv_views
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
        # No pages here: with "pages" of one token the row needs no padding.
        page_bytes = RowLayout(layout, shape, rows, max_tokens, 1).token_bytes
        self.layout = RowLayout(layout, shape, rows, max_tokens, page_bytes)
        self._row_bytes = row_bytes
        storage = torch.empty(rows * max_tokens * shape.token_elems, dtype=shape.dtype, device=device)
        memory = storage.as_strided(self.layout.memory_shape, self.layout.memory_strides)
        self._kv = kv_views(memory, shape)
        self._slots: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._stats = KVStats()

    @property
    def table_width(self) -> int:
        return 0

    def describe(self) -> dict[str, str | int]:
        return {"layout": str(self.layout.kind), "rows": self.layout.rows}

    @property
    def capacity_tokens(self) -> int:
        return self.layout.max_tokens

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
        return 0

    def fork(self, parent_id: str, child_id: str, tokens: int) -> bool:
        if child_id in self._slots:
            raise KeyError(f"request {child_id!r} is attached already")
        source = self._slots[parent_id]
        if not self._free:
            return False
        slot = self._free.pop()
        self._slots[child_id] = slot
        self._tokens[child_id] = tokens
        memory = self.views.memory
        memory[:, :, slot, :tokens] = memory[:, :, source, :tokens]
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
        del self._tokens[request_id]

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

    def stats(self) -> KVStats:
        return replace(self._stats)

    def check(self) -> None:
        taken = sorted([*self._slots.values(), *self._free])
        assert taken == list(range(self.layout.rows)), "every row is either free or one request's"
        assert self._slots.keys() == self._tokens.keys()
        assert all(0 <= n <= self.layout.max_tokens for n in self._tokens.values())
        self.usage().check()

    def close(self) -> None:
        for request_id in list(self._slots):
            self.free(request_id)
        self._kv = None
