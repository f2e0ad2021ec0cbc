"""A driver that fails at its n-th call while requests share: nobody else is harmed, and a retry works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kv.caches import GRANULARITY, MAX_TOKENS, SHAPE
from tests.kv.test_machine import read_back
from tests.kv.test_sharing_machine import text_kv
from tests.vmm.faulty import FaultyDriver
from vattn.config import KVCacheConfig
from vattn.kv.base import Chunk, KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.memory.swap import SwapSpace
from vattn.vmm.driver import DriverError
from vattn.vmm.host import HostDriver

PAGE_SETS = {"interleaved": 14, "per_layer": 7}
A = [1] * 40
B = A + [2] * 20  # goes on where A ended
D = [1] * 34 + [3] * 20  # shares whole pages and a tail
E = [4] * 70


def make_cache(driver: FaultyDriver, layout: str) -> KVCache:
    ranges = 1 if layout == "interleaved" else 2 * SHAPE.num_layers
    kv = create_kv_cache(
        KVCacheConfig(
            block_size=10,
            layout=layout,
            page_bytes=GRANULARITY,
            memory_bytes=PAGE_SETS[layout] * GRANULARITY * ranges,
        ),  # type: ignore[arg-type]
        SHAPE,
        driver,
        max_model_len=MAX_TOKENS,
        model_len=MAX_TOKENS,
        max_num_seqs=4,
        fingerprint="model",
    )
    kv.swap = SwapSpace(1 << 20, torch.device("cpu"))
    return kv


class Play:
    """One scenario; what the planted failure stops is tried once more."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self.texts: dict[str, list[int]] = {}
        self.failed = 0

    def act(self, act: Callable[[], object], ends: str | None = None) -> None:
        """`ends`: the request that this frees, also if unmapping fails at last."""
        before = set(self.kv.live())
        try:
            done = act()
        except DriverError:
            done = False
            self.failed += 1
        self.look()
        if done is not False and done is not None:
            return
        if ends is not None and ends not in self.kv.live():
            return
        assert set(self.kv.live()) == before, "a failed step changed who lives"
        done = act()
        assert done is not False and done is not None, "fails although the driver works again"
        self.look()

    def look(self) -> None:
        """The books balance, and all that live have what they wrote."""
        self.kv.check()
        for request_id in self.kv.live():
            written = self.kv.written(request_id)
            if written and request_id in self.texts:
                want = text_kv(self.texts[request_id], 0, written)
                assert torch.equal(read_back(self.kv, request_id, written), want), request_id

    def begin(self, request_id: str, text: list[int]) -> None:
        self.texts[request_id] = list(text)
        self.act(lambda: self.kv.attach(request_id, self.texts[request_id], salt=""))
        self.compute(request_id)

    def compute(self, request_id: str) -> None:
        text, start = self.texts[request_id], self.kv.written(request_id)
        inputs = self.kv.begin_step([Chunk(request_id, start, len(text) - start)])
        inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = text_kv(text, start, len(text))
        self.kv.computed(request_id, text, len(text))
        self.look()

    def go_on(self, request_id: str, more: list[int]) -> None:
        text = self.texts[request_id]
        self.act(lambda: self.kv.grow(request_id, len(text) + len(more)))
        text += more
        self.compute(request_id)

    def fork(self, parent: str, child: str, tokens: int) -> None:
        self.texts[child] = self.texts[parent][:tokens]
        self.act(lambda: self.kv.fork(parent, child, tokens))

    def end(self, request_id: str) -> None:
        self.act(lambda: self.kv.free(request_id) or True, ends=request_id)

    def scenario(self) -> None:
        self.begin("a", A)
        self.end("a")
        self.begin("b", B)  # continues the slot of a
        self.begin("d", D)  # a hit: pages by reference and a tail
        self.fork("b", "c", 55)
        self.go_on("c", [5] * 9)
        self.go_on("b", [6] * 9)
        self.act(lambda: self.kv.swap_out("d"), ends="d")
        self.end("b")
        self.begin("e", E)  # takes parked pages back, and cached ones
        self.fork("c", "f", 64)
        self.end("c")
        self.end("e")
        self.act(lambda: self.kv.swap_in("d", self.texts["d"], salt=""))
        self.end("f")
        self.begin("g", [*B, *[6] * 9, 7])
        self.end("d")
        self.act(lambda: self.kv.reset_prefix_cache() or True)
        self.begin("h", [8] * 60)
        self.end("g")
        self.end("h")


@pytest.mark.parametrize("layout", ["interleaved", "per_layer"])
def test_every_driver_call_may_fail_while_requests_share(layout: str) -> None:
    clean = FaultyDriver(HostDriver(granularity=GRANULARITY))
    play = Play(make_cache(clean, layout))
    play.scenario()
    stats = play.kv.stats()
    assert play.failed == 0 and stats.prefix_hit_tokens > 0 and stats.forks == 2
    assert stats.rows_continued > 0 and stats.tails_copied >= 3 and stats.prefix_evictions > 0
    play.kv.close()
    calls, met = clean.calls, 0
    for n in range(1, calls + 1, 1 if layout == "interleaved" else 3):  # rows of a slot are alike
        inner = HostDriver(granularity=GRANULARITY)
        driver = FaultyDriver(inner, fail_at=n)
        try:
            kv = make_cache(driver, layout)
        except DriverError:
            met += 1
            inner.close()
            continue
        play = Play(kv)
        play.scenario()
        met += play.failed
        assert kv.usage().in_use == 0
        driver.heal()
        kv.close()
        assert not inner.shadow.reservations
        inner.close()
    assert calls > 40
    assert met > calls // (3 if layout == "interleaved" else 9), "planted failures must be met before close"
