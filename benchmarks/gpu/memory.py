"""Keys and values of a problem, laid out in every way that is compared.

    virtual interleaved   rows of whole tokens, all layers of the model side by side ┐ pages mapped by
    virtual per_layer     a range per layer, K or V                                  ┘ the driver
    static per_layer      the same addresses' shape in ordinary memory
    paged 16 | 64 | 256   blocks of a pool in random order

Every place shows its memory as `kv[layer, 2, row, position, kv_head, head_dim]`. Launches rotate over the
layers, as an engine does. Only an interleaved place needs all layers of the model, since they make its
strides; the others have as many as keep a layer from staying in the L2 cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.problems import DTYPE, Heads, Problem
from vattn.kv.backends.base import contiguous_inputs
from vattn.kv.inputs import AttentionInputs, Chunk, ContiguousInputs, PagedInputs, offsets
from vattn.kv.layout import KVLayout, KVShape, RowLayout
from vattn.kv.memory.views import kv_views
from vattn.vmm.driver import Driver
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

ROTATED_BYTES = 512 << 20
"""K and V that launches rotate over, several times any L2 cache."""

PIECE_ELEMENTS = 1 << 28
"""Filled by one launch."""

BLOCK_SIZES = (16, 64, 256)


class NoRoom(Exception):
    """The problem does not fit; the message has the figures."""


def rotated_layers(problem: Problem) -> int:
    """Layers of a place whose strides do not depend on their number."""
    return min(problem.heads.layers, -(-ROTATED_BYTES // problem.layer_bytes))


def chunks(problem: Problem) -> list[Chunk]:
    """The step that computes the problem: each request's last token, or all of its tokens."""
    new = 1 if problem.kind == "decode" else problem.context
    return [Chunk(str(b), problem.context - new, new) for b in range(problem.batch)]


