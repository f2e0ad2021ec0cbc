"""Simulated memory is the real engine's memory: every field of `MemoryUsage`, in every step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.engines import kv_shape
from tests.sim.runs import BACKENDS, MAX_LEN, run_real, run_simulated, tiny_config
from vattn.config import KVCacheConfig, SchedulerConfig

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48)


def lengths(seed: int, n: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return [(int(p), int(o)) for p, o in zip(rng.integers(1, 60, n), rng.integers(1, 68, n), strict=True)]


@pytest.mark.parametrize("prefixes", [False, True], ids=["alone", "prefixes"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("budget", [2, 30], ids=["tight", "ample"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_holds_what_the_engine_holds(
    backend: str, budget: int, overlap: bool, prefixes: bool
) -> None:
    if backend == "static" and prefixes:
        prefixes = False  # it has no prefix cache: the same run again
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
