"""A pool of reference-counted KV blocks of equal size (PagedAttention, section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Block ids `0 .. num_blocks - 1`, each free or held by `refs(block)` holders.

    Freed blocks go to the back of the queue and are handed out from the front, so a block rests as
    long as possible before its bytes are overwritten.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"a block pool can't have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def acquire(self, n: int) -> list[int] | None:
        """Take `n` blocks with one reference each, or None (and nothing) when fewer are free."""
        if n > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        """Add a holder to a block that has one."""
        assert self._refs[block] > 0, f"block {block} is free: nobody can share it"
        self._refs[block] += 1

    def retain_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.retain(block)

    def release_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.release(block)

    def release(self, block: int) -> None:
        """Drop a holder; the last one frees the block."""
        assert self._refs[block] > 0, f"block {block} is released more often than held"
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free.append(block)

    def renumbered(self, num_blocks: int) -> tuple[BlockPool, dict[int, int]]:
        """A pool of another size with the same holders, and the new numbers of held blocks, by old ones.

        Raises ValueError when more blocks are held.
        """
        held = [block for block in range(self.num_blocks) if self._refs[block]]
        if len(held) > num_blocks:
            raise ValueError(f"{len(held)} blocks are held: they don't fit {num_blocks}")
        pool = BlockPool(num_blocks)
        numbers = {old: new for new, old in enumerate(held)}
        for old, new in numbers.items():
            pool._refs[new] = self._refs[old]
        pool._free = deque(range(len(held), num_blocks))
        return pool, numbers

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, refs in enumerate(self._refs):
            assert refs >= 0
            assert (refs == 0) == (block in free), f"block {block}: {refs} holders, free={block in free}"
