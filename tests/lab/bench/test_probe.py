"""What the probe writes down is what the engine did."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from tests.inputs import written
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.engines import VattnSystem, vattn_systems
from vattn.lab.bench.load import drive
from vattn.lab.bench.probe import Probe
from vattn.lab.bench.tiny import load_tiny
from vattn.lab.bench.workload import RandomWorkload, WorkloadRequest
from vattn.models.loader import LoadedModel
from vattn.sampling.detokenize import IncrementalDetokenizer

LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_tiny("cpu")


def requests(seed: int = 0, n: int = 6) -> list[WorkloadRequest]:
    return RandomWorkload(n, (4, 60), (2, 9), seed).generate(200)


def test_every_token_of_every_request_has_its_time(loaded: LoadedModel) -> None:
    [system] = vattn_systems(loaded, ["paged"], LIMITS)
    with system.open() as target:
        timelines = drive(requests(), Arrivals("at-once"), target)
        log = target.inside().steps
    assert log is not None
    assert [t.output_len for t in timelines] == [r.output_len for r in requests()]
    for t in timelines:
        assert t.first_scheduled_s is not None and t.finished_s == t.token_times[0][-1]
        assert 0 <= t.first_scheduled_s < t.token_times[0][0]
        assert all(before < after for before, after in pairwise(t.token_times[0]))
    ends = [
        begin + took for begin, took in zip(log.columns["time_s"], log.columns["duration_s"], strict=True)
    ]
    times = sorted({time_ for t in timelines for time_ in t.token_times[0]})
    assert all(any(abs(time_ - end) < 0.05 for end in ends) for time_ in times)


@pytest.mark.parametrize("backend", ["static", "paged", "virtual"])
def test_steps_add_up_and_their_memory_balances(loaded: LoadedModel, backend: str) -> None:
    [system] = vattn_systems(loaded, [backend], LIMITS)
    work = requests()
    with system.open() as target:
        drive(work, Arrivals("at-once"), target)
        inside = target.inside()
    log = inside.steps
    assert log is not None
    c = log.columns
    assert {len(column) for column in c.values()} == {len(log)}
    prompts, outputs = sum(len(r.prompt_token_ids) for r in work), sum(r.output_len for r in work)
    assert sum(c["tokens"]) == prompts + outputs - len(work), "the last token of each is never computed"
    assert sum(c["decodes"]) == outputs - len(work)
    assert inside.counters["computed_tokens"] == sum(c["tokens"])
    assert inside.counters["recomputed_tokens"] == 0
    assert max(c["tokens"]) <= 32 and max(c["running"]) <= 8
    for i in range(len(log)):
        assert c["physical"][i] == c["in_use"][i] + c["parked"][i] + c["cached"][i] + c["free"][i]
        mapped = c["in_use"][i] + c["shared_saved"][i]
        assert mapped == c["logical"][i] + c["tail_waste"][i] + c["external_waste"][i]
        assert 0 < c["attention_s"][i] < c["duration_s"][i]
    metrics = log.metrics()
    assert metrics["peak_in_use_bytes"] == max(c["in_use"])
    assert metrics["kv_utilization"] == pytest.approx(
        sum(c["logical"]) / (sum(c["in_use"]) + sum(c["shared_saved"]))
    )
    assert 0 < metrics["attention_share"] < 1  # type: ignore[operator]


def test_preempted_tokens_are_counted_when_they_are_computed_again(loaded: LoadedModel) -> None:
    tight = {**LIMITS, "kv_cache_memory_bytes": 160 * 512}
    system = VattnSystem("tight", loaded, {"kv_backend": "paged", "block_size": 8, **tight})
    work = [WorkloadRequest([i + 1] * 30, 40) for i in range(4)]
    with system.open() as target:
        timelines = drive(work, Arrivals("at-once"), target)
        inside = target.inside()
    log = inside.steps
    assert log is not None
    assert inside.counters["preemptions"] == sum(log.columns["preemptions"]) > 0
    assert inside.counters["preemptions"] == sum(t.preemptions for t in timelines)
    needed = sum(len(r.prompt_token_ids) + r.output_len - 1 for r in work)
    assert inside.counters["computed_tokens"] == needed + inside.counters["recomputed_tokens"]


def test_driver_calls_are_counted_timed_and_sorted_by_duration(loaded: LoadedModel) -> None:
    [system] = vattn_systems(loaded, ["virtual"], LIMITS)
    with system.open() as target:
        drive(requests(), Arrivals("at-once"), target)
        counters = target.inside().counters
    assert counters["driver_calls"]["map"] > 0 and counters["driver_seconds"]["map"] > 0
    assert counters["map_stall_s"] > 0
    for kind, calls in counters["driver_calls"].items():
        assert sum(counters["driver_latency_log2_ns"][kind].values()) == calls


def test_the_probe_changes_no_token(loaded: LoadedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [r.prompt_token_ids for r in requests()]

    def tokens(probed: bool) -> list[list[int]]:
        with LLM(loaded, kv_backend="virtual", **LIMITS) as llm:  # type: ignore[arg-type]
            if probed:
                Probe(llm, time.perf_counter())
            return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    assert tokens(True) == tokens(False)


def test_what_came_before_the_run_does_not_show(loaded: LoadedModel) -> None:
    [system] = vattn_systems(loaded, ["virtual"], LIMITS)
    with system.open() as target:
        target.llm.generate([[1] * 50] * 4, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)  # type: ignore[attr-defined]
        drive([WorkloadRequest([5] * 10, 3)], Arrivals("at-once"), target)
        inside = target.inside()
    assert inside.counters["computed_tokens"] == 12
    assert inside.counters["driver_calls"]["reserve"] == 0


@pytest.mark.parametrize("beams", [False, True])
def test_several_outputs_of_a_prompt_are_timed_one_by_one(loaded: LoadedModel, beams: bool) -> None:
    [system] = vattn_systems(loaded, ["paged"], LIMITS)
    work = [WorkloadRequest([7] * 20, 6, n=3, beams=beams), WorkloadRequest([9] * 10, 4)]
    with system.open() as target:
        several, single = drive(work, Arrivals("at-once"), target)
        inside = target.inside()
    assert [len(times) for times in several.token_times] == [6, 6, 6]
    assert [len(times) for times in single.token_times] == [4]
    assert several.output_len == 18 and several.success
    starts = {times[0] for times in several.token_times}
    if beams:
        assert several.itl == [0.0] * 15 and several.ttft == several.e2el, "told when the search is over"
    else:
        assert len(starts) > 1, "the others begin once the first has computed the prompt"
    assert inside.counters["forks"] > 0


def test_sweeps_name_what_they_vary(loaded: LoadedModel) -> None:
    def names(**sweeps: object) -> list[str]:
        return [s.name for s in vattn_systems(loaded, ["static", "paged", "virtual"], LIMITS, **sweeps)]  # type: ignore[arg-type]

    assert names() == ["static", "paged", "virtual"]
    assert names(block_sizes=[8, 16]) == ["static", "paged-8", "paged-16", "virtual"]
    assert names(page_bytes=[4096, 1 << 20]) == ["static", "paged", "virtual-4KiB", "virtual-1MiB"]
    assert names(layouts=["interleaved", "per_layer"]) == [
        "static-interleaved", "static-per_layer", "paged", "virtual-interleaved", "virtual-per_layer",
    ]  # fmt: skip
    assert names(kv_dtypes=["auto", "int8"])[2:4] == ["paged-auto", "paged-int8"]
    with pytest.raises(ConfigError, match="each once"):
        vattn_systems(loaded, ["paged", "paged"], LIMITS)
    with pytest.raises(ConfigError, match="magic"):
        vattn_systems(loaded, ["magic"], LIMITS)


def test_small_pages_can_be_swept_on_a_cpu(loaded: LoadedModel) -> None:
    [small] = vattn_systems(loaded, ["virtual"], LIMITS, page_bytes=[4096], layouts=["interleaved"])
    with small.open() as target:
        assert target.kv["page_bytes"] == 4096
        assert drive(requests(n=2), Arrivals("at-once"), target)[0].success


def test_a_measured_run_is_what_users_get_each_token_through_the_loop_with_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Served requests are streams: text is made of every token, and each has a time of its own."""
    decoded: list[int] = []
    append = IncrementalDetokenizer.append

    def counted(self: IncrementalDetokenizer, token_id: int, **options: Any) -> str | None:
        if self.decodes:
            decoded.append(token_id)
        return append(self, token_id, **options)

    monkeypatch.setattr(IncrementalDetokenizer, "append", counted)
    system = VattnSystem("written", written.loaded(), {"kv_backend": "virtual", **LIMITS})
    work = [WorkloadRequest([i + 3] * 12, 9) for i in range(4)]
    with system.open() as target:
        timelines = drive(work, Arrivals("at-once"), target)
    assert sorted(decoded) == sorted(token for t in timelines for token in t.token_ids)
    for timeline in timelines:
        [times] = timeline.token_times
        assert len(times) == len(timeline.token_ids) == 9 and times == sorted(times)
        assert len(set(times)) > 4, "tokens come one by one, not all at the end"
