"""What makes one kind of KV memory, beside what all have in common.

    layout    how tokens lie on units           books     who decides
    memory    what carries it out               inputs    what attention gets to see
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from vattn.config import KVCacheConfig
from vattn.kv.books.books import Books
from vattn.kv.books.units import UnitLayout
from vattn.kv.inputs import AttentionInputs, Chunk, ContiguousInputs, PagedInputs, offsets, positions
from vattn.kv.layout import KVLayout, KVShape, default_page_bytes
from vattn.kv.memory.base import Memory
from vattn.kv.page_map import UnitName
from vattn.vmm.driver import Driver

if TYPE_CHECKING:
    from vattn.kv.cache import KVCache

DEFAULT_LAYOUT = KVLayout.INTERLEAVED  # measured: docs/memory.md


@dataclass(frozen=True)
class Setting:
    """What a cache is made for.

    `max_tokens`: of the longest request. `max_rows`: requests at once. `fingerprint`: of the model, for the
    prefix cache; None: no prefix cache.
    """

    config: KVCacheConfig
    shape: KVShape
    driver: Driver
    budget_bytes: int
    max_tokens: int
    max_rows: int
    fingerprint: str | None = None

    @property
    def kind(self) -> KVLayout:
        """The layout of contiguous rows."""
        return DEFAULT_LAYOUT if self.config.layout == "auto" else KVLayout(self.config.layout)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, where there are pages."""
        default = default_page_bytes(self.kind, self.shape, self.driver.granularity)
        return self.config.page_bytes or default


class Backend(ABC):
    """One kind of KV memory. `layout` comes first; `books` and `memory` are asked for once."""

    name: ClassVar[str]
    unit: ClassVar[UnitName]
    """What a unit is called."""
    reads: ClassVar[type[AttentionInputs]]
    """The kind of inputs that attention must be able to read."""
    has_tables: ClassVar[bool] = False
    """Whether kernels read a table of units for each request."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def layout(self) -> UnitLayout:
        """How tokens lie on units."""

    @abstractmethod
    def books(self, layout: UnitLayout) -> Books:
        """Who decides."""

    @abstractmethod
    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        """What carries it out."""

    @abstractmethod
    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> AttentionInputs:
        """A step as attention sees it; room for every chunk is there."""

    @abstractmethod
    def describe(self, books: Books) -> dict[str, str | int]:
        """The choices that make up this cache, for reports."""

    def smallest(self) -> str:
        """What a budget must hold at least, in words."""
        return f"one {self.unit} of {self.layout().bytes:,} bytes"


def contiguous_inputs(
    kv: torch.Tensor,
    chunks: Sequence[Chunk],
    slots: list[int],
    row_tokens: int,
    scales: torch.Tensor | None = None,
) -> ContiguousInputs:
    """Chunk b is stored in row `slots[b]`; rows are `row_tokens` positions apart."""
    owners, where = positions(chunks)
    return ContiguousInputs(
        kv=kv,
        cu_seqlens=offsets(chunks),
        seq_lens=[chunk.start + chunk.length for chunk in chunks],
        slot_mapping=torch.from_numpy(np.asarray(slots, np.int64)[owners] * row_tokens + where),
        slots=slots,
        scales=scales,
    )


def paged_inputs(cache: KVCache, chunks: Sequence[Chunk], block_size: int) -> PagedInputs:
    """Each request's tokens lie on the blocks of its table, wherever those are."""
    owners, where = positions(chunks)
    rows = np.asarray(cache.rows(chunks), np.int64)
    ends = [chunk.start + chunk.length for chunk in chunks]
    # Blocks past a request's end this step (the rest of a chunked prompt) are no business of kernels.
    tables = cache.books.tables[rows, : -(-max(ends, default=1) // block_size)]
    blocks = tables[owners, where // block_size].astype(np.int64)
    return PagedInputs(
        kv=cache.tensor,
        cu_seqlens=offsets(chunks),
        seq_lens=ends,
        slot_mapping=torch.from_numpy(blocks * block_size + where % block_size),
        block_tables=tables,
        block_size=block_size,
        scales=cache.scales,
    )
