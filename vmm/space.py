"""Rows of growing memory in one reservation.

    row 0  | 4 | 7 | 2 |   .   .   .   |     live: page table (4, 7, 2), room for 3 pages more
    row 1  | 4 | 9 |   .   .   .   .   |     page 4 is an alias: mapped at two addresses, read-only here
    row 2  | 5 | 1 ┊ 8 ┊ .   .   .   . |     truncated to (5, 1); 8 is retiring: cut off but still mapped
    row 3  | 3 | 6 |   .   .   .   .   |     parked: mapped, waiting to be adopted or reclaimed
           └──────── pitch ────────────┘

Invariants, which `check()` proves:
- The mapped pages of a row are the first of its range, without a gap: its table, then its retiring tail.
- Every mapping holds one reference to its page. A page returns to the pool with its last reference.
- The driver reports exactly these mappings.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from .driver import DEINITIALIZED, Access, Driver, DriverError
from .pool import PagePool
from .retire import Retirement
from .row import Row
from .strides import contiguous_stride, span_bytes

if TYPE_CHECKING:
    import torch


class AddressSpace:
    """`rows` rows of `row_bytes` bytes each, of which the first pages are mapped. Thread-safe.

    Args:
        driver: reserves and maps.
        pool: supplies the pages; its page size is the size of every mapping.
        rows: number of rows, all in one reservation, `pitch` bytes apart.
        row_bytes: bytes of a row. The pitch is `row_bytes` rounded up to whole pages.
        retirement: decides when unmapping is safe; None if it always is, as on a CPU.

    A `ValueError` means that an argument is wrong and nothing happened. When a `DriverError` is raised, the
    call has been undone. If even undoing fails, the pages concerned stay mapped and in use as a retiring
    tail, and the next call on the row tries again to unmap them.
    """

    def __init__(
        self,
        driver: Driver,
        pool: PagePool,
        rows: int,
        row_bytes: int,
        retirement: Retirement | None = None,
    ) -> None:
        if rows <= 0 or row_bytes <= 0:
            raise ValueError(f"an address space needs rows and bytes, not {rows} rows of {row_bytes:,} bytes")
        self.driver = driver
        self.pool = pool
        self.retirement = retirement if retirement is not None else Retirement()
        self.page_bytes = pool.page_bytes
        self.pages_per_row = -(-row_bytes // pool.page_bytes)
        self.pitch = self.pages_per_row * pool.page_bytes
        self.rows = rows
        self.base = driver.reserve(rows * self.pitch)
        self._rows = [Row() for _ in range(rows)]
        self._parked: OrderedDict[int, None] = OrderedDict()
        self._stamp = 0
        self._table_pages = 0
        self._tail_pages = 0
        self._closed = False
        self._lock = threading.RLock()

    # Growth

    def extend(self, row: int, n_pages: int) -> bool:
        """Grow one row by `n_pages` private pages: see `extend_all`."""
        return self.extend_all((row,), n_pages)

    def extend_all(self, rows: Sequence[int], n_pages: int | Sequence[int]) -> bool:
        """Grow several rows, each by `n_pages` (or its own number) of private pages. All or nothing.

        Returns False and changes nothing if the pool is short. Acquires every page, then maps, then grants
        access with one call per contiguous span. A row's own pages that are truncated but still mapped are
        taken back without a driver call if they have no other reference; otherwise the call waits for the
        device.
        """
        counts = [n_pages] * len(rows) if isinstance(n_pages, int) else list(n_pages)
        if len(counts) != len(rows):
            raise ValueError(f"{len(rows)} rows but {len(counts)} page counts")
        if len(set(rows)) != len(rows):
            raise ValueError(f"a row is named twice in {tuple(rows)}")
        wanted = sorted(zip(rows, counts, strict=True))
        polled = False
        while True:
            with self._lock:
                for row, count in wanted:
                    self._require_room(row, count)
                revived = {row: self._rows[row].revivable(count, self.pool.refs) for row, count in wanted}
                blocked = [
                    row for row, count in wanted if revived[row] < min(count, len(self._rows[row].tail))
                ]
                if not blocked:
                    pages = self.pool.acquire(sum(counts) - sum(revived.values()))
                    if pages is not None:
                        self._grow(wanted, revived, pages)
                        return True
            if blocked:
                self._settle_rows(blocked)
            elif polled or not self.retirement.poll():
                return False
            else:
                polled = True

    def alias(self, row: int, pages: Sequence[int], access: Access = Access.READ) -> None:
        """Append pages that are in use elsewhere. This takes no memory.

        They are mapped read-only if the driver can do that, so that a write to a shared page faults. The
        next `extend` continues on a private page. Waits for the device if the row has retiring pages.
        """
        pages = list(pages)
        while True:
            with self._lock:
                self._require_room(row, len(pages))
                if not self._rows[row].tail:
                    self.pool.retain_all(pages)
                    self._map([(row, pages)], access)
                    self._append(row, pages, access)
                    return
            self._settle_rows([row])

    # Shrinking

    def truncate(self, row: int, n_pages: int) -> None:
        """Keep the first `n_pages` pages of a row. The others are unmapped, in one call, once it is safe.

        Until then they count as in use (`retiring_bytes`).
        """
        with self._lock:
            state = self._live(row)
            if not 0 <= n_pages <= len(state.pages):
                raise ValueError(f"cannot truncate row {row} to {n_pages} pages: it has {len(state.pages)}")
            if n_pages == len(state.pages):
                return
            stamp = self._cut(row, n_pages)
        self._retire([(row, stamp)])

    def clear(self, row: int) -> None:
        """`truncate` to no pages."""
        self.truncate(row, 0)

    def park(self, row: int) -> None:
        """Set a finished row aside, mapped as it is, for `adopt` or `reclaim`."""
        with self._lock:
            self._live(row)
            self._parked[row] = None

    def adopt(self, row: int) -> None:
        """Make a parked row live again, with the pages it still has and without a driver call.

        The new owner may write only where `private` says so.
        """
        with self._lock:
            if row not in self._parked:
                raise ValueError(f"row {row} is not parked")
            del self._parked[row]

    def reclaim(self, n_pages: int) -> int:
        """Free at least `n_pages` pages from the tails of parked rows, least recently parked first.

        Returns how many pages are free now or will be after retirement. That may be fewer than asked for,
        since a page is freed only with its last reference. Emptied rows stay parked.
        """
        with self._lock:
            keep: dict[int, int] = {}
            dropped: Counter[int] = Counter()
            freed: set[int] = set()
            for row in self._parked:
                pages = self._rows[row].pages
                keep[row] = len(pages)
                while keep[row] and len(freed) < n_pages:
                    keep[row] -= 1
                    page = pages[keep[row]]
                    dropped[page] += 1
                    if dropped[page] == self.pool.refs(page):
                        freed.add(page)
            cut: list[tuple[int, int]] = []
            for row, first in keep.items():
                pages = self._rows[row].pages
                while first < len(pages) and pages[first] not in freed:
                    first += 1  # this page has other references: unmapping it here frees nothing
                if first < len(pages):
                    cut.append((row, self._cut(row, first)))
        self._retire(cut)
        return len(freed)

    def settle(self) -> None:
        """Wait for the device and unmap every retiring page, including those whose unmap failed before.

        If an unmap fails, the others are still tried, then the first error is raised.
        """
        self.retirement.drain()
        with self._lock:
            stamp = self._stamp
            rows = [row for row, state in enumerate(self._rows) if state.tail]
        failure: DriverError | None = None
        for row in rows:
            try:
                self._settle(row, stamp)
            except DriverError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # Looking

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A `with` block in which no other thread changes the page tables."""
        with self._lock:
            yield

    @property
    def parked(self) -> tuple[int, ...]:
        """Parked rows, least recently parked first."""
        with self._lock:
            return tuple(self._parked)

    def mapped(self, row: int) -> int:
        """Number of pages of a row that may be used."""
        return len(self._row(row).pages)

    def retiring(self, row: int) -> int:
        """Number of truncated pages of a row that are still mapped. Without any, growing need not wait."""
        return len(self._row(row).tail)

    def pages(self, row: int) -> tuple[int, ...]:
        """Page table of a row."""
        with self._lock:
            return tuple(self._row(row).pages)

    def private(self, row: int, start: int = 0, held: Callable[[int], int] = lambda _: 0) -> bool:
        """Whether the pages from position `start` on are writable and mapped nowhere else.

        `held(page)`: number of references from holders that do not map the page.
        """
        with self._lock:
            state = self._row(row)
            return all(
                state.writable[index] and self.pool.refs(page) - held(page) == 1
                for index, page in enumerate(state.pages[start:], start)
            )

    def address(self, row: int) -> int:
        """First address of a row."""
        self._row(row)
        return self.base + row * self.pitch

    @property
    def reserved_bytes(self) -> int:
        """Bytes of reserved addresses."""
        return 0 if self._closed else self.rows * self.pitch

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped by live and parked rows. A page counts once for every row that maps it."""
        return self._table_pages * self.page_bytes

    @property
    def retiring_bytes(self) -> int:
        """Bytes truncated but still mapped, because a step might touch them."""
        return self._tail_pages * self.page_bytes

    def retiring_references(self) -> Counter[int]:
        """How often each page is mapped by retiring tails."""
        with self._lock:
            return Counter(entry.page for state in self._rows for entry in state.tail)

    def references(self) -> Counter[int]:
        """How often each page is mapped here, retiring mappings included."""
        with self._lock:
            counted: Counter[int] = Counter()
            for state in self._rows:
                counted.update(state.pages)
                counted.update(entry.page for entry in state.tail)
            return counted

    def tensor(
        self,
        shape: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype,
        offset: int = 0,
        owner: object = None,
    ) -> torch.Tensor:
        """View of the reservation from byte `offset` on. Strides are in elements; None for row-major.

        It may cover addresses where nothing is mapped; those must not be touched. It keeps `owner` alive but
        not this space: the caller, or `owner`, must do that.
        """
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        end = offset + span_bytes(shape, stride, dtype.itemsize)
        if offset < 0 or offset % dtype.itemsize or end > self.rows * self.pitch:
            raise ValueError(
                f"bytes {offset:,} to {end:,} leave the reservation of {self.rows * self.pitch:,} bytes"
            )
        self._require_open()
        return self.driver.tensor(self.base + offset, shape, stride, dtype, owner)

    def check(self, holders: Mapping[int, int] | None = None) -> None:
        """Raise AssertionError unless the invariants above hold.

        `holders`: number of references to each page from elsewhere. If given, the pool's counts must match
        exactly; otherwise they must be at least the number of mappings.
        """
        with self._lock:
            expected: list[tuple[int, int, int]] = []
            for row, state in enumerate(self._rows):
                assert len(state.writable) == len(state.pages) and state.mapped <= self.pages_per_row
                stamps = [entry.stamp for entry in state.tail]
                assert stamps == sorted(stamps, reverse=True), f"row {row}: retiring pages out of order"
                table = [*state.pages, *(entry.page for entry in state.tail)]
                va = self.base + row * self.pitch
                for index, page in enumerate(table):
                    expected.append((va + index * self.page_bytes, self.page_bytes, self.pool.handle(page)))
            assert self._table_pages == sum(len(state.pages) for state in self._rows), (
                "mapped pages miscounted"
            )
            assert self._tail_pages == sum(len(state.tail) for state in self._rows), (
                "retiring pages miscounted"
            )
            counted = self.references()
            for page, count in counted.items():
                assert self.pool.refs(page) >= count, f"page {page}: more mappings than references"
            if holders is not None:
                for page in counted.keys() | holders.keys():
                    there, due = self.pool.refs(page), counted[page] + holders.get(page, 0)
                    assert there == due, f"page {page}: {there} references, {due} accounted for"
            if self._closed:
                assert not expected and not self._parked, "a closed space holds pages"
                return
            seen = self.driver.mappings(self.base, self.rows * self.pitch)
            if seen is None:
                return
            assert [m[:3] for m in seen] == expected, "the driver maps other pages than the tables say"
            access = {m.va: m.access for m in seen}
            for row, state in enumerate(self._rows):
                for index, writable in enumerate(state.writable):
                    at = self.base + row * self.pitch + index * self.page_bytes
                    due_access = Access.READ_WRITE if writable else Access.READ
                    assert access[at] >= due_access, f"row {row} page {index}: access {access[at].name}"

    def close(self) -> None:
        """Wait for the device, unmap everything, give back pages and addresses. Idempotent."""
        if self._closed:
            return
        self.retirement.drain()
        with self._lock:
            if self._closed:
                return
            for row in range(self.rows):
                self._cut(row, 0)
                self._settle(row, self._stamp)
            self._parked.clear()
            try:
                self.driver.free(self.base, self.rows * self.pitch)
            except DriverError as error:
                if error.code != DEINITIALIZED:
                    raise
            self._closed = True

    # Internal. The caller holds the lock, unless the docstring says otherwise.

    def _grow(self, wanted: Sequence[tuple[int, int]], revived: Mapping[int, int], pages: list[int]) -> None:
        jobs: list[tuple[int, list[int]]] = []
        start = 0
        for row, count in wanted:
            end = start + count - revived[row]
            jobs.append((row, pages[start:end]))
            start = end
        self._map(jobs, Access.READ_WRITE)
        for row, new in jobs:
            self._rows[row].revive(revived[row])
            self._table_pages += revived[row]
            self._tail_pages -= revived[row]
            self._append(row, new, Access.READ_WRITE)

    def _map(self, jobs: Sequence[tuple[int, list[int]]], access: Access) -> None:
        """Map pages behind those of each row, rows ascending. On failure drop every reference and raise."""
        driver, size = self.driver, self.page_bytes
        spans: list[list[int]] = []  # [first address, end], merged where they touch
        done = 0
        try:
            for row, pages in jobs:
                va = self.base + row * self.pitch + self._rows[row].mapped * size
                if pages and spans and spans[-1][1] == va:
                    spans[-1][1] += len(pages) * size
                elif pages:
                    spans.append([va, va + len(pages) * size])
                for page in pages:
                    driver.map(va, size, self.pool.handle(page))
                    done += 1
                    va += size
            for first, end in spans:
                driver.set_access(first, end - first, access)
        except BaseException as error:
            self._undo(jobs, done, error)
            raise

    def _undo(self, jobs: Sequence[tuple[int, list[int]]], done: int, cause: BaseException) -> None:
        """Unmap the first `done` pages of the jobs and drop the references to all of them."""
        for row, pages in jobs:
            mapped = pages[:done]
            done -= len(mapped)
            state = self._rows[row]
            if mapped:
                va = self.base + row * self.pitch + state.mapped * self.page_bytes
                try:
                    self.driver.unmap(va, len(mapped) * self.page_bytes)
                except DriverError as error:
                    # The pages are still mapped, so still in use: keep them as a tail that no step has seen.
                    state.strand(mapped)
                    self._tail_pages += len(mapped)
                    cause.add_note(f"and {len(mapped)} pages of row {row} could not be unmapped: {error}")
                    pages = pages[len(mapped) :]
            self.pool.release_all(pages)

    def _append(self, row: int, pages: Sequence[int], access: Access) -> None:
        self._rows[row].append(pages, access == Access.READ_WRITE)
        self._table_pages += len(pages)

    def _cut(self, row: int, keep: int) -> int:
        """Move the pages from position `keep` on to the retiring tail. Returns their stamp."""
        self._stamp += 1
        moved = self._rows[row].cut(keep, self._stamp)
        self._table_pages -= moved
        self._tail_pages += moved
        return self._stamp

    def _retire(self, cut: Sequence[tuple[int, int]]) -> None:
        """Unmap tails as soon as it is safe, each even if another fails. Call it without the lock."""
        errors: list[DriverError] = []
        for row, stamp in cut:
            try:
                self.retirement.retire(partial(self._settle, row, stamp))
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _settle(self, row: int, stamp: int) -> None:
        """Unmap in one call the part of a row's tail that was cut off at `stamp` or before."""
        with self._lock:
            state = self._rows[row]
            due = state.due(stamp)
            if not due:
                return
            first = state.mapped - due
            va = self.base + row * self.pitch + first * self.page_bytes
            try:
                self.driver.unmap(va, due * self.page_bytes)
            except DriverError as error:
                if error.code != DEINITIALIZED:  # a closed driver has unmapped everything itself
                    raise
            self._tail_pages -= due
            self.pool.release_all(state.drop(due))

    def _settle_rows(self, rows: Sequence[int]) -> None:
        """Wait for the device and unmap the tails of `rows`. Call it without the lock."""
        with self._lock:
            stamp = self._stamp
        self.retirement.drain()
        for row in rows:
            self._settle(row, stamp)

    def _row(self, row: int) -> Row:
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} does not exist: there are {self.rows}")
        return self._rows[row]

    def _live(self, row: int) -> Row:
        self._require_open()
        state = self._row(row)
        if row in self._parked:
            raise ValueError(f"row {row} is parked: adopt it first")
        return state

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the address space is closed")

    def _require_room(self, row: int, count: int) -> None:
        have = len(self._live(row).pages)
        if count < 0 or have + count > self.pages_per_row:
            raise ValueError(
                f"cannot add {count} pages to row {row}: it has {have} of at most {self.pages_per_row}"
            )
