"""Calls are counted, timed and sorted by how long they took."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vmm.faulty import FaultyDriver
from vattn.vmm import counter
from vattn.vmm.driver import CallCounter, OutOfMemory
from vattn.vmm.host import HostDriver

PAGE = 65536


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallCounter]:
    """A counter on whose clock the n-th call takes `DURATIONS[n]` seconds."""
    ticks = iter([t for d in DURATIONS for t in (0.0, d)])
    driver = CallCounter(FaultyDriver(HostDriver(PAGE), fail_at=2, kinds=["create"]))  # type: ignore[arg-type]
    monkeypatch.setattr(counter, "perf_counter", lambda: next(ticks))
    yield driver
    monkeypatch.undo()
    driver.close()


DURATIONS = [700e-9, 1500e-9, 1e-3, 1e4]


def test_each_call_falls_between_two_powers_of_two_nanoseconds(counted: CallCounter) -> None:
    va = counted.reserve(4 * PAGE)
    handle = counted.create(PAGE)
    with pytest.raises(OutOfMemory):
        counted.create(PAGE)
    counted.release(handle)

    def buckets(kind: str) -> dict[int, int]:
        return {b: n for b, n in enumerate(counted.histograms[kind]) if n}

    assert buckets("reserve") == {10: 1}, "512 <= 700 < 1024 = 2^10 ns"
    assert buckets("create") == {11: 1, 20: 1}, "failed calls count"
    assert buckets("release") == {counter.BUCKETS - 1: 1}, "the last one has no end"
    assert buckets("map") == {}
    assert counted.counts["create"] == 2 and counted.seconds["create"] == pytest.approx(1e-3 + 1500e-9)
    counted.reset()
    assert not any(map(any, counted.histograms.values())) and counted.total == 0
    counted.driver.free(va, 4 * PAGE)
