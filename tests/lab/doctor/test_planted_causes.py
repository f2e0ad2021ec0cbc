"""The doctor names the cause that was planted, with figures, and knows when memory is innocent."""

from __future__ import annotations

import re

import pytest

from tests.lab.doctor.cases import lengths, measured, requests, simulated
from vattn.lab.bench.synthetic import ChatWorkload, SharedPrefixWorkload
from vattn.lab.doctor.case import Case, Length
from vattn.lab.doctor.diagnose import Diagnosis, diagnose
from vattn.lab.doctor.finding import Finding


def named(diagnosis: Diagnosis, rule: str) -> Finding:
    """The finding of a rule, which must be among the problems where there are any."""
    found = {finding.rule: finding for finding in diagnosis.findings}
    assert rule in found, (rule, [f.rule for f in diagnosis.findings], diagnosis.sentence)
    finding = found[rule]
    assert finding.evidence and all(re.search(r"\d", text) for text in finding.evidence[:1])
    return finding


def innocent(diagnosis: Diagnosis) -> None:
    assert diagnosis.verdict == "not-memory", diagnosis.sentence
    assert diagnosis.sentence.startswith("KV memory is not your problem")
    assert not {f.rule for f in diagnosis.findings} & {"cache-full", "preemption"}


# ---------------------------------------------------------------- memory is the problem


def test_cache_full() -> None:
    """A budget of 2 GiB for requests that want ten times as much."""
    diagnosis = simulated(requests(300, "256:1024", "64:256"), 100, kv_gib=2)
    assert diagnosis.verdict == "memory"
    finding = named(diagnosis, "cache-full")
    assert finding.kind == "problem" and finding.numbers["memory_wait_share"] > 0.5
    assert any("int8" in advice for advice in finding.advice)
    assert any("8 for 32" in advice for advice in finding.advice)


def test_cache_full_of_a_model_without_grouped_queries() -> None:
    diagnosis = simulated(requests(200, "256:512", "64"), model="smollm2-1.7b", kv_gib=2)
    assert any("all its 32 heads" in advice for advice in named(diagnosis, "cache-full").advice)


def test_preemption_in_a_simulation() -> None:
    """Short prompts are let in, and then all of them grow."""
    diagnosis = simulated(requests(200, "32", "uniform:512:1024"), kv_gib=2)
    assert diagnosis.verdict == "memory"
    assert named(diagnosis, "preemption").numbers["preemptions_per_request"] > 0.2


def test_preemption_in_a_real_engine() -> None:
    finding = named(measured(requests(16, "8", "96"), kv_kib=256, kv_backend="paged"), "preemption")
    assert any("computed again" in text for text in finding.evidence)
    assert any("preemption='auto'" in text for text in finding.advice)


def test_swapping_is_not_advised_to_who_swaps() -> None:
    options = {"kv_backend": "paged", "preemption": "swap", "swap_space_bytes": 1 << 22}
    finding = named(measured(requests(16, "8", "96"), kv_kib=256, **options), "preemption")
    assert any("swapped" in text for text in finding.evidence)
    assert not any("preemption='auto'" in text for text in finding.advice)


def test_static_reservation() -> None:
    """Rows of 2,048 tokens for requests of 100."""
    workload = requests(100, "bimodal:64:1984:0.02", "16:64")
    diagnosis = simulated(workload, 200, backend="static", kv_gib=4)
    assert named(diagnosis, "static-reservation").numbers["share"] > 0.5
    assert any("paged" in text for text in named(diagnosis, "static-reservation").advice)
    assert "first stop wasting" in named(diagnosis, "cache-full").advice[0]


def test_pages_too_large_in_a_simulation() -> None:
    """2 MiB pages in each of 64 ranges hold 1,024 tokens: short requests fill a tenth of them."""
    workload = requests(300, "32:128", "32:128")
    diagnosis = simulated(workload, 200, backend="virtual", layout="per_layer", kv_gib=4)
    finding = named(diagnosis, "unit-size")
    assert finding.numbers["measured"] == pytest.approx(finding.numbers["now"], rel=0.15)
    assert finding.numbers["best_tokens"] == 16 and "interleaved" in finding.advice[0]


def test_pages_too_large_in_a_real_engine() -> None:
    options = {"kv_backend": "virtual", "kv_layout": "per_layer", "page_bytes": 64 << 10}
    finding = named(measured(requests(24, "16:64", "32"), kv_kib=1024, **options), "unit-size")
    assert finding.kind == "problem" and finding.numbers["measured"] > 0.7


