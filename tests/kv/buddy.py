"""A backend in one file, as an example: `paged`, but a request's blocks are neighbours as far as possible.

    paged    | A0 | B0 | A1 | C0 | B1 | A2 | …       the lowest free block, whoever asks
    buddy    | A0 | A1 | A2 |    | B0 | B1 | C0 | …   behind the request's last block, else in an aligned run

Aligned runs of 2^k blocks break up less than others: a run that is given back joins its buddy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from vattn.kv.backends.base import Backend, paged_inputs
from vattn.kv.books.allocator import UnitAllocator
from vattn.kv.books.books import Books
from vattn.kv.books.units import UnitLayout
from vattn.kv.cache import KVCache
from vattn.kv.inputs import Chunk, PagedInputs
from vattn.kv.memory.base import Memory
from vattn.kv.memory.tensor import TensorMemory


class BuddyAllocator(UnitAllocator):
    """All units exist; `take` likes neighbours."""

    def take(self, n: int, after: int | None = None) -> tuple[list[int], list[int]] | None:
        if n > self.available:
            return None
        free = set(self._free)
        units: list[int] = []
        if after is not None:  # go on where the request ends
            while len(units) < n and after + 1 + len(units) in free:
                units.append(after + 1 + len(units))
        missing = n - len(units)
        if missing:
            start = self._run(free - set(units), missing)
            rest = sorted(free - set(units)) if start is None else range(start, start + missing)
            units += list(rest)[:missing]
        self._free = sorted(free - set(units))
        heapq.heapify(self._free)
        return units, []

    def _run(self, free: set[int], n: int) -> int | None:
        """Where the first free aligned run of 2^k >= n units begins, if possible with room to grow."""
        size = 1 << (n - 1).bit_length()
        for run in (4 * size, 2 * size, size):
            for start in range(0, self.limit - run + 1, run):
                if free.issuperset(range(start, start + run)):
                    return start
        return None


class BuddyBackend(Backend):
    """Blocks of one tensor, given out in runs."""

    name = "buddy"
    unit = "block"
    reads = PagedInputs
    has_tables = True

    def layout(self) -> UnitLayout:
        token, block = self.setting.shape.token_bytes, self.setting.config.block_size
        return UnitLayout(token, block * token, ranges=1, max_tokens=self.setting.max_tokens)

    def books(self, layout: UnitLayout) -> Books:
        blocks = self.setting.budget_bytes // layout.bytes
        return Books(
            layout,
            blocks,
            fingerprint=self.setting.fingerprint,
            entry_tokens=self.setting.config.block_size,
            allocator=BuddyAllocator(blocks, made=True),
        )

    def memory(self, layout: UnitLayout, books: Books) -> Memory:
        return TensorMemory(layout, self.setting.shape, self.setting.driver, books.limit)

    def inputs(self, cache: KVCache, chunks: Sequence[Chunk]) -> PagedInputs:
        return paged_inputs(cache, chunks, self.setting.config.block_size)

    def describe(self, books: Books) -> dict[str, str | int]:
        return {"block_size": self.setting.config.block_size, "blocks": books.limit}
