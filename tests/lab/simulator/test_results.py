"""The record is a bench JSON, with the numbers that vattn bench would compute from every token."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.lab.simulator.runs import BACKENDS, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.serving import serving_metrics, weighted_percentile
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.timeline import Timeline
from vattn.lab.simulator.results import metrics, report
from vattn.lab.simulator.setup import Simulation, simulate
from vattn.lab.simulator.source import Plan


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    rng = np.random.default_rng(2)
    plans = [Plan(int(p), int(o)) for p, o in rng.integers(1, 60, (30, 2))]
    kv = KVCacheConfig(memory_bytes=2 * 98_304 + 4096, **BACKENDS["paged-7"])
    found = simulate(tiny_config(kv, SchedulerConfig(6, 48)), plans, Arrivals("poisson", rate=3000.0))
    assert found.counters["preemptions"] > 0, "gaps that preemption tears are part of the test"
    return found


def timelines(simulation: Simulation) -> list[Timeline]:
    steps = simulation.outcome.steps
    ends = [a + b for a, b in zip(steps.time_s, steps.duration_s, strict=True)]
    return [
        Timeline(
            str(r.plan),
            r.metrics.arrival_time,
            r.prompt_len,
            [[ends[step] for span in r.token_steps() for step in span]],
            finished_s=r.metrics.finished_time,
        )
        for r in simulation.outcome.requests
    ]


def test_metrics_are_those_of_vattn_bench(simulation: Simulation) -> None:
    slo = Slo(ttft=6.0, tpot=1.2)
    expected = serving_metrics(timelines(simulation), simulation.outcome.seconds, slo)
    found = metrics(simulation, slo)
    assert found == {key: pytest.approx(value) for key, value in expected.items()}
    assert 0 < expected["request_goodput"] < expected["request_throughput"]  # type: ignore[operator]


def test_the_record_has_every_request_and_step(simulation: Simulation) -> None:
    record = report({"paged": simulation}, {"name": "random"}, {"kind": "poisson"}, None, ["so so"])
    json.dumps(record, allow_nan=False)
    assert (record["format"], record["kind"]) == ("vattn-bench-1", "simulate")
    [run] = record["runs"]
    [repeat] = run["repeats"]
    steps, requests = repeat["steps"], repeat["requests"]
    assert {len(column) for column in steps.values()} == {len(simulation.outcome.steps)}
    for request, timeline in zip(requests, timelines(simulation), strict=True):
        assert request["output_len"] == timeline.output_len
        assert request["itl_s"] == pytest.approx(timeline.itl)
        assert request["first_token_s"] == pytest.approx(timeline.first_token_s)
    assert run["summary"]["output_throughput"]["median"] == repeat["metrics"]["output_throughput"]


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_a_weighted_percentile_is_that_of_repeated_values(percent: float) -> None:
    rng = np.random.default_rng(3)
    values, weights = rng.random(50), rng.integers(1, 9, 50)
    expected = np.percentile(np.repeat(values, weights), percent)
    assert weighted_percentile(values, weights, percent) == pytest.approx(expected)
