"""Advancing equal decode steps at once changes nothing: memory, times, tokens, driver calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lab.simulator.runs import BACKENDS, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.simulator.setup import Simulation, simulate
from vattn.lab.simulator.source import Plan

plans = st.lists(
    st.builds(
        Plan,
        prompt_len=st.integers(1, 60),
        output_len=st.integers(1, 60),
        prompt=st.none(),
        session=st.none(),
        think_s=st.just(0.0),
        arrival_s=st.floats(0, 0.2, allow_nan=False),
    ),
    min_size=1,
    max_size=14,
)


def everything(simulation: Simulation) -> dict[str, Any]:
    """All that a simulation says, but how many steps it skipped."""
    counters = {k: v for k, v in simulation.counters.items() if k != "skipped_steps"}
    requests = [(r.metrics, r.error, r.token_steps()) for r in simulation.outcome.requests]
    return {"steps": simulation.outcome.steps.to_dict(), "requests": requests, **counters}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=plans,
    seqs=st.integers(1, 6),
    budget=st.integers(1, 12),
    overlap=st.booleans(),
    hidden=st.booleans(),
    concurrency=st.one_of(st.none(), st.integers(1, 4)),
)
def test_skipping_equals_stepping(
    backend: str,
    requests: list[Plan],
    seqs: int,
    budget: int,
    overlap: bool,
    hidden: bool,
    concurrency: int | None,
) -> None:
    kv = KVCacheConfig(memory_bytes=budget * 98_304 + 6 * 4096, **BACKENDS[backend])
    config = replace(tiny_config(kv, SchedulerConfig(seqs, 32), overlap=overlap), hidden_mapping=hidden)
    stepped, skipped = (
        simulate(config, requests, Arrivals("trace"), max_concurrency=concurrency, skip=skip)
        for skip in (False, True)
    )
    assert stepped.outcome.skipped_steps == 0
    assert everything(skipped) == everything(stepped)


def test_long_answers_are_mostly_skipped() -> None:
    kv = KVCacheConfig(memory_bytes=8 << 20, **BACKENDS["paged-16"])
    found = simulate(tiny_config(kv, SchedulerConfig(4, 32)), [Plan(8, 100)] * 4, Arrivals("at-once"))
    assert found.outcome.skipped_steps > 90
