"""The page table of one row of an address space, and its retiring tail.

    mapped   | 4 | 7 | 2 ┊ 8 | 1 | 3 |      pages (4, 7, 2), then the retiring tail (8, 1, 3)
    stamp                  9   9   6        of the truncation: the newest cut lies next to the pages,
                                            so the page to be unmapped first is at the end

This file only keeps books. Nothing here maps pages or counts references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Retiring(NamedTuple):
    """A page that was cut off its row but is still mapped."""

    page: int
    stamp: int  # order of truncation; 0: no step can have seen it
    writable: bool


class Row:
    """`pages` by position, `writable` (is the page mapped read-write here?) for each, and `tail`."""

    __slots__ = ("pages", "tail", "writable")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.writable = bytearray()
        self.tail: deque[Retiring] = deque()

    @property
    def mapped(self) -> int:
        """Number of mapped pages, the tail included: the position of the next mapping."""
        return len(self.pages) + len(self.tail)

    def append(self, pages: Sequence[int], writable: bool) -> None:
        """Record pages mapped behind the others. There must be no tail."""
        self.pages.extend(pages)
        self.writable.extend([writable] * len(pages))

    def cut(self, keep: int, stamp: int) -> int:
        """Move all but the first `keep` pages to the tail. Returns how many were moved."""
        for index in range(len(self.pages) - 1, keep - 1, -1):
            self.tail.appendleft(Retiring(self.pages[index], stamp, bool(self.writable[index])))
        moved = len(self.pages) - keep
        del self.pages[keep:], self.writable[keep:]
        return moved

    def revivable(self, count: int, refs: Callable[[int], int]) -> int:
        """How many of `count` pages the row can take back: writable ones without another reference."""
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
        """Record mapped pages that could not be unmapped. They are unmapped at the next opportunity."""
        self.tail.extend(Retiring(page, 0, False) for page in pages)

    def due(self, stamp: int) -> int:
        """Number of pages at the end of the tail that were cut off at `stamp` or before."""
        found = 0
        for entry in reversed(self.tail):
            if entry.stamp > stamp:
                break
            found += 1
        return found

    def drop(self, count: int) -> list[int]:
        """Remove the last `count` pages of the tail, which are unmapped by now, and return them."""
        return [self.tail.pop().page for _ in range(count)]
