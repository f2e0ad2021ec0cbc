"""Time in attention: layers of a step add up, on the clock or from events that are read at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vattn.attention.base import AttentionBackend, StepAttention
from vattn.lab.bench import kernel_time
from vattn.lab.bench.engines import VattnSystem, VattnTarget, _staircase
from vattn.lab.bench.kernel_time import AttentionTimer
from vattn.lab.bench.probe import Probe
from vattn.lab.bench.tiny import load_tiny


class Clock:
    """A clock that attention moves on; also pretends to be `torch.cuda.Event`s' device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = 0


class Attention(AttentionBackend):
    """Takes layer + 1 seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def check(self, kv: Any, device: torch.device) -> None: ...

    def plan(self, inputs: Any) -> StepAttention:
        return self  # type: ignore[return-value]

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float) -> str:
        self.clock.now += layer + 1
        return f"layer {layer}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def synchronize(self) -> None:
            clock.waited += 1

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(kernel_time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_of_a_step_add_up(clock: Clock, device: str) -> None:
    timed, attention = AttentionTimer(torch.device(device)), Attention(clock)
    for step in (0, 2):  # step 1 ran from a captured graph
        timed.step = step
        planned = timed.timed(attention.plan(None))
        for layer in range(3):
            assert planned.attend(layer, None, None, None, 1.0) == f"layer {layer}"  # type: ignore[arg-type, comparison-overlap]
    assert clock.waited == 0, "nothing waits for the device during a run"
    reported: list[tuple[int, float]] = []
    timed.report(lambda *row: reported.append(row))
    assert reported == [(0, 6.0), (2, 6.0)]
    timed.report(lambda *row: reported.append(row))
    assert len(reported) == 2, "handed over once"


def test_the_staircase_meets_every_batch_size() -> None:
    """On CUDA it makes every graph be captured before the run."""
    options = {"max_num_seqs": 5, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20}
    with VattnSystem("paged", load_tiny("cpu"), {"kv_backend": "paged", **options}).open() as target:
        assert isinstance(target, VattnTarget)
        probe = Probe(target.llm, 0.0)
        _staircase(target.llm)
        assert set(probe.log.columns["decodes"]) >= {1, 2, 3, 4, 5}
