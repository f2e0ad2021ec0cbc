"""The interface of a KV-cache backend. A backend supplies only what differs between kinds of memory.

    layout    how tokens lie on units           books     decide which request gets which units
    memory    carries out the decisions         inputs    tell attention where K and V are
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from vattn.config import KVCacheConfig
from vattn.kv.books.books import Books
from vattn.kv.books.units import UnitLayout
from vattn.kv.inputs import AttentionInputs, Chunk, ContiguousInputs, PagedInputs, offsets, positions
from vattn.kv.layout import KVLayout, KVShape, default_page_bytes
from vattn.kv.memory.base import Memory
from vattn.kv.page_map import UnitName
from vattn.vmm.driver import Driver

if TYPE_CHECKING:
    import torch

    from vattn.kv.cache import KVCache

DEFAULT_LAYOUT = KVLayout.INTERLEAVED  # measured: docs/memory.md


@dataclass(frozen=True)
class Setting:
    """The parameters of a cache.

    `max_tokens`: length of the longest request. `max_rows`: number of requests that may live at once.
    `fingerprint`: identifies the model in the prefix cache; None for no prefix cache.
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
        """Bytes of a page, for a backend that uses pages."""
        default = default_page_bytes(self.kind, self.shape, self.driver.granularity)
        return self.config.page_bytes or default


class Backend(ABC):
    """One kind of KV memory. The cache calls `layout` first, then `books` and `memory` once each."""

    name: ClassVar[str]
    unit: ClassVar[UnitName]
    """The word for a unit: page, block or row."""
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
        """The books, which decide which request gets which units."""

    @abstractmethod
    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        """The memory, which carries out what the books decide."""

    @abstractmethod
    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> AttentionInputs:
        """The attention inputs of a step. There is already room for every chunk."""

    @abstractmethod
    def describe(self, books: Books) -> dict[str, str | int]:
        """The settings of this cache, for reports."""

    def smallest(self) -> str:
        """The least that a budget must hold, in words, for error messages."""
        return f"one {self.unit} of {self.layout().bytes:,} bytes"


def contiguous_inputs(
    kv: torch.Tensor,
    chunks: Sequence[Chunk],
    slots: list[int],
    row_tokens: int,
    scales: torch.Tensor | None = None,
) -> ContiguousInputs:
    """Chunk b is stored in row `slots[b]`; rows are `row_tokens` positions apart."""
    import torch

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
    """Each request's tokens lie on the blocks of its block table, anywhere in the pool."""
    import torch

    owners, where = positions(chunks)
    rows = np.asarray(cache.rows(chunks), np.int64)
    ends = [chunk.start + chunk.length for chunk in chunks]
    # Kernels don't need the blocks behind a request's end in this step (the rest of a chunked prompt).
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
