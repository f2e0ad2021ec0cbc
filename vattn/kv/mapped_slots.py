"""Slots whose pages are mapped as their requests grow, under a budget.

When pages are short they are taken, in this order, from: live slots beyond their need (mapped ahead, or
surplus of an adopted row); parked slots, least recently used first; the prefix cache (`evict`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from vattn.kv.layout import RowLayout
from vattn.kv.slots import Slots
from vattn.vmm.driver import CallCounter, Driver, DriverError, OutOfMemory
from vattn.vmm.mapper import Mapper
from vattn.vmm.pool import PagePool
from vattn.vmm.space import AddressSpace


class MappedSlots:
    """Driver, pages, addresses and slots of one cache.

    Args:
        layout: its rows are the slots; the last ones may be set apart.
        background: a thread maps each request's next page while the device computes.
        evict: drop something cached; False when there is nothing left.
    """

    def __init__(
        self,
        driver: Driver,
        layout: RowLayout,
        *,
        budget_bytes: int,
        background: bool,
        evict: Callable[[], bool],
    ) -> None:
        self.layout = layout
        self.driver = CallCounter(driver)
        self.pool = PagePool(self.driver, layout.page_bytes, budget_bytes)
        self.space = AddressSpace(self.driver, self.pool, layout.rows * layout.ranges, layout.row_bytes)
        self.slots = Slots(self.space, layout.rows, layout.ranges)
        self.demand: dict[int, int] = {}
        """Of each live slot the tokens it must have room for."""
        self.stall_seconds = 0.0
        self._mapper = Mapper() if background else None
        self._evict = evict

    @property
    def total_pages(self) -> int:
        """Pages under the budget."""
        return self.pool.budget_bytes // self.layout.page_bytes

    def map(self, slot: int, tokens: int) -> bool:
        """Map what `tokens` tokens of `slot` need and do not have. All or nothing."""
        if self.layout.pages(tokens) <= self.slots.mapped(slot):
            return True
        started = time.perf_counter()
        try:
            self.settle(slot)
            missing = self.layout.pages(tokens) - self.slots.mapped(slot)
            if missing <= 0:
                return True
            self.reclaim(missing * self.layout.ranges, keep=slot)
            if self._extend(slot, missing):
                return True
            self.reclaim(missing * self.layout.ranges, keep=slot, device_short=True)
            return self._extend(slot, missing)
        finally:
            self.stall_seconds += time.perf_counter() - started

    def reclaim(self, pages: int, keep: int | None = None, *, device_short: bool = False) -> None:
        """Unmap what nobody needs until `pages` pages can be acquired, or nothing is left to take.

        Slot `keep` is the one that needs them: what it has mapped already stays. `device_short`: the
        device has run out before the budget did, so only pages that exist count.
        """
        free = self.pool.free_bytes // self.layout.page_bytes

        def short() -> int:
            if not device_short:
                return pages - self.pool.available_pages
            return pages - (self.pool.free_bytes // self.layout.page_bytes - free)

        if short() > 0 and self._mapper is not None:
            self._mapper.drain()  # or it would map again what is taken here
        for slot, tokens in self.demand.items():
            if short() <= 0:
                return
            if slot != keep:
                self.slots.truncate(slot, self.layout.pages(tokens))
        while short() > 0 and self.slots.reclaim(short()):
            pass
        while short() > 0 and self._evict():
            pass
        if short() > 0:
            # Pages given up may still be read by the step in flight, or their unmapping have failed once.
            self.space.settle()

    def map_ahead(self) -> None:
        """Have the thread map one page more wherever the next token starts a new one."""
        if self._mapper is None:
            return
        for slot, tokens in self.demand.items():
            want = self.layout.pages(min(tokens + 1, self.layout.max_tokens))
            missing = want - self.slots.mapped(slot)
            if missing > 0:
                self._mapper.submit(slot, partial(self._extend_if_possible, slot, missing))

    def settle(self, slot: int) -> None:
        """Wait for the thread to be done with a slot."""
        if self._mapper is not None:
            self._mapper.wait([slot])

    def resize(self, budget_bytes: int) -> bool:
        """Change the budget; False, and the old one stays, when what is needed does not fit."""
        page = self.layout.page_bytes
        if budget_bytes < self.pool.budget_bytes:
            # As if the pages above the new budget were asked for.
            self.reclaim((self.pool.budget_bytes - budget_bytes // page * page) // page)
            self.space.settle()
        if self.pool.in_use_bytes > budget_bytes // page * page:
            return False
        self.pool.resize(budget_bytes)
        return True

    def _extend(self, slot: int, n_pages: int) -> bool:
        """False when pages are short, whether by the budget or on the machine: the remedy is the same."""
        try:
            return self.slots.extend(slot, n_pages)
        except OutOfMemory:
            return False

    def _extend_if_possible(self, slot: int, n_pages: int) -> None:
        with suppress(
            DriverError, MemoryError
        ):  # nobody needs these pages yet; who does will ask, and meet the error
            self.slots.extend(slot, n_pages)

    def check(self) -> None:
        """Wait for the thread; raise AssertionError unless every live slot has what it needs."""
        if self._mapper is not None:
            self._mapper.drain()
        for slot, tokens in self.demand.items():
            assert self.slots.mapped(slot) >= self.layout.pages(tokens), (
                f"slot {slot}: {tokens} tokens unmapped"
            )
        self.pool.check()

    def close(self) -> None:
        """Give everything back."""
        if self._mapper is not None:
            self._mapper.close()
        self.demand.clear()
        self.space.close()
        self.pool.trim()
