"""Stores a layer's tokens in order: a `Tape` grows without end, a `Ring` keeps a window.

    Tape   range  | t0 t1 t2 t3 t4 … t8 |  .   .   .  |        addresses for every token there may be
                    ▓▓▓▓ ▓▓▓▓ ▓▓▓▓ ▓▓▓▓                        pages mapped as tokens need them

    Ring   range  | t8 t9 t2 t3 t4 t5 t6 t7 | t8 t9 t2 t3 … |  the same pages mapped twice, back to back:
                    ▓0▓▓ ▓1▓▓ ▓2▓▓ ▓3▓▓     ▓0▓▓ ▓1▓▓ …        the last tokens are one piece wherever
                           └──── t2 … t9 ────────┘             they end

Every view holds a lease. Pages are unmapped only when no lease is held, so a view never points to unmapped
memory.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial

import torch

from vattn.hf.layout import Part, Plan
from vattn.hf.source import Source
from vattn.vmm.driver import DEINITIALIZED, Access, Driver, DriverError, OutOfMemory
from vattn.vmm.owner import OwnerProcess
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace


class _Memory:
    """The memory that the tape and all its views keep alive. It is freed with the last of them."""

    def __init__(self, source: Source, rows: int, row_bytes: int) -> None:
        self.driver, self.pool = source
        self.space = AddressSpace(self.driver, self.pool, rows, row_bytes)
        clean_up = partial(_give_back, self.driver, self.pool, self.space)
        self._finalizer = weakref.finalize(self, self.driver.defer, clean_up)
        self._finalizer.atexit = False  # threads may still compute; the process gives everything back anyway


class _Lease:
    """The owner of a tensor's memory. It lives as long as any view of that tensor."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: _Memory) -> None:
        self.memory = memory


