"""Driver calls that fail, all over an engine's life: growth, hits, forks, reclaim, resize, sleep, close.

Every k-th call fails, from each of the first k on, so that each call of the life is one that fails, on every
backend. Rarer failures, which let a life get further between them, begin at some of the calls only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.faults.busy import PAGE, Lived, make, requests
from tests.vmm.faulty import CALLS
from vattn.vmm.driver import UNKNOWN, DriverError, OutOfMemory
from vattn.vmm.host import HostDriver

MEMORY = 4 << 20


class Unreliable:
    """A driver of which call `first` fails, and every `every`-th behind it."""

    def __init__(self, first: int, every: int) -> None:
        self.host = HostDriver(granularity=PAGE, budget=MEMORY)
        self.first, self.every = first, every
        self.calls = 0
        self.failures: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.host, name)
        if name not in CALLS:
            return call

        def guarded(*args: Any) -> Any:
            self.calls += 1
            if self.calls >= self.first and (self.calls - self.first) % self.every == 0:
                self.failures[name] += 1
                raise (
                    OutOfMemory(name, hint="planted")
                    if name == "create"
                    else DriverError(name, UNKNOWN, hint="planted")
                )
            return call(*args)

        return guarded


def live(driver: Unreliable, backend: str) -> Lived | None:
    """A whole life with that driver; None: it could not even begin."""
    try:
        llm = make(backend, driver=driver)
    except DriverError:
        return None
    try:
        return Lived(llm, backend, patience=3)
    finally:
        for _ in range(100):
            try:
                llm.close()
                break
            except DriverError:
                pass


@pytest.mark.parametrize(
    ("backend", "every", "stride"),
    [
        ("virtual-interleaved", 13, 1),
        ("virtual-interleaved", 41, 4),
        ("virtual-per_layer", 31, 1),
        ("virtual-overlap", 19, 1),
    ],
)
def test_any_driver_call_may_fail(backend: str, every: int, stride: int) -> None:
    met: Counter[str] = Counter()
    for first in range(1, every + 1, stride):
        driver = Unreliable(first, every)
        lived = live(driver, backend)
        if lived is not None:
            lived.assert_unharmed(may_fail=tuple(requests()))
            assert len(lived.raised) <= driver.failures.total()
        met += driver.failures
        assert not driver.host.shadow.reservations, "addresses stay reserved"
        assert driver.host.memory_info() == (MEMORY, MEMORY), "memory stays behind"
        driver.host.close()
    assert met.keys() >= set(CALLS) - {"free"}, "of these there is one in a life"
