"""Snapshots of a real, tiny engine at moments at which every figure is known."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engines import BACKENDS, kv_shape, make_llm, random_prompts, stepped
from tests.models.tiny import VOCAB
from vattn import LLM, SamplingParams
from vattn.engine.length_histogram import LengthHistogram, bucket, bucket_end
from vattn.engine.watch import PERIOD_S, WINDOW_S, Watch

FIELDS = {
    "format", "time_s", "pid", "model", "limits", "kv", "memory", "swap", "metrics", "rates", "requests",
    "lengths", "page_map",
}  # fmt: skip


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)


def submit(llm: LLM, prompts: list[list[int]], outputs: int) -> list[str]:
    return [stepped(llm).add_request(f"r{i}", p, greedy(outputs)) for i, p in enumerate(prompts)]


def run(llm: LLM) -> None:
    while llm.engine.has_work:
        stepped(llm).step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_idle_engine_holds_nothing(backend: str) -> None:
    with make_llm("llama", backend, max_model_len=128) as llm:
        shot = llm.snapshot()
    assert json.loads(json.dumps(shot)) == shot
    assert shot.keys() == FIELDS
    assert (shot["format"], shot["pid"]) == ("vattn-snapshot-1", os.getpid())
    assert shot["kv"]["backend"] == backend.split("-")[0]
    limits = shot["limits"]
    assert (64 << 20) - 128 * kv_shape("llama").token_bytes < limits.pop("kv_memory_bytes") <= 64 << 20
    assert limits == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 128,
        "swap_space_bytes": 0,
        "preemption": "recompute",
        "prefix_caching": not backend.startswith("static"),
        "background_mapping": backend == "virtual-overlap",
    }
    assert shot["model"]["token_bytes"] == kv_shape("llama").token_bytes
    assert shot["memory"]["in_use"] == shot["memory"]["logical"] == 0
    assert shot["requests"] == [] and shot["swap"] is None
    assert shot["rates"]["prefix_hit_rate"] is None and shot["rates"]["tokens_per_s"] == 0


@pytest.mark.parametrize("backend", [b for b in BACKENDS if "overlap" not in b])
def test_requests_that_run_and_wait(backend: str) -> None:
    prompts = random_prompts(1, [20, 30, 10], VOCAB)
    with make_llm("llama", backend, max_model_len=128, max_num_seqs=2) as llm:
        submit(llm, prompts, 8)
        for _ in range(3):
            stepped(llm).step()
        shot = llm.snapshot()
        page_map = llm.engine.kv.page_map()
        page_map.check()
        run(llm)
    token_bytes = kv_shape("llama").token_bytes
    first, second, third = shot["requests"]
    # Step 1 computes prompts and gives a token, steps 2 and 3 one more each; the last is not computed yet.
    for request, prompt in zip((first, second), prompts, strict=False):
        assert request["status"] == "running" and request["preemptions"] == 0
        assert (request["prompt_tokens"], request["output_tokens"]) == (len(prompt), 3)
        assert request["computed_tokens"] == len(prompt) + 2
        assert request["kv_bytes"] >= request["computed_tokens"] * token_bytes
        assert request["kv_bytes"] % page_map.unit_bytes == 0 and request["kv_shared_bytes"] == 0
    assert (third["id"], third["status"], third["kv_bytes"]) == ("r2", "waiting", 0)
    assert first["age_s"] > second["age_s"] > third["age_s"] > 0
    assert shot["memory"]["logical"] == (22 + 32) * token_bytes
    assert shot["memory"] == page_map.usage.to_dict()
    assert shot["metrics"]["steps"] == 3 and shot["metrics"]["output_tokens"] == 6
    assert shot["page_map"]["bytes"]["private"] == first["kv_bytes"] + second["kv_bytes"]


def test_forks_are_shared_and_named() -> None:
    with make_llm("llama", "paged-16", max_model_len=128) as llm:
        params = SamplingParams(n=3, max_tokens=6, temperature=1.0, ignore_eos=True)
        stepped(llm).add_request("a", random_prompts(2, [40], VOCAB)[0], params)
        stepped(llm).step()
        shot = llm.snapshot()
        run(llm)
    assert [r["id"] for r in shot["requests"]] == ["a", "a#1", "a#2"]
    assert {r["kv_shared_bytes"] for r in shot["requests"]} == {2 * 16 * kv_shape("llama").token_bytes}
    assert len(shot["page_map"]["units"]["shared"]) == 2


def test_lengths_of_what_came_to_its_end() -> None:
    with make_llm("llama", "virtual-interleaved", max_model_len=128) as llm:
        submit(llm, random_prompts(3, [20, 21, 9], VOCAB), 5)
        stepped(llm).step()
        llm.abort("r2")
        run(llm)
        shot = llm.snapshot()
    assert shot["lengths"] == {
        "prompt": [{"low": 20, "high": 21, "count": 2, "tokens": 41}],
        "output": [{"low": 5, "high": 5, "count": 2, "tokens": 10}],
        "total": [
            {"low": 24, "high": 25, "count": 1, "tokens": 25},
            {"low": 26, "high": 27, "count": 1, "tokens": 26},
        ],
    }
    assert shot["metrics"]["finished_requests"] == 3


def test_swapped_requests_are_marked() -> None:
    with make_llm(
        "llama", "paged-16", max_model_len=128, preemption="swap", swap_space_bytes=1 << 20,
        kv_cache_memory_bytes=8 * 16 * kv_shape("llama").token_bytes,
    ) as llm:  # fmt: skip
        submit(llm, random_prompts(4, [40, 40, 40], VOCAB), 28)
        shots = []
        while llm.engine.has_work:
            stepped(llm).step()
            shots.append(llm.snapshot())
    marked = [shot for shot in shots if any(r["swapped"] for r in shot["requests"])]
    assert marked
    for shot in marked:
        out = [r for r in shot["requests"] if r["swapped"]]
        assert all(r["status"] == "waiting" and r["preemptions"] and not r["kv_bytes"] for r in out)
        assert shot["swap"]["used_bytes"] > 0
    assert shots[-1]["swap"] == {"used_bytes": 0, "budget_bytes": 1 << 20}


# ---------------------------------------------------------------------- rates
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_of_the_last_seconds() -> None:
    with make_llm("llama", "virtual-interleaved", max_model_len=128) as llm:
        engine, clock = llm.engine, Clock()
        watch = engine.watch = Watch(engine.metrics, engine.scheduler, engine.kv, clock)

        def step(seconds: float, tokens: int) -> None:
            watch.step_begins()
            engine.metrics.steps += 1
            engine.metrics.computed_tokens += tokens
            clock.now += seconds
            watch.step_ended(failed=False)

        for _ in range(400):  # 100 s of 40 tokens a second
            step(PERIOD_S, 10)
        assert watch.rates()["tokens_per_s"] == pytest.approx(40)
        assert watch.rates()["steps_per_s"] == pytest.approx(4)
        assert watch.rates()["busy_share"] == pytest.approx(1)
        assert WINDOW_S <= watch.rates()["window_s"] <= WINDOW_S + PERIOD_S
        for _ in range(40):
            step(PERIOD_S, 20)
        assert watch.rates()["tokens_per_s"] == pytest.approx(80)
        clock.now += 5
        assert watch.rates()["tokens_per_s"] == pytest.approx(40, rel=0.05)
        assert watch.rates()["busy_share"] == pytest.approx(0.5, rel=0.05)
        clock.now += 1000
        assert watch.rates()["tokens_per_s"] == 0
        step(PERIOD_S, 123)
        assert watch.rates()["tokens_per_s"] == pytest.approx(123 / WINDOW_S, rel=0.05)


def test_hits_and_stalls_of_a_run() -> None:
    with make_llm("llama", "virtual-interleaved", max_model_len=128) as llm:
        [prompt] = random_prompts(5, [64], VOCAB)
        for i in range(2):
            stepped(llm).add_request(f"r{i}", prompt, greedy(2))
            run(llm)
        rates = llm.snapshot()["rates"]
    assert rates["prefix_hit_rate"] == pytest.approx(63 / 128)
    assert 0 < rates["map_stall_share"] < 1
    assert rates["finished_requests_per_s"] == pytest.approx(2 / rates["window_s"])


# ---------------------------------------------------------------------- lengths
@given(st.integers(0, 1 << 20))
def test_buckets_are_exact_below_16_and_an_eighth_wide_above(length: int) -> None:
    low = bucket(length)
    assert low <= length < bucket_end(low) == bucket(bucket_end(low))
    assert bucket_end(low) - low <= max(1, low / 8)


def test_there_are_few_buckets() -> None:
    assert len({bucket(n) for n in range(1 << 17)}) < 130


@given(st.lists(st.integers(0, 5000)))
def test_a_histogram_loses_no_request(lengths: list[int]) -> None:
    histogram = LengthHistogram()
    for length in lengths:
        histogram.add(length)
    rows = histogram.to_list()
    assert sum(row["count"] for row in rows) == len(lengths)
    assert sum(row["tokens"] for row in rows) == sum(lengths)
    assert all(row["low"] * row["count"] <= row["tokens"] <= row["high"] * row["count"] for row in rows)