def test_blocks_too_large() -> None:
    """Blocks of 256 tokens for requests of about 100; 16 would waste under a tenth."""
    finding = named(simulated(requests(200, "32:128", "16:64"), 100, block_size=256), "unit-size")
    assert finding.advice[0].startswith("block_size=8") or finding.advice[0].startswith("block_size=16")


def test_blocks_too_small() -> None:
    finding = named(simulated(requests(40, "2048", "512"), 20, block_size=8), "unit-small")
    assert finding.advice == ("block_size=128",) or finding.numbers["best_tokens"] >= 64


# ---------------------------------------------------------------- memory is not the problem


def test_seats() -> None:
    diagnosis = simulated(requests(200, "64:128", "64:128"), 200, seqs=8)
    innocent(diagnosis)
    assert named(diagnosis, "seats").kind == "problem"


def test_compute() -> None:
    """More prompt tokens a second than the device can compute."""
    diagnosis = simulated(requests(300, "2000", "4:8"), 100, gpu="a100-80")
    innocent(diagnosis)
    assert named(diagnosis, "compute").numbers["share"] > 0.5


def test_kv_bandwidth() -> None:
    """Every request has a long context, and each token reads all of it."""
    diagnosis = simulated(requests(60, "6000", "uniform:256:1024"), 4, model="llama-3.1-8b", tokens=8192)
    innocent(diagnosis)
    finding = named(diagnosis, "kv-bandwidth")
    assert finding.numbers["share"] > 0.4
    assert any("GB/s" in text for text in finding.evidence)


def test_long_prefill() -> None:
    """Long prompts at a low rate: no queue, and the first token still takes long."""
    diagnosis = simulated(requests(40, "4000:7900", "8:16"), 1, model="llama-3-8b")
    innocent(diagnosis)
    finding = named(diagnosis, "long-prefill")
    assert any("chunks" in text for text in finding.advice)


def test_prefill_in_the_way() -> None:
    """Chunks of 8,192 tokens between the tokens of those who decode."""
    workload = requests(200, "bimodal:64:8000:0.2", "128")
    finding = named(simulated(workload, 8, tokens=8192, model="llama-3.1-8b"), "prefill-in-the-way")
    assert finding.numbers["ratio"] > 4


def test_fixed_cost() -> None:
    """Few requests: each step reads the weights for a handful of tokens."""
    diagnosis = simulated(requests(60, "32:64", "64"), 4)
    innocent(diagnosis)
    named(diagnosis, "fixed-cost")


def test_idle_cache() -> None:
    diagnosis = simulated(requests(20, "32:64", "32"), 4)
    innocent(diagnosis)
    assert named(diagnosis, "cache-idle").numbers["peak_share"] < 0.1


def test_mapping_holds_up_steps() -> None:
    """Driver calls in the step, a page in each of 64 ranges."""
    workload = requests(300, "32:128", "8")
    options = {"backend": "virtual", "layout": "per_layer", "hidden_mapping": False}
    finding = named(simulated(workload, 300, kv_gib=8, **options), "map-stall")
    assert "background_mapping=True" in finding.advice[0]


def test_static_batches() -> None:
    diagnosis = measured(
        requests(12, "8", "bimodal:4:48:0.2"), kv_kib=1024, seqs=4, barrier=True, kv_backend="paged"
    )
    named(diagnosis, "static-batching")


# ---------------------------------------------------------------- prompts that begin alike


def shared(n: int) -> SharedPrefixWorkload:
    return SharedPrefixWorkload(n, 2, 96, lengths("4:8"), lengths("4:8"))


def test_prefix_caching_is_off() -> None:
    off = measured(shared(16), kv_kib=2048, seqs=4, kv_backend="paged", enable_prefix_caching=False)
    assert any("is off" in text for text in named(off, "prefix-missed").advice)
    on = measured(shared(16), kv_kib=2048, seqs=4, kv_backend="paged")
    assert "prefix-missed" not in {f.rule for f in on.findings}


def test_static_rows_share_nothing() -> None:
    workload = ChatWorkload(20, 4, lengths("64"), lengths("32"), prefix_len=256)
    finding = named(simulated(workload, 10, backend="static"), "prefix-missed")
    assert "paged" in finding.advice[0]


def test_pages_hold_more_than_the_prefix() -> None:
    case = Case(
        "planted",
        "virtual",
        lengths=[Length(100, 8, 16)],
        shareable=1400,
        prefix_unshared=1400,
        unit_tokens=512,
    )
    finding = named(diagnose(case), "prefix-missed")
    assert any("size of a page" in text for text in finding.evidence)
    assert "smaller pages" in finding.advice[0]
