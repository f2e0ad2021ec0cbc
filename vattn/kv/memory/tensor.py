"""A memory whose units are slices of one tensor: unit u is `memory[:, :, u]`.

    | unit 0 | unit 1 | unit 2 | unit 3 | …       each holds the same number of whole tokens, all layers

All units exist from the start, so there is nothing to map. To change their number, the memory moves to a new
tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vattn.kv.books.operations import Copy, Move
from vattn.kv.books.units import UnitLayout
from vattn.kv.layout import KVShape
from vattn.kv.memory.base import Memory
from vattn.kv.memory.views import KVViews, kv_views
from vattn.vmm.driver import Driver

if TYPE_CHECKING:
    import torch


class TensorMemory(Memory):
    """Memory of `count` units, filled with zeros.

    Fresh memory may hold NaN, and some kernels mask with weights of 0: 0 x NaN would be NaN.
    """

    def __init__(self, layout: UnitLayout, shape: KVShape, driver: Driver, count: int) -> None:
        super().__init__(layout, driver)
        self.shape = shape
        self.unit_tokens = layout.unit_bytes // layout.token_bytes
        self._count = count
        if self.has_bytes:
            self._views = self.allocate(count)

    def make_views(self) -> KVViews:
        return self.allocate(self._count)

    def allocate(self, count: int) -> KVViews:
        """New memory for `count` units."""
        import torch

        shape = self.shape
        size = (shape.num_layers, 2, count, self.unit_tokens, shape.unit_elems)
        return kv_views(torch.zeros(size, dtype=shape.dtype, device=self.device), shape)

    def copy(self, operation: Copy) -> None:
        if not self.has_bytes:
            return
        memory, n = self.views.memory, operation.nbytes // self.layout.token_bytes
        memory[:, :, operation.target, :n] = memory[:, :, operation.source, :n]

    def move(self, operation: Move) -> None:
        if not self.has_bytes:
            self._count, self._views = operation.limit, None
            return
        new = self.allocate(operation.limit)
        numbers = operation.numbers
        new.memory[:, :, list(numbers.values())] = self.views.memory[:, :, list(numbers)]
        self._views = new

    def read(self, row: int, units: list[int], tokens: int) -> torch.Tensor:
        return self.views.memory[:, :, units].flatten(2, 3)[:, :, :tokens]

    def write(self, row: int, units: list[int], start: int, data: torch.Tensor) -> int:
        import torch

        size, memory = self.unit_tokens, self.views.memory
        at = np.arange(start, data.shape[2])
        where = torch.from_numpy(np.asarray(units, np.int64)[at // size]).to(memory.device)
        memory[:, :, where, torch.from_numpy(at % size).to(memory.device)] = data[:, :, start:]
        return len(at) * self.shape.token_bytes
