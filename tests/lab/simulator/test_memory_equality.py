"""Simulated memory is the real engine's memory: every field of `MemoryUsage`, in every step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.engines import kv_shape, random_prompts
from tests.lab.simulator.runs import BACKENDS, MAX_LEN, run_real, run_simulated, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.simulator.setup import simulate
from vattn.lab.simulator.source import Plan

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48)

KINDS = [(b, p) for b in BACKENDS for p in (False, True) if not (p and b == "static")]
"""Every backend, without and (where there is one) with a prefix cache."""


def lengths(seed: int, n: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(p), int(o)) for p, o in zip(rng.integers(1, 60, n), rng.integers(1, 68, n), strict=True)]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("budget", [2, 30], ids=["tight", "ample"])
@pytest.mark.parametrize(("backend", "prefixes"), KINDS)
def test_every_step_holds_what_the_engine_holds(
    backend: str, budget: int, overlap: bool, prefixes: bool
) -> None:
    memory = budget * MAX_LEN * kv_shape("llama").token_bytes + 6 * 4096
    kv = KVCacheConfig(memory_bytes=memory, prefix_caching=prefixes, **BACKENDS[backend])
    requests = lengths(seed=3, n=20)
    truth, totals = run_real(kv, LIMITS, requests, overlap=overlap)
    simulated = run_simulated(tiny_config(kv, LIMITS, overlap=overlap), requests)
    steps = simulated.outcome.steps

    assert steps.tokens == truth.tokens
    assert steps.running == truth.running
    for step, usage in enumerate(truth.usage):
        assert steps.usage(step) == usage, f"step {step}"
    assert simulated.counters["preemptions"] == totals.preemptions
    assert simulated.counters["rows_adopted"] == totals.kv_stats.rows_adopted
    made = {k: n for k, n in totals.kv_stats.driver_calls.items() if k != "reserve"}
    assert {k: n for k, n in simulated.counters["driver_calls"].items() if k != "reserve"} == made
    if budget == 2 and backend != "static":
        assert totals.preemptions > 0, "a tight budget is meant to force some"


@pytest.mark.parametrize("budget", [2, 30], ids=["tight", "ample"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "static"])
def test_shared_prefixes_are_found_as_the_engine_finds_them(backend: str, budget: int) -> None:
    memory = budget * MAX_LEN * kv_shape("llama").token_bytes + 6 * 4096
    kv = KVCacheConfig(memory_bytes=memory, prefix_caching=True, **BACKENDS[backend])
    common = random_prompts(1, [40, 25], 160)
    prompts = [common[i % 2] + own for i, own in enumerate(random_prompts(2, [7, 12, 3, 30, 9, 21] * 3, 160))]
    outputs = [o for _, o in lengths(4, len(prompts))]
    shape = [(len(p), min(o, 50)) for p, o in zip(prompts, outputs, strict=True)]
    truth, totals = run_real(kv, LIMITS, shape, overlap=False, prompts=prompts)
    plans = [Plan(n, o, prompt) for (n, o), prompt in zip(shape, prompts, strict=True)]
    simulated = simulate(tiny_config(kv, LIMITS), plans, Arrivals("at-once"))

    assert totals.kv_stats.prefix_hit_tokens > 0
    assert simulated.counters["prefix_hit_tokens"] == totals.kv_stats.prefix_hit_tokens
    steps = simulated.outcome.steps
    assert steps.tokens == truth.tokens
    assert [steps.usage(i) for i in range(len(steps))] == truth.usage