class Tape:
    """Addresses for `tokens` tokens. `fit` maps memory for the first ones.

    A position identifies a token. `keys(start, end)` and `values(start, end)` are views
    `[batch, heads, end - start, dim]` of positions that `fit` covers. Not thread-safe.
    """

    def __init__(self, source: Source, plan: Plan, tokens: int) -> None:
        self.plan = plan
        self.tokens = tokens
        self.owner = OwnerProcess("VirtualCache")
        page = source.pool.page_bytes
        self._most_pages = [-(-tokens * size // page) for size in plan.ranges]
        try:
            self._memory = _Memory(source, len(plan.ranges), self._row_pages() * page)
        except DriverError as error:
            error.add_note("VirtualCache(max_len=…) sets how many addresses are reserved")
            raise
        self._leases: list[weakref.ref[_Lease]] = []
        self._key_base: torch.Tensor | None = None
        self._value_base: torch.Tensor | None = None
        pitch = self._memory.space.pitch
        self._key_stride, self._value_stride = plan.key.stride(pitch), plan.value.stride(pitch)
        self._ready = 0  # positions below are mapped and covered by the bases

    def fit(self, end: int) -> None:
        """Map memory for all positions below `end`, or raise `OutOfMemory` and map nothing."""
        if end <= self._ready:
            return
        self._extend([self._pages(size, end) for size in self.plan.ranges])
        self._lend()
        self._ready = self._capacity()

    def keys(self, start: int, end: int) -> torch.Tensor:
        """K of positions `start` to `end`."""
        part = self.plan.key
        assert self._key_base is not None, "no memory fitted"
        return self._key_base.as_strided(
            part.shape(end - start), self._key_stride, self._first(part, start) // part.dtype.itemsize
        )

    def values(self, start: int, end: int) -> torch.Tensor:
        """V of positions `start` to `end`."""
        part = self.plan.value
        assert self._value_base is not None, "no memory fitted"
        return self._value_base.as_strided(
            part.shape(end - start), self._value_stride, self._first(part, start) // part.dtype.itemsize
        )

    def cut(self, end: int) -> bool:
        """Give back the pages that only positions from `end` on need.

        While a view is held, returns False and gives nothing back.
        """
        wanted = [self._pages(size, end) for size in self.plan.ranges]
        space = self._memory.space
        if all(space.mapped(row) <= pages for row, pages in enumerate(wanted)):
            return True
        if not self._alone():
            return False
        self._memory.driver.synchronize()
        try:
            for row, pages in enumerate(wanted):
                if space.mapped(row) > pages:
                    space.truncate(row, pages)
        finally:
            self._memory.pool.trim()
        return True

    @property
    def page_bytes(self) -> int:
        """Bytes by which the layer grows: a driver page in each range."""
        return self._memory.space.page_bytes * len(self.plan.ranges)

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of mapped memory. A page that is mapped twice counts once."""
        space = self._memory.space
        pages = (min(space.mapped(row), most) for row, most in enumerate(self._most_pages))
        return sum(pages) * space.page_bytes

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of reserved addresses."""
        return self._memory.space.reserved_bytes

    def check(self) -> None:
        """Raise AssertionError unless tables, pool and driver agree."""
        self._memory.pool.check()
        self._memory.space.check()

    # What a ring does differently

    def _row_pages(self) -> int:
        return max(self._most_pages)

    def _pages(self, token_bytes: int, end: int) -> int:
        return -(-end * token_bytes // self._memory.space.page_bytes)

    def _capacity(self) -> int:
        """Positions that fit the mapped pages."""
        space = self._memory.space
        sizes = enumerate(self.plan.ranges)
        return min(self.tokens, *(space.mapped(row) * space.page_bytes // size for row, size in sizes))

    def _first(self, part: Part, position: int) -> int:
        """Bytes from the base of `part` to a position."""
        return position * part.token_bytes

    # Inside

    def _extend(self, wanted: list[int]) -> None:
        memory = self._memory
        missing = [max(0, pages - memory.space.mapped(row)) for row, pages in enumerate(wanted)]
        if not any(missing):
            return
        try:
            grown = memory.space.extend_all(range(len(missing)), missing)
        except DriverError as error:
            memory.pool.trim()
            error.add_note("VirtualCache(page_bytes=…) sets the page, VirtualCache(layout=…) how many ranges")
            raise
        if not grown:
            memory.pool.trim()
            free, total = memory.driver.memory_info()
            asked = sum(missing) * memory.pool.page_bytes
            hint = f"a layer of the cache needs {asked:,} bytes more; {free:,} of {total:,} are free"
            raise OutOfMemory("VirtualCache.update", hint=hint)

    def _lend(self) -> None:
        """Make the flat tensors behind all views. Each covers a part from its start to its last page."""
        lease = _Lease(self._memory)
        self._leases = [old for old in self._leases if old() is not None]
        self._leases.append(weakref.ref(lease))
        self._key_base, self._value_base = (
            self._flat(part, lease) for part in (self.plan.key, self.plan.value)
        )

    def _alone(self) -> bool:
        """Drop those tensors. Returns True if no view of them, or of earlier ones, is held."""
        self._key_base = self._value_base = None
        self._ready = 0
        self._leases = [lease for lease in self._leases if lease() is not None]
        return not self._leases

    def _flat(self, part: Part, lease: _Lease) -> torch.Tensor:
        space = self._memory.space
        last = part.range + (part.batch - 1) * part.batch_step[0] + (part.heads - 1) * part.head_step[0]
        first_byte = part.range * space.pitch + part.offset
        end_byte = last * space.pitch + space.mapped(last) * space.page_bytes
        elements = (end_byte - first_byte) // part.dtype.itemsize
        return space.tensor((elements,), (1,), part.dtype, first_byte, owner=lease)


class Ring(Tape):
    """Room for the last `tokens` tokens, rounded up to whole pages.

    Any positions `start` to `end`, at most `tokens` of them, are contiguous. A position overwrites the one
    `tokens` before it. Until the ring is full, only pages that hold tokens are mapped.
    """

    def __init__(self, source: Source, plan: Plan, tokens: int) -> None:
        super().__init__(source, plan, tokens)
        page = source.pool.page_bytes
        rings = [pages * page for pages in self._most_pages]
        self._key_ring, self._value_ring = rings[plan.key.range], rings[plan.value.range]
        self.tokens = min(ring // size for ring, size in zip(rings, plan.ranges, strict=True))

    def fit(self, end: int) -> None:
        """Map memory for positions below `end`, or the whole ring if that is beyond it."""
        if end <= self._ready:
            return
        if end <= self.tokens:
            super().fit(end)
            return
        space = self._memory.space
        self._extend(self._most_pages)
        for row, pages in enumerate(self._most_pages):
            if space.mapped(row) == pages:
                space.alias(row, space.pages(row), Access.READ_WRITE)
        self._lend()
        self._ready = sys.maxsize

    def cut(self, end: int) -> bool:
        """Like `Tape.cut`, but a ring that has wrapped around gives back everything or nothing."""
        turned = any(self._memory.space.mapped(row) > pages for row, pages in enumerate(self._most_pages))
        return True if turned and end else super().cut(end)

    def _row_pages(self) -> int:
        return 2 * max(self._most_pages)

    def _first(self, part: Part, position: int) -> int:
        ring = self._key_ring if part is self.plan.key else self._value_ring
        return position * part.token_bytes % ring


def _give_back(driver: Driver, pool: PagePool, space: AddressSpace) -> None:
    try:
        driver.synchronize()
        space.close()
        pool.trim()
    except DriverError as error:
        if error.code != DEINITIALIZED:  # the driver was closed first: nothing is left to give back
            raise
