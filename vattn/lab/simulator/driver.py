"""An accounting driver that knows what its calls would cost on a device."""

from __future__ import annotations

from vattn.lab.simulator.cost import CallSeconds
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import Access
from vattn.vmm.shadow import Allocation


class PricedDriver(AccountingDriver):
    """`AccountingDriver` whose calls add up `counts` and, by `prices`, `due` seconds."""

    def __init__(self, granularity: int, budget: int, prices: CallSeconds) -> None:
        super().__init__(granularity, budget)
        self.prices = prices
        self.due = 0.0
        """Seconds of calls since `collect`."""

    def collect(self) -> float:
        """Seconds of the calls since the last `collect`."""
        due, self.due = self.due, 0.0
        return due

    def _do_create(self, allocation: Allocation, shareable: bool) -> None:
        self.due += self.prices.create

    def _do_discard(self, allocation: Allocation) -> None:
        self.due += self.prices.release

    def _do_map(self, va: int, allocation: Allocation) -> None:
        self.due += self.prices.map

    def _do_set_access(self, va: int, size: int, access: Access) -> None:
        self.due += self.prices.set_access

    def _do_unmap(self, va: int, size: int) -> None:
        self.due += self.prices.unmap