class Place(ABC):
    """One way to hold K and V. `load` a problem, use `inputs`, load the next or `unload`."""

    name: str

    @abstractmethod
    def bytes_for(self, problem: Problem) -> int:
        """Physical memory the problem takes here."""

    @abstractmethod
    def load(self, problem: Problem) -> AttentionInputs:
        """Hold the problem, random numbers in every layer; raises NoRoom."""

    @abstractmethod
    def unload(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def keys_values(self, layer: int, request: int) -> Tensor:
        """`[2, context, kv_heads, head_dim]` of the problem that is loaded; a view or a copy."""


class VirtualPlace(Place):
    """Rows of virtual memory: request b is row b, and pages stay mapped from one problem to the next."""

    def __init__(
        self, layout: KVLayout, heads: Heads, driver: Driver, budget_bytes: int, rows: int, max_tokens: int
    ) -> None:
        self.name = f"virtual {layout}"
        self._heads = heads
        shape = KVShape(heads.layers, heads.kv_heads, heads.head_dim, DTYPE)
        self._layout = RowLayout(layout, shape, rows, max_tokens, driver.granularity)
        self._pool = PagePool(driver, driver.granularity, budget_bytes)
        ranges = self._layout.ranges
        self._space = AddressSpace(driver, self._pool, rows * ranges, self._layout.row_bytes)
        memory = self._space.tensor(self._layout.memory_shape, self._layout.memory_strides, DTYPE)
        self._kv = kv_views(memory, shape).kv
        self._context = 0

    def _ranges(self, problem: Problem) -> int:
        return 1 if self._layout.ranges == 1 else 2 * rotated_layers(problem)

    def bytes_for(self, problem: Problem) -> int:
        pages = self._layout.units.units(problem.context) * problem.batch * self._ranges(problem)
        return pages * self._layout.page_bytes

    @property
    def held_bytes(self) -> int:
        """Physical memory held now, mapped or not."""
        return self._pool.created_bytes

    @property
    def budget_bytes(self) -> int:
        return self._pool.budget_bytes

    def load(self, problem: Problem) -> AttentionInputs:
        self._space.driver.synchronize()  # unmapping is not ordered with kernels that may still read
        layers = problem.heads.layers if self._layout.ranges == 1 else rotated_layers(problem)
        rows, used = self._layout.rows, self._ranges(problem)
        pages = self._layout.units.units(problem.context)
        want = {r * rows + b: pages for r in range(used) for b in range(problem.batch)}
        for row in range(self._space.rows):
            if self._space.mapped(row) > want.get(row, 0):
                self._space.truncate(row, want.get(row, 0))
        missing = {row: n - self._space.mapped(row) for row, n in want.items()}
        short = [row for row, n in missing.items() if n]
        if short and not self._space.extend_all(short, [missing[row] for row in short]):
            raise NoRoom(f"{self.bytes_for(problem):,} bytes; the pool has {self._pool.budget_bytes:,}")
        kv = self._kv[:layers]
        for b in range(problem.batch):
            fill(kv[:, :, b, : problem.context].transpose(0, 2))
        self._context = problem.context
        slots = list(range(problem.batch))
        return contiguous_inputs(kv, chunks(problem), slots, self._layout.row_tokens)

    def unload(self) -> None:
        self._space.driver.synchronize()
        for row in range(self._space.rows):
            if self._space.mapped(row):
                self._space.truncate(row, 0)
        self._pool.trim()

    def keys_values(self, layer: int, request: int) -> Tensor:
        return self._kv[layer, :, request, : self._context]

    def close(self) -> None:
        self._space.close()
        self._pool.close()


@dataclass
class StaticPlace(Place):
    """Ordinary memory with the shape of `virtual per_layer`."""

    device: torch.device
    name: str = "static per_layer"
    _kv: Tensor | None = None

    def bytes_for(self, problem: Problem) -> int:
        return problem.layer_bytes * rotated_layers(problem)

    def load(self, problem: Problem) -> ContiguousInputs:
        self._kv = allocate(problem, problem.batch, problem.context, self.device)
        slots = list(range(problem.batch))
        return contiguous_inputs(self._kv, chunks(problem), slots, problem.context)

    def unload(self) -> None:
        self._kv = None

    def keys_values(self, layer: int, request: int) -> Tensor:
        assert self._kv is not None
        return self._kv[layer, :, request]


class PagedPlace(Place):
    """Blocks in random order."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.name = f"paged {block_size}"
        self.block_size = block_size
        self._device = device
        self._kv: Tensor | None = None
        self._tables = np.empty((0, 0), np.int32)
        self._context = 0

    def _blocks(self, problem: Problem) -> int:
        return -(-problem.context // self.block_size) * problem.batch

    def bytes_for(self, problem: Problem) -> int:
        tokens = self._blocks(problem) * self.block_size
        return tokens * problem.heads.layer_token_bytes * rotated_layers(problem)

    def load(self, problem: Problem) -> PagedInputs:
        blocks = self._blocks(problem)
        self._kv = allocate(problem, blocks, self.block_size, self._device)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        self._tables = order.view(problem.batch, -1).int().numpy()
        self._context = problem.context
        steps = chunks(problem)
        # Where new tokens would be stored is not asked here: nothing is.
        nothing = torch.empty(0, dtype=torch.int64)
        return PagedInputs(
            self._kv, offsets(steps), [c.end for c in steps], nothing, self._tables, self.block_size
        )

    def unload(self) -> None:
        self._kv = None

    def keys_values(self, layer: int, request: int) -> Tensor:
        assert self._kv is not None
        table = torch.tensor(self._tables[request], device=self._device)
        return self._kv[layer][:, table].flatten(1, 2)[:, : self._context]


def allocate(problem: Problem, rows: int, positions: int, device: torch.device) -> Tensor:
    """Random `[layers, 2, rows, positions, kv_heads, head_dim]` in ordinary memory."""
    heads = problem.heads
    shape = (rotated_layers(problem), 2, rows, positions, heads.kv_heads, heads.head_dim)
    kv = torch.empty(shape, dtype=DTYPE, device=device)
    for layer in kv:
        fill(layer.flatten(0, 1))
    return kv


def fill(rows: Tensor) -> None:
    """Random numbers, a piece at a time: never zeros, on which a GPU is faster."""
    step = max(1, PIECE_ELEMENTS // rows[0].numel())
    for start in range(0, len(rows), step):
        rows[start : start + step].normal_()
