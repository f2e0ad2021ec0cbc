"""Memory that is not there when it is needed: what is said, and that it works again later."""

from __future__ import annotations

import pytest

from tests.engine.engines import kv_shape, make_llm, random_prompts, stepped
from tests.faults.busy import NAME, PAGE, greedy
from tests.faults.flaky import planted
from tests.vmm.faulty import FaultyDriver
from vattn import LLM
from vattn.errors import CapacityError, ConfigError
from vattn.kv.backends.static import RowTensorMemory
from vattn.kv.memory.tensor import TensorMemory
from vattn.outputs import RequestOutput
from vattn.vmm.driver import DriverError
from vattn.vmm.host import HostDriver

MEMORY = 64 * PAGE


def finish(llm: LLM) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while llm.engine.has_work:
        outputs += stepped(llm).step()
        llm.check()
    return outputs


def test_pages_that_cannot_be_unmapped_are_told_of_and_used_all_the_same() -> None:
    """They are mapped where they are needed; where they were they stay in sight, and hurt nobody."""
    driver = FaultyDriver(HostDriver(granularity=PAGE), kinds=["unmap"], lasting=True)
    with make_llm(
        NAME,
        "virtual-interleaved",
        driver=driver,
        kv_cache_memory_bytes=80 * kv_shape(NAME).token_bytes,
        max_model_len=76,
        enable_prefix_caching=False,
    ) as llm:
        stepped(llm).add_request("first", random_prompts(3, [60], 100)[0], greedy(5))
        finish(llm)  # its slot stays parked, with nearly all of the memory
        stepped(llm).add_request("a", [1, 2, 3], greedy(40))
        stepped(llm).add_request("b", [4, 5, 6], greedy(40))
        driver.arm(1)
        outputs: list[RequestOutput] = []
        while llm.engine.has_work:
            outputs += stepped(llm).step()
            llm.check()
        assert [output.error for output in outputs if output.finished] == [None, None]
        driver.heal()


@pytest.mark.parametrize(
    ("backend", "memory"), [("paged-16", TensorMemory), ("static-interleaved", RowTensorMemory)]
)
def test_without_memory_it_sleeps_on(backend: str, memory: type, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(NAME, backend, max_model_len=76, kv_cache_memory_bytes=MEMORY) as llm:
        stepped(llm).add_request("r", [1, 2, 3], greedy(20))
        stepped(llm).step()
        llm.sleep()
        allocate = memory.allocate  # type: ignore[attr-defined]
        monkeypatch.setattr(memory, "allocate", lambda *_: (_ for _ in ()).throw(planted()))
        with pytest.raises(CapacityError, match=r"planted.*free memory on the device"):
            llm.wake_up()
        llm.check()
        assert llm.engine.asleep and llm.memory_usage().physical == 0 and stepped(llm).step() == []
        monkeypatch.setattr(memory, "allocate", allocate)
        llm.wake_up()
        [output] = finish(llm)
        assert len(output.outputs[0].token_ids) == 20


def test_a_device_that_others_filled_meanwhile_keeps_it_asleep() -> None:
    driver = HostDriver(granularity=PAGE, budget=MEMORY)
    with make_llm(
        NAME, "virtual-interleaved", driver=driver, max_model_len=40, kv_cache_memory_bytes=MEMORY
    ) as llm:
        stepped(llm).add_request("r", [1, 2, 3], greedy(20))
        stepped(llm).step()
        llm.sleep()
        other = driver.create(MEMORY // 2)
        with pytest.raises(ConfigError, match=r"wake_up: .* are free"):
            llm.wake_up()
        assert llm.engine.asleep
        llm.resize_kv_cache(MEMORY // 2)
        llm.wake_up()
        driver.release(other)
        [output] = finish(llm)
        assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-overlap"])
def test_closing_can_be_tried_again(backend: str) -> None:
    closes = 1
    while True:
        host = HostDriver(granularity=PAGE, budget=MEMORY)
        driver = FaultyDriver(host)
        llm = make_llm(NAME, backend, driver=driver, max_model_len=40, kv_cache_memory_bytes=MEMORY)
        stepped(llm).add_request("r", list(range(3, 23)), greedy(9))
        stepped(llm).step()
        driver.arm(closes)
        try:
            llm.close()
        except DriverError:
            llm.check()
            llm.close()
        assert host.memory_info() == (MEMORY, MEMORY) and not host.shadow.reservations
        host.close()
        if not driver.failures:
            break
        closes += 1
    assert closes > 5


def test_an_engine_that_cannot_be_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostDriver(granularity=PAGE, budget=MEMORY)
    monkeypatch.setattr(
        "vattn.engine.engine.Engine.__init__", lambda *_, **__: (_ for _ in ()).throw(planted())
    )
    with pytest.raises(RuntimeError, match="planted"):
        make_llm(NAME, "virtual-overlap", driver=host, max_model_len=40, kv_cache_memory_bytes=MEMORY)
    assert not host.shadow.reservations
