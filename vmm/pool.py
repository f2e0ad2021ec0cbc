"""A pool of physical pages of one size, under a budget in bytes, with reference counts.

    budget   [ in use (refs > 0) | free (refs = 0, memory kept) | not created ]
             └──────────── created ─────────────────────────────┘
                                 └───────────── available ──────────────────┘

A page is named by its id. Ids and the memory behind them are reused lowest first. On the host driver, pages
that are neighbours in the file then tend to be neighbours in the address space too, and the operating system
merges their mappings into one.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable

from .driver import ArgumentError, Driver, OutOfMemory


class PagePool:
    """Pages of `page_bytes` (a multiple of the driver's granularity), at most `budget_bytes` of them.

    `acquire` returns None when pages run out. Thread-safe.

    Raises `ValueError` for a page size that is not a positive multiple of the granularity, or for a negative
    budget.
    """

    def __init__(self, driver: Driver, page_bytes: int, budget_bytes: int) -> None:
        if page_bytes <= 0 or page_bytes % driver.granularity:
            raise ArgumentError(
                f"page_bytes={page_bytes:,} is not a positive multiple of the {driver.name} driver's "
                f"granularity, {driver.granularity:,} bytes"
            )
        if budget_bytes < 0:
            raise ArgumentError(f"budget_bytes={budget_bytes:,} is negative")
        self.driver = driver
        self.page_bytes = page_bytes
        self._budget = budget_bytes // page_bytes  # in pages
        self._refs: list[int] = []  # by page id
        self._handles: list[int] = []  # by page id; 0: the id has no memory
        self._free: list[int] = []  # heap of ids with memory and no reference
        self._vacant: list[int] = []  # heap of ids without memory
        self._lock = threading.RLock()

    # Pages

    def acquire(self, n: int) -> list[int] | None:
        """Take `n` pages with one reference each. Returns None and takes none if memory is short."""
        if n < 0:
            raise ValueError(f"cannot acquire {n} pages")
        with self._lock:
            if n > self.available_pages:
                return None
            try:
                while len(self._free) < n:
                    self._create()
            except OutOfMemory:
                return None  # pages created so far stay, as free pages
            pages = [heapq.heappop(self._free) for _ in range(n)]
            for page in pages:
                self._refs[page] = 1
            return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page in use."""
        with self._lock:
            self._require_used(page)
            self._refs[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference. Without any the page is free; its memory is kept for the next `acquire`."""
        with self._lock:
            self._require_used(page)
            self._refs[page] -= 1
            if not self._refs[page]:
                heapq.heappush(self._free, page)

    def retain_all(self, pages: Iterable[int]) -> None:
        """`retain` all pages or none of them. A page may be named more than once."""
        with self._lock:
            pages = list(pages)
            for page in pages:
                self._require_used(page)
            for page in pages:
                self._refs[page] += 1

    def release_all(self, pages: Iterable[int]) -> None:
        """`release` each page."""
        with self._lock:
            for page in pages:
                self.release(page)

    def handle(self, page: int) -> int:
        """The driver's handle of a page that has memory."""
        handle = self._handles[page] if 0 <= page < len(self._handles) else 0
        if not handle:
            raise ValueError(f"page {page} has no memory")
        return handle

    def refs(self, page: int) -> int:
        """References to a page; 0 if it is free or was never created."""
        return self._refs[page] if 0 <= page < len(self._refs) else 0

    # Memory

    def reserve(self, n: int) -> int:
        """Create pages until `n` can be acquired without driver calls. Returns how many can."""
        with self._lock:
            try:
                while len(self._free) < n and self._created < self._budget:
                    self._create()
            except OutOfMemory:
                pass
            return min(n, len(self._free))

    def trim(self) -> int:
        """Give the memory of every free page back to the driver. Returns the bytes given back."""
        with self._lock:
            return self._give_back(len(self._free))

    def resize(self, budget_bytes: int) -> None:
        """Change the budget. If it is lowered, free pages beyond it are given back at once.

        Raises `ValueError` if the pages in use alone do not fit.
        """
        with self._lock:
            budget = budget_bytes // self.page_bytes
            if budget < self._used:
                raise ValueError(
                    f"budget of {budget_bytes:,} bytes is less than the {self.in_use_bytes:,} bytes in use "
                    f"({self._used} pages of {self.page_bytes:,}): free pages first"
                )
            self._give_back(self._created - budget)
            self._budget = budget

    @property
    def budget_bytes(self) -> int:
        """Maximum bytes that may be created, in whole pages."""
        return self._budget * self.page_bytes

    @property
    def created_bytes(self) -> int:
        """Bytes of physical memory held: in use and free."""
        return self._created * self.page_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes of pages with a reference. Each page counts once."""
        return self._used * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of pages created but without a reference."""
        return len(self._free) * self.page_bytes

    @property
    def available_pages(self) -> int:
        """Pages that could be acquired: free pages, and pages that the budget still allows to create."""
        return self._budget - self._used

    def check(self) -> None:
        """Raise AssertionError unless free + in use = created <= budget and no page is in two places."""
        with self._lock:
            ids = range(len(self._refs))
            assert len(self._handles) == len(self._refs), "page tables differ in length"
            free, vacant = set(self._free), set(self._vacant)
            assert len(free) == len(self._free) and len(vacant) == len(self._vacant), "a page is free twice"
            assert not free & vacant, "a page without memory is free"
            assert all(self._refs[page] >= 0 for page in ids), "a reference count is negative"
            assert {page for page in ids if not self._handles[page]} == vacant, (
                "handles and vacant ids differ"
            )
            used = {page for page in ids if self._refs[page]}
            assert used | free | vacant == set(ids) and not used & (free | vacant), "a page is in two places"
            handles = [handle for handle in self._handles if handle]
            assert len(set(handles)) == len(handles), "two pages share a handle"
            assert len(used) == self._used, "pages in use miscounted"
            assert self.free_bytes + self.in_use_bytes == self.created_bytes <= self.budget_bytes, (
                "over budget"
            )

    def close(self) -> None:
        """Give all memory back. Raises `ValueError` while pages are in use. Idempotent."""
        with self._lock:
            if self._used:
                raise ValueError(f"{self._used} pages are still in use")
            self.trim()

    @property
    def _created(self) -> int:
        return len(self._handles) - len(self._vacant)

    @property
    def _used(self) -> int:
        return self._created - len(self._free)

    def _create(self) -> None:
        handle = self.driver.create(self.page_bytes)
        if self._vacant:
            page = heapq.heappop(self._vacant)
            self._handles[page] = handle
        else:
            page = len(self._handles)
            self._handles.append(handle)
            self._refs.append(0)
        heapq.heappush(self._free, page)

    def _give_back(self, n: int) -> int:
        """Release the memory of `n` free pages, highest ids first. Returns the bytes given back."""
        self._free.sort()  # still a heap
        given = 0
        while given < n:
            page = self._free[-1]
            self.driver.release(self._handles[page])
            self._free.pop()
            self._handles[page] = 0
            heapq.heappush(self._vacant, page)
            given += 1
        return given * self.page_bytes

    def _require_used(self, page: int) -> None:
        if not self.refs(page):
            raise ValueError(f"page {page} is not in use")
