"""The bars are judged by the figures, and by nothing that is not there."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import bars
from benchmarks.gpu.bars import all_bars
from benchmarks.gpu.plans import PLANS
from benchmarks.gpu.problems import sweep
from benchmarks.gpu.summary import render
from vattn.kv.backends.base import DEFAULT_LAYOUT


def kernels(decode_share: float, prefill_ratio: float) -> dict[str, Any]:
    """Both layouts alike; prefill just over the bar at 1K, `prefill_ratio` of SDPA at 8K."""
    problems = []
    for problem in sweep():
        if problem.heads.model != "Llama-3-8B" or problem.name not in (
            bars.DECODE, "prefill Llama-3-8B 1 x 1024", "prefill Llama-3-8B 1 x 8192"
        ):  # fmt: skip
            continue
        ratio = 0.95 if problem.context == 1024 else prefill_ratio
        rate = {
            "share_of_copy": decode_share,
            "gb_per_s": 3700.0,
            "share_of_matmul": 0.5,
            "tflop_per_s": 400.0,
        }
        contestants: dict[str, Any] = {
            f"triton @ virtual {layout}": {**rate, "median_us": 100.0 / ratio} for layout in bars.LAYOUTS
        }
        contestants["sdpa flash @ static per_layer"] = {**rate, "median_us": 100.0}
        contestants["flashinfer @ paged 16"] = {"skipped": "not installed"}
        problems.append(
            {
                "name": problem.name, "kind": problem.kind, "heads": {"model": problem.heads.model},
                "batch": problem.batch, "context": problem.context, "contestants": contestants,
            }
        )  # fmt: skip
    return {"problems": problems, "not_run": [{"name": "decode x", "reason": "does not fit: 1 byte"}]}


def run(backend: str, number: int, work: str, speed: float, stall: float = 0.001) -> dict[str, Any]:
    return {
        "model": "Llama-3-8B", "backend": backend, "round": number, "work": work,
        "output_tokens_per_s": speed, "tpot_ms": {"p50": 1000 / speed, "p99": 2000 / speed},
        "ttft_ms": {"p50": 1.0, "p99": 2.0}, "map_stall_share": stall, "driver_calls": {"map": 3},
        "peak_held_bytes": 1 << 30, "kv_utilization": 0.9, "preemptions": 0, "tokens_equal_share": 0.5,
        "books": "balance",
    }  # fmt: skip


def engine(virtual: tuple[float, float], paged: tuple[float, float], stall: float = 0.001) -> dict[str, Any]:
    """Speeds in two rounds, the same at low load."""
    runs = []
    for number in (0, 1):
        for work in ("saturation", "low load, 8 at once"):
            runs.append(run("virtual interleaved", number, work, virtual[number], stall))
            runs.append(run("paged 16", number, work, paged[number]))
    return {"runs": runs, "workloads": {}, "failed": [], "not_run": []}


def status(results: dict[str, Any]) -> dict[str, str]:
    return {bar.claim: bar.status for bar in all_bars(results)}


def of(statuses: dict[str, str], *words: str) -> set[str]:
    """Statuses of the bars that contain all the words; there must be some."""
    found = {s for claim, s in statuses.items() if all(word in claim for word in words)}
    assert found, words
    return found


def test_nothing_measured_is_nothing_claimed() -> None:
    assert set(status({}).values()) == {"not measured"}
    half = {"kernels": {"problems": [], "not_run": [{"name": bars.DECODE, "reason": "does not fit: 64 GiB"}]}}
    assert set(status(half).values()) == {"not measured"}
    assert any(bar.found == "does not fit: 64 GiB" for bar in all_bars(half))


def test_the_bars_speak_of_what_is_run() -> None:
    assert tuple(plan.model for plan in PLANS) == bars.MODELS
    assert next(sweep()).name == bars.DECODE, "it comes first, whatever the time"
    assert bars.LAYOUTS[0] == DEFAULT_LAYOUT


def test_decode_is_judged_by_its_share_of_copy_bandwidth() -> None:
    assert of(status({"kernels": kernels(0.85, 1.0)}), "decode") == {"met"}
    assert of(status({"kernels": kernels(0.8499, 1.0)}), "decode") == {"not met"}


def test_prefill_is_judged_by_its_worst_length() -> None:
    assert of(status({"kernels": kernels(1.0, 0.9)}), "prefill") == {"met"}
    results = {"kernels": kernels(1.0, 0.89)}
    assert of(status(results), "prefill") == {"not met"}
    assert any("0.89 at 8,192 tokens" in bar.found for bar in all_bars(results))


def test_a_contestant_that_was_wrong_counts_as_not_measured() -> None:
    figures = kernels(0.9, 1.0)
    figures["problems"][0]["contestants"]["triton @ virtual interleaved"] = {
        "failed": "wrong: relative error 1"
    }
    found = {bar.claim: bar for bar in all_bars({"kernels": figures})}
    bar = next(b for claim, b in found.items() if "decode, interleaved" in claim)
    assert (bar.status, bar.found) == ("not measured", "wrong: relative error 1")


def test_engines_are_compared_within_rounds() -> None:
    # The machine was half as fast in round 1; virtual was ahead in both.
    results = {"engine": engine(virtual=(102.0, 51.0), paged=(100.0, 50.0))}
    assert of(status(results), "Llama-3-8B", "throughput") == {"met"}
    assert of(status(results), "Llama-3-8B", "time per token") == {"met"}
    assert of(status(results), "Qwen3-1.7B") == {"not measured"}
    assert of(status({"engine": engine((99.0, 99.0), (100.0, 100.0))}), "Llama-3-8B") == {"not met"}


def test_the_better_paged_block_size_is_the_one_to_beat() -> None:
    figures = engine((101.0, 101.0), (100.0, 100.0))
    figures["runs"].append(run("paged 64", 0, "saturation", 103.0))
    assert of(status({"engine": figures}), "Llama-3-8B", "throughput") == {"not met"}


def test_the_other_layout_is_shown_and_not_judged() -> None:
    figures = engine((101.0, 101.0), (100.0, 100.0))
    figures["runs"].append(run("virtual per_layer", 0, "saturation", 50.0))
    bar = next(b for b in all_bars({"engine": figures}) if "Llama-3-8B: virtual's throughput" in b.claim)
    assert bar.status == "met" and "per_layer 0.500 x paged 16" in bar.found


@pytest.mark.parametrize(("stall", "expected"), [(0.0099, "met"), (0.01, "not met")])
def test_stall_is_judged_by_the_worst_run(stall: float, expected: str) -> None:
    figures = engine((1.0, 1.0), (1.0, 1.0))
    figures["runs"][0]["map_stall_share"] = stall
    assert of(status({"engine": figures}), "map stall") == {expected}


def record(result: Any, **fields: Any) -> dict[str, Any]:
    return {"status": "ok", "dry": False, "seconds": 1.0, "limit_s": 2.0, "result": result, **fields}


def test_the_summary_of_a_gpu_run_has_its_figures_and_its_gaps() -> None:
    names = ["machine", "conformance", "tests", "vmm", "kernels", "engine"]
    machine = {
        "environment": {"date": "2030-01-02", "commit": None, "sources": "f00", "cpu": "c", "cpus": 16},
        "device": {"name": "NVIDIA Test"}, "gpu": {"driver_version": "999.1"}, "versions": {"torch": "2.11"},
        "ceilings": {"copy_bytes_per_s": 4.3e12, "matmul_flop_per_s": 790e12},
    }  # fmt: skip
    text = render(
        {
            "machine": record(machine),
            "conformance": record(
                {
                    "about": {"driver": "cuda", "granularity": 2 << 20},
                    "counts": {"pass": 57, "fail": 1},
                    "rules": [
                        {"outcome": "pass", "statement": "fine", "detail": ""},
                        {"outcome": "fail", "statement": "Parts stay mapped.", "detail": "a | b"},
                    ],
                },
                status="failed",
            ),
            "tests": record({"collected": 3, "passed": 2}, status="timed out"),
            "vmm": record({"page": 1, "calls": [{"call": "map", "median_us": 1.75, "p99_us": None}]}),
            "kernels": record(kernels(0.9, 1.0)),
            "engine": record(engine((102.0, 51.0), (100.0, 50.0)) | {"not_run": [
                {"model": "Qwen3-1.7B", "backend": "static", "reason": "the time was spent"}]}),
        },
        names,
    )  # fmt: skip
    for expected in (
        "NVIDIA Test", "999.1", "2030-01-02", "unknown", "4,300 GB/s", "790 TFLOP/s", "**met**",
        "| conformance | **failed** |", "57 pass, 1 fail", "| Parts stay mapped. | fail | a / b |",
        "incomplete: KeyError", "| map | 1.8 |  |", "3,700 (90%)",
        "400 (50%)", "not run (does not fit): decode x", "flashinfer @ paged 16: not installed",
        "not run: Qwen3-1.7B, static: the time was spent",
    ):  # fmt: skip
        assert expected in text, expected
    assert "dry run" not in text
