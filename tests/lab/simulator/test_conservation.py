"""What must hold in any simulation: tokens in = tokens out, the identities of memory, time goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.lab.simulator.runs import BACKENDS, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.simulator.setup import simulate
from vattn.lab.simulator.source import Plan


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_gets_its_tokens_and_memory_comes_back(backend: str, overlap: bool) -> None:
    rng = np.random.default_rng(1)
    plans = [Plan(int(p), int(o)) for p, o in rng.integers(1, 60, (40, 2))]
    kv = KVCacheConfig(memory_bytes=3 * 98_304, **BACKENDS[backend])
    config = tiny_config(kv, SchedulerConfig(5, 32), overlap=overlap)
    found = simulate(config, plans, Arrivals("poisson", rate=2000.0))
    steps, requests = found.outcome.steps, found.outcome.requests

    assert [(r.prompt_len, r.known - r.prompt_len) for r in requests] == [p[:2] for p in plans]
    for step in range(len(steps)):
        steps.usage(step).check()
    assert steps.in_use[-1] > 0 and found.outcome.seconds > 0
    assert max(steps.running) <= 5 and max(steps.tokens) <= 32
    starts, ends = np.array(steps.time_s), np.array(steps.time_s) + np.array(steps.duration_s)
    assert (starts[1:] >= ends[:-1] - 1e-12).all(), "one step at a time"
    # Every token is computed once, but for what preemption throws away; the last one never is.
    wasted = sum(steps.tokens) - sum(p.prompt_len + p.output_len - 1 for p in plans)
    assert wasted >= 0 and (wasted == 0) == (found.counters["preemptions"] == 0)
    for r in requests:
        m = r.metrics
        assert m.first_scheduled_time is not None and m.first_token_time is not None
        assert m.arrival_time <= m.first_scheduled_time < m.first_token_time
        assert m.finished_time is not None and m.first_token_time <= m.finished_time
        assert sum(map(len, r.token_steps())) == r.max_tokens


def test_an_idle_engine_waits_for_the_next_request() -> None:
    kv = KVCacheConfig(memory_bytes=1 << 20, **BACKENDS["paged-16"])
    found = simulate(
        tiny_config(kv, SchedulerConfig(2, 32)),
        [Plan(4, 2, arrival_s=0.0), Plan(4, 2, arrival_s=100.0)],
        Arrivals("trace"),
    )
    last = found.outcome.requests[-1].metrics
    assert last.first_scheduled_time == 100.0
    assert found.outcome.seconds == last.finished_time


def test_hidden_driver_calls_cost_only_what_is_longer_than_the_step() -> None:
    kv = KVCacheConfig(memory_bytes=1 << 20, **BACKENDS["virtual-interleaved"])
    config = tiny_config(kv, SchedulerConfig(4, 64))
    hidden, exposed = (
        simulate(replace(config, hidden_mapping=h), [Plan(40, 40)] * 4, Arrivals("at-once"))
        for h in (True, False)
    )
    assert hidden.counters["driver_calls"] == exposed.counters["driver_calls"]
    less = exposed.counters["map_stall_s"] - hidden.counters["map_stall_s"]
    assert less > 0
    assert exposed.outcome.seconds == pytest.approx(hidden.outcome.seconds + less)
    for stall, duration in zip(
        hidden.outcome.steps.map_stall_s, hidden.outcome.steps.duration_s, strict=True
    ):
        assert 0 <= stall < duration
