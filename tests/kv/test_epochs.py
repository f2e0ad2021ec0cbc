"""Copies take time on a device: nothing is unmapped before the copies that may touch it are over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kv.caches import MAX_ROWS, MAX_TOKENS, SHAPE, make_cache
from tests.kv.test_sharing import compute
from tests.vmm.events import FakeEvent
from vattn.kv.cache import KVCache
from vattn.kv.memory.swap import SwapSpace
from vattn.vmm.host import HostDriver

TEXT = [1] * 53


def swap_out(kv: KVCache) -> None:
    assert kv.swap_out("a")


def swap_in(kv: KVCache) -> None:
    assert kv.swap_out("a")
    assert kv.swap_in("a", TEXT, salt="") == len(TEXT) - 1


def fork(kv: KVCache) -> None:
    assert kv.fork("a", "child", 33)
    kv.free("child")


def hit(kv: KVCache) -> None:
    """The page of the tail is mapped nowhere else by then."""
    kv.free("a")
    for n in range(MAX_ROWS):  # one of them takes its row
        assert kv.attach(f"other{n}", [7 + n]) is not None
    kv.free("other0")
    assert kv.attach("b", [*TEXT, 2], salt="") == 48


@pytest.mark.parametrize("copies", [swap_out, swap_in, fork, hit])
@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer"])
def test_copies_are_over_before_anything_they_touch_is_unmapped(
    backend: str, copies: Callable[[KVCache], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    kv.swap = SwapSpace(1 << 20, torch.device("cpu"))
    assert kv.attach("a", TEXT, salt="") == 0
    compute(kv, "a", TEXT, 0)
    log: list[str] = []
    unmap = HostDriver.unmap

    def event() -> FakeEvent:
        log.append("copied")
        return FakeEvent(lambda: log.append("over"))

    def logged(self: HostDriver, va: int, size: int) -> None:
        log.append("unmapped")
        unmap(self, va, size)

    monkeypatch.setattr(kv.memory, "event", event)
    monkeypatch.setattr(HostDriver, "unmap", logged)
    copies(kv)
    for request_id in list(kv.live()):
        kv.free(request_id)
    kv.reset_prefix_cache()
    assert kv.resize(0)
    assert "copied" in log and "unmapped" in log
    for at, what in enumerate(log):
        if what == "unmapped":
            assert log[:at].count("over") == log[:at].count("copied"), log
    kv.check()
    kv.close()


def test_a_resize_that_moves_waits_for_nobody_and_leaves_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy may still run when the old memory is given up; the allocator of torch orders that."""
    kv = make_cache("paged-16", 4 * MAX_TOKENS)
    events: list[FakeEvent] = []
    monkeypatch.setattr(kv.memory, "event", lambda: events.append(FakeEvent()) or events[-1])
    assert kv.attach("a", TEXT) == 0
    assert kv.resize(3 * MAX_TOKENS * SHAPE.token_bytes)
    assert len(events) == 1 and not events[0].waited
    kv.close()
