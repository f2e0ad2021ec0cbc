"""A memory whose units are sets of pages, mapped by a driver into rows of addresses.

    unit u     one page for each range of a row          pages   vattn/vmm/pool.py
    row r      rows r, r + rows, r + 2 x rows, … of one reservation   vattn/vmm/space.py

    row 3, units 4 and 9      range 0 | p4 | p9 | . . . |   range 1 | p5 | p7 | . . . |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from vattn.kv.books.operations import Copy, Discard, Finish, Grant, Map, Unmap
from vattn.kv.books.units import UnitLayout
from vattn.kv.layout import KVShape, RowLayout
from vattn.kv.memory.base import Memory
from vattn.kv.memory.views import KVViews, kv_views
from vattn.vmm.driver import Access, CallCounter, Driver, DriverError, OutOfMemory
from vattn.vmm.mapper import Mapper
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace

if TYPE_CHECKING:
    import torch

UNBOUNDED = 1 << 62
"""The pool has no budget of its own, because the books enforce it."""


class MappedMemory(Memory):
    """Memory of `geometry.rows` rows.

    `scratch`: keep the last row apart, to copy from units that are in no row.
    `background`: a thread maps what is asked for ahead.
    """

    def __init__(
        self,
        layout: UnitLayout,
        shape: KVShape,
        geometry: RowLayout,
        driver: Driver,
        *,
        scratch: bool,
        background: bool,
    ) -> None:
        super().__init__(layout, driver)
        self._rows, self._ranges = geometry.rows, layout.ranges
        self._scratch = geometry.rows - 1 if scratch else None
        self.driver = CallCounter(driver)
        self.pool = PagePool(self.driver, layout.unit_bytes, UNBOUNDED)
        self.space = AddressSpace(
            self.driver, self.pool, geometry.rows * layout.ranges, geometry.row_bytes, self.time
        )
        self._pages: dict[int, list[int]] = {}
        """The pages of each unit that exists, one per range. One reference to each page is held here."""
        self._shown: dict[int, dict[tuple[int, int], None]] = {}
        """For each unit, the (row, position) pairs where it is mapped."""
        self._units: dict[int, list[int]] = {row: [] for row in range(geometry.rows)}
        """Units of each row, by position."""
        self._mapper = Mapper() if background else None
        self.works_ahead = background
        self._stall = 0.0
        self._geometry, self._shape = geometry, shape
        self._raw: torch.Tensor | None = None
        if self.has_bytes:
            self._views, self._raw = self.make_views(), self._make_raw()

    def make_views(self) -> KVViews:
        geometry, shape = self._geometry, self._shape
        memory = self.space.tensor(geometry.memory_shape, geometry.memory_strides, shape.dtype)
        return kv_views(memory, shape)

    @property
    def _bytes(self) -> torch.Tensor:
        """uint8 `[ranges, rows, pitch]`: all rows."""
        assert not self._closed
        if self._raw is None:
            self._raw = self._make_raw()
        return self._raw

    def _make_raw(self) -> torch.Tensor:
        import torch

        return self.space.tensor((self._ranges, self._rows, self.space.pitch), None, torch.uint8)

    # ------------------------------------------------------------------ operations
    def map(self, operation: Map) -> None:
        if operation.ahead and self._mapper is not None:
            self._mapper.submit(operation.row, partial(self._map, operation))
            return
        started = time.perf_counter()
        try:
            self._map(operation)
        finally:
            self._stall += time.perf_counter() - started

    def _map(self, operation: Map) -> None:
        made: list[int] = []
        try:
            self._cut(operation.row, operation.at)
            made = self._make([unit for unit in operation.units if unit not in self._pages])
            self._show(operation.row, operation.units, Access.READ_WRITE)
        except BaseException:
            with suppress(DriverError):
                self._unmake(made)
            raise

    def grant(self, operation: Grant) -> None:
        self._cut(operation.row, 0)
        self._show(operation.row, operation.units, Access.READ)

    def unmap(self, operation: Unmap) -> None:
        self._cut(operation.row, operation.keep)

    def finish(self, operation: Finish) -> None:
        if self._mapper is not None:
            self._stall += self._mapper.wait([operation.row])

    def discard(self, operation: Discard) -> None:
        units = [unit for unit in operation.units if unit in self._pages]
        if any(self.pool.refs(page) > 1 for unit in units for page in self._pages[unit]):
            self.space.settle()  # cut from its row, but still mapped until the device is done with it
        self._unmake(units)

    def copy(self, operation: Copy) -> None:
        target = self._place(operation.target)
        assert target is not None
        source = self._place(operation.source)
        if source is not None:
            self._copy(source, target, operation.nbytes)
            return
        assert self._scratch is not None
        try:
            self._cut(self._scratch, 0)
            self._show(self._scratch, (operation.source,), Access.READ)
            self._copy((self._scratch, 0), target, operation.nbytes)
        finally:
            self.time.submit(self.event())  # unmapped after the copy
            with suppress(DriverError):  # the copy is done; the row's next use unmaps what is left there
                self._cut(self._scratch, 0)

    def _copy(self, source: tuple[int, int], target: tuple[int, int], nbytes: int) -> None:
        if not self.has_bytes:
            return
        size = self.layout.unit_bytes
        (a, i), (b, j) = source, target
        self._bytes[:, b, j * size : j * size + nbytes] = self._bytes[:, a, i * size : i * size + nbytes]

    def read(self, row: int, units: list[int], tokens: int) -> torch.Tensor:
        return self._bytes[:, row, : tokens * self.layout.token_bytes]

    def write(self, row: int, units: list[int], start: int, data: torch.Tensor) -> int:
        first = start * self.layout.token_bytes
        target = self._bytes[:, row, first : data.shape[1]]
        target.copy_(data[:, first:])
        return target.numel()

    # ------------------------------------------------------------------ rows and units
    def _place(self, unit: int) -> tuple[int, int] | None:
        """A (row, position) where a unit can be read, or None."""
        return next(iter(self._shown.get(unit, ())), None)

    def _show(self, row: int, units: Sequence[int], access: Access) -> None:
        """Map units behind the others of a row. All or nothing."""
        first = len(self._units[row])
        try:
            for index, line in enumerate(self._lines(row)):
                self.space.alias(line, [self._pages[unit][index] for unit in units], access)
        except BaseException:
            with suppress(DriverError):  # what can't be unmapped now goes with the row's next use
                self._truncate(row, first)
            raise
        self._units[row] += units
        for position, unit in enumerate(units, first):
            self._shown.setdefault(unit, {})[row, position] = None

    def _cut(self, row: int, keep: int) -> None:
        """Cut a row to its first `keep` units. The others are unmapped once no epoch can touch them."""
        units = self._units[row]
        for position in range(keep, len(units)):
            places = self._shown[units[position]]
            del places[row, position]
            if not places:
                del self._shown[units[position]]
        del units[keep:]
        self._truncate(row, keep)

    def _truncate(self, row: int, keep: int) -> None:
        """Cut every range of a row, even if unmapping one fails. Raises the first error at the end."""
        failure: DriverError | None = None
        for line in self._lines(row):
            try:
                if self.space.mapped(line) > keep:
                    self.space.truncate(line, keep)
            except DriverError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _make(self, units: list[int]) -> list[int]:
        """Acquire pages for new units. All or nothing."""
        count = self._ranges
        pages = self.pool.acquire(count * len(units)) if units else []
        if pages is None:
            raise OutOfMemory("create", hint="the device has no memory for another page")
        for index, unit in enumerate(units):
            self._pages[unit] = pages[index * count : (index + 1) * count]
        return units

    def _unmake(self, units: Sequence[int]) -> None:
        """Give back the memory of units that are in no row."""
        for unit in units:
            self.pool.release_all(self._pages.pop(unit))
        if units:
            # A page that the driver does not take back now stays free in the pool: the next call uses it or
            # tries again. The units are gone in any case, as the books have it.
            with suppress(DriverError):
                self.pool.trim()

    def _lines(self, row: int) -> range:
        """The rows of the address space that are the ranges of a row."""
        return range(row, self._rows * self._ranges, self._rows)

    # ------------------------------------------------------------------ books
    @property
    def stall_seconds(self) -> float:
        return self._stall

    @property
    def driver_calls(self) -> dict[str, int]:
        return dict(self.driver.counts)

    @property
    def reserved_bytes(self) -> int:
        return self.space.reserved_bytes

    def check(self, rows: dict[int, list[int]], made: int) -> None:
        for row, units in self._units.items():
            if row == self._scratch:
                assert not units, "the scratch row was not given up"
                continue
            assert units == rows.get(row, []), f"row {row} shows other units than the books say"
            for index, line in enumerate(self._lines(row)):
                assert list(self.space.pages(line)) == [self._pages[unit][index] for unit in units]
        assert len(self._pages) == made, "units exist that the books don't know of"
        places = {unit: set(where) for unit, where in self._shown.items()}
        assert places == _places(self._units), "places of units are wrong"
        self.pool.check()
        self.space.check({page: 1 for pages in self._pages.values() for page in pages})

    def close(self) -> None:
        super().close()
        if self._mapper is not None:
            self._mapper.close()
        self._raw = None
        self.space.close()
        for unit in list(self._pages):
            self.pool.release_all(self._pages.pop(unit))
        self.pool.trim()


def _places(rows: dict[int, list[int]]) -> dict[int, set[tuple[int, int]]]:
    found: dict[int, set[tuple[int, int]]] = {}
    for row, units in rows.items():
        for position, unit in enumerate(units):
            found.setdefault(unit, set()).add((row, position))
    return found
