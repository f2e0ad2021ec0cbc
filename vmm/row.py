"""The page table of one row of an address space, and the tail that is on its way out.

    mapped   | 4 | 7 | 2 ┊ 8 | 1 | 3 |      pages (4, 7, 2), then the retiring tail (8, 1, 3)
    stamp                  9   9   6        of the truncation: the newest cut lies next to the pages,
                                            so what may be unmapped first is at the end

Books only: nothing here maps or counts references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Retiring(NamedTuple):
    """A page that was cut off and is still mapped."""

    page: int
    stamp: int  # order of truncation; 0: no step can have seen it
    writable: bool


class Row:
    """`pages` by position, `writable` (mapped read-write here) beside it, and `tail`."""

    __slots__ = ("pages", "tail", "writable")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.writable = bytearray()
        self.tail: deque[Retiring] = deque()

    @property
    def mapped(self) -> int:
        """Pages mapped in all: where the next mapping goes."""
        return len(self.pages) + len(self.tail)

    def append(self, pages: Sequence[int], writable: bool) -> None:
        """Pages mapped behind the others; there is no tail."""
        self.pages.extend(pages)
        self.writable.extend([writable] * len(pages))

    def cut(self, keep: int, stamp: int) -> int:
        """Move all but the first `keep` pages to the tail; how many."""
        for index in range(len(self.pages) - 1, keep - 1, -1):
            self.tail.appendleft(Retiring(self.pages[index], stamp, bool(self.writable[index])))
        moved = len(self.pages) - keep
        del self.pages[keep:], self.writable[keep:]
        return moved

    def revivable(self, count: int, refs: Callable[[int], int]) -> int:
        """How many of `count` pages the row can have back: its own, writable, referred to by nobody else."""
        found = 0
        for entry in self.tail:
            if found == count or not entry.writable or refs(entry.page) != 1:
                break
            found += 1
        return found

    def revive(self, count: int) -> None:
        """Take `count` revivable pages back."""
        for _ in range(count):
            self.append([self.tail.popleft().page], writable=True)

    def strand(self, pages: Sequence[int]) -> None:
        """Pages mapped behind all others that could not be unmapped: out with the first chance."""
        self.tail.extend(Retiring(page, 0, False) for page in pages)

    def due(self, stamp: int) -> int:
        """Pages at the end that were cut off at `stamp` or before."""
        found = 0
        for entry in reversed(self.tail):
            if entry.stamp > stamp:
                break
            found += 1
        return found

    def drop(self, count: int) -> list[int]:
        """The last `count` pages of the tail, unmapped by now."""
        return [self.tail.pop().page for _ in range(count)]
