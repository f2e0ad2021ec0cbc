"""A driver that fails at its n-th call, for every n of a scenario: the books balance, others are unharmed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.kv.caches import GRANULARITY, MAX_TOKENS, SHAPE
from tests.vmm.faulty import FaultyDriver
from vattn.config import KVCacheConfig
from vattn.kv.base import Chunk, KVCache
from vattn.kv.factory import create_kv_cache
from vattn.vmm.driver import Driver, DriverError
from vattn.vmm.host import HostDriver

BUDGET = 12 * GRANULARITY


class Step(NamedTuple):
    request_id: str
    tokens: int
    """0: free the request. More than it has: attach or grow it."""


# Admit, grow, park, adopt, take pages back from a parked slot, shrink: every path that calls the driver.
SCENARIO = [
    Step("a", 30),
    Step("b", 20),
    Step("a", 45),
    Step("b", 0),
    Step("c", 25),  # adopts b's slot and grows it
    Step("c", 0),
    Step("a", 80),  # takes pages back from the parked slot
    Step("d", 10),
    Step("a", 0),
    Step("d", 60),
    Step("d", 0),
]


def make_cache(driver: Driver, layout: str, budget: int = BUDGET) -> KVCache:
    return create_kv_cache(
        KVCacheConfig(layout=layout, page_bytes=GRANULARITY, memory_bytes=budget),  # type: ignore[arg-type]
        SHAPE,
        driver,
        max_model_len=MAX_TOKENS,
        model_len=MAX_TOKENS,
        max_num_seqs=3,
    )


def take(kv: KVCache, step: Step) -> bool:
    """One step; False when memory was refused."""
    if not step.tokens:
        kv.free(step.request_id)
        return True
    if step.request_id in kv.live():
        return kv.grow(step.request_id, step.tokens)
    return kv.attach(step.request_id, range(step.tokens)) is not None


def first_token(kv: KVCache, request_id: str) -> tuple:
    inputs = kv.begin_step([Chunk(request_id, 0, 1)])
    return inputs.kv.flatten(2, 3), inputs.slot_mapping


def run(kv: KVCache) -> int:
    """The scenario; what the planted failure stops is tried once more. Returns how often it stopped us."""
    failed = 0
    marks: dict[str, float] = {}
    for step in SCENARIO:
        before = set(kv.live())
        try:
            done = take(kv, step)
        except DriverError:
            done = step.tokens == 0 and step.request_id not in kv.live()  # freed, unmapping comes later
            failed += 1
        else:
            failed += not done
        kv.check()
        if not done:
            assert set(kv.live()) == before, "a failed step changed who lives"
            assert take(kv, step), f"{step} fails although the driver works again"
            kv.check()
        for request_id in kv.live():
            cells, where = first_token(kv, request_id)
            if request_id in marks:
                assert (cells[:, :, where] == marks[request_id]).all(), f"{request_id} lost its KV"
            else:
                marks[request_id] = cells[:, :, where] = float(len(marks) + 1)
    return failed


@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
def test_every_driver_call_may_fail(layout: str) -> None:
    clean = FaultyDriver(HostDriver(granularity=GRANULARITY))
    kv = make_cache(clean, layout)
    assert run(kv) == 0
    kv.close()
    calls = clean.calls
    met = 0
    for n in range(1, calls + 1):
        inner = HostDriver(granularity=GRANULARITY, budget=BUDGET)
        driver = FaultyDriver(inner, fail_at=n)
        try:
            kv = make_cache(driver, layout)
        except DriverError:
            met += 1
        else:
            met += run(kv)
            assert kv.usage().in_use == 0
            driver.heal()
            kv.close()
            assert not inner.shadow.reservations and inner.memory_info() == (BUDGET, BUDGET)
        inner.close()
    assert calls > 20
    # A create that fails is tried again within the call; the others stop their step.
    assert met > calls // 3, "planted failures must be met before close"


def test_a_device_that_is_short_before_the_budget_takes_parked_pages_back() -> None:
    driver = HostDriver(granularity=GRANULARITY, budget=10 * GRANULARITY)
    kv = make_cache(driver, "interleaved", 10 * GRANULARITY)
    assert kv.resize(40 * GRANULARITY)
    assert kv.attach("a", range(60)) is not None
    assert kv.attach("b", range(10)) is not None
    kv.free("a")  # parked with most of the device's memory
    assert kv.grow("b", 80), "the parked pages give way"
    kv.check()
    assert not kv.grow("b", 96 + 1) and kv.usage().in_use <= 10 * GRANULARITY
    kv.close()
    assert driver.memory_info() == (10 * GRANULARITY, 10 * GRANULARITY)
