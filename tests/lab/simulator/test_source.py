"""Who sends what when: sessions, concurrency, traces, and workloads without token ids."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.simulator.runs import BACKENDS, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.errors import CapacityError, ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import ChatWorkload, ParallelSamplingWorkload
from vattn.lab.bench.trace import TraceWorkload
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.simulator.setup import Simulation, SimulationConfig, simulate
from vattn.lab.simulator.source import Plan, plan


def config() -> SimulationConfig:
    return tiny_config(KVCacheConfig(memory_bytes=4 << 20, **BACKENDS["paged-16"]), SchedulerConfig(8, 64))


def in_flight(simulation: Simulation) -> int:
    """Most requests sent and not answered at any one time."""
    events = []
    for request in simulation.outcome.requests:
        assert request.metrics.finished_time is not None
        events += [(request.metrics.arrival_time, 1), (request.metrics.finished_time, -1)]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def test_a_random_workload_keeps_its_lengths_without_its_tokens() -> None:
    workload = RandomWorkload(50, (4, 60), (2, 30), seed=5)
    generated = workload.generate(100)
    plans = plan(workload, 100)
    assert [(p.prompt_len, p.output_len) for p in plans] == [
        (len(r.prompt_token_ids), r.output_len) for r in generated
    ]
    assert all(p.prompt is None for p in plans)


def test_a_closed_loop_never_has_more_requests_than_allowed() -> None:
    found = simulate(config(), [Plan(20, 10)] * 30, Arrivals("at-once"), max_concurrency=3)
    assert in_flight(found) == 3
    assert len(found.outcome.requests) == 30
    with pytest.raises(ConfigError, match="--max-concurrency must be at least 1, got 0"):
        simulate(config(), [Plan(20, 10)], Arrivals("at-once"), max_concurrency=0)


def test_a_turn_follows_the_answer_before_it_and_contains_it() -> None:
    ten, five = Lengths("fixed", 10, 10), Lengths("fixed", 5, 5)
    workload = ChatWorkload(4, 3, ten, five, prefix_len=6, think_s=0.5, seed=1)
    plans = plan(workload, 160)
    found = simulate(config(), plans, Arrivals("at-once"))
    turns = [[r for r in found.outcome.requests if plans[r.plan].session == f"chat-{i}"] for i in range(4)]
    for turn in turns:
        assert [r.prompt_len for r in turn] == [16, 31, 46]
        for before, after in pairwise(turn):
            assert before.metrics.finished_time is not None
            due = before.metrics.finished_time + plans[after.plan].think_s
            assert after.metrics.arrival_time == pytest.approx(due)


def test_a_trace_brings_its_own_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival": 3.0 + i, "prompt_len": 10 + i, "output_len": 4} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = simulate(config(), plan(TraceWorkload.read(file), 160), Arrivals("trace", time_scale=2.0))
    assert [r.metrics.arrival_time for r in found.outcome.requests] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert [r.prompt_len for r in found.outcome.requests] == [10, 11, 12, 13, 14]


def test_what_is_not_simulated_is_refused_before_anything_runs() -> None:
    several = ParallelSamplingWorkload(2, 3, Lengths("fixed", 4, 4), Lengths("fixed", 4, 4))
    with pytest.raises(ConfigError, match="n=3 outputs: the simulator gives one each"):
        plan(several, 160)
    with pytest.raises(CapacityError, match=r"a request of 160 tokens.* longer than max_model_len=128"):
        simulate(config(), [Plan(100, 60)], Arrivals("at-once"))
