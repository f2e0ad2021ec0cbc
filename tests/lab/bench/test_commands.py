"""`vattn bench COMMAND --smoke`: runs in seconds, and what it writes has the promised form."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.errors import ConfigError

LATENCY_KEYS = {
    f"{key}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for key in ("mean", "median", "std", "p50", "p90", "p95", "p99")
}
METRICS = LATENCY_KEYS | {
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "peak_in_use_bytes", "peak_kv_bytes", "kv_utilization",
    "peak_running", "steps", "attention_share",
}  # fmt: skip
COUNTERS = {
    "preemptions", "computed_tokens", "recomputed_tokens", "rows_adopted", "map_stall_s", "driver_calls",
    "driver_seconds", "driver_latency_log2_ns",
}  # fmt: skip
REQUEST = {
    "id", "arrival_s", "first_scheduled_s", "first_token_s", "finished_s", "itl_s", "prompt_len",
    "output_len", "cached_tokens", "preemptions", "finish_reason",
}  # fmt: skip
STEPS = {
    "time_s", "duration_s", "tokens", "decodes", "running", "waiting", "in_use", "parked", "cached", "free",
    "physical", "logical", "shared_saved", "tail_waste", "external_waste", "preemptions", "map_stall_s",
}  # fmt: skip


def bench(tmp_path: Path, *args: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run a command in smoke mode; its JSON and what it showed."""
    file = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", *args, "--smoke", "--json", str(file)])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(file.read_text(), parse_constant=pytest.fail), result.output


def check_report(report: dict[str, Any], kind: str, names: list[str]) -> None:
    assert report["format"] == "vattn-bench-1" and report["kind"] == kind
    assert {"date", "commit", "command", "cpu", "torch", "python"} <= set(report["environment"])
    assert {
        "name", "token_bytes", "num_layers", "num_heads", "num_kv_heads", "head_dim", "dtype", "weight_bytes",
        "max_model_len",
    } <= set(report["model"])  # fmt: skip
    limits = {"max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_memory_bytes"}
    assert set(report["limits"]) == limits
    assert report["workload"]["name"] and report["arrivals"]["kind"] and report["conclusions"]
    assert [run["name"] for run in report["runs"]] == names
    for run in report["runs"]:
        assert run["kv"] and run["options"] and len(run["repeats"]) == 2
        for repeat in run["repeats"]:
            check_repeat(repeat)
        for interval in run["summary"].values():
            assert {"median", "low", "high", "n"} <= set(interval)
            assert interval["low"] <= interval["median"] <= interval["high"] and interval["n"] == 2


def check_repeat(repeat: dict[str, Any]) -> None:
    metrics = repeat["metrics"]
    assert set(metrics) >= METRICS and set(repeat["counters"]) >= COUNTERS
    requests, steps = repeat["requests"], repeat["steps"]
    assert len(requests) == metrics["completed"] and metrics["failed"] == 0
    assert all(set(r) >= REQUEST for r in requests)
    assert {len(column) for column in steps.values()} == {metrics["steps"]} and set(steps) >= STEPS
    assert sum(r["output_len"] for r in requests) == metrics["total_output_tokens"]
    assert repeat["duration_s"] == pytest.approx(max(r["finished_s"] for r in requests), abs=1e-5)
    throughput = metrics["total_output_tokens"] / repeat["duration_s"]
    assert metrics["output_throughput"] == pytest.approx(throughput, rel=1e-3)
    gaps = [gap for r in requests for gap in r["itl_s"]]
    assert metrics["mean_itl_ms"] == pytest.approx(sum(gaps) / len(gaps) * 1e3, abs=1e-2)


def test_throughput(tmp_path: Path) -> None:
    report, shown = bench(tmp_path, "throughput")
    check_report(report, "throughput", ["static", "paged", "virtual"])
    assert report["arrivals"]["kind"] == "at-once" and report["goodput_slo"] is None
    assert "random: requests 6, prompt_len loguniform 4:24, output_len uniform 2:8" in shown.replace(
        "\n", " "
    )
    assert "output tokens / s" in shown and "cannot tell the runs apart" in shown
    assert report["conclusions"][0] == "All runs produced the same tokens."
    static, paged, _ = (run["repeats"][0]["metrics"] for run in report["runs"])
    assert static["kv_utilization"] < paged["kv_utilization"], "reserved space is waste"


def test_latency(tmp_path: Path) -> None:
    sizes = ["--batch-size", "3", "--input-len", "10", "--output-len", "4"]
    report, _ = bench(tmp_path, "latency", "--backends", "paged", *sizes)
    assert report["conclusions"] == [], "one system has nobody to be compared with"
    report["conclusions"] = ["-"]
    check_report(report, "latency", ["paged"])
    for repeat in report["runs"][0]["repeats"]:
        assert [(r["prompt_len"], r["output_len"]) for r in repeat["requests"]] == [(10, 4)] * 3


def test_serve_with_goodput_as_vllm_writes_it(tmp_path: Path) -> None:
    load = ["--request-rate", "100", "--backends", "paged,virtual", "--max-concurrency", "2"]
    report, shown = bench(tmp_path, "serve", *load, "--goodput", "ttft:1e6", "tpot:1e6")
    check_report(report, "serve", ["paged", "virtual"])
    assert report["goodput_slo"] == {"ttft": 1e6, "tpot": 1e6} and "goodput" in shown
    assert report["arrivals"]["rate"] == 100 and report["arrivals"]["max_concurrency"] == 2
    for run in report["runs"]:
        for repeat in run["repeats"]:
            assert repeat["metrics"]["request_goodput"] == repeat["metrics"]["request_throughput"]
            assert max(repeat["steps"]["running"]) <= 2
    arrivals = [r["arrival_s"] for r in report["runs"][0]["repeats"][0]["requests"]]
    assert arrivals == sorted(arrivals) and arrivals[-1] > 0


def test_memory_of_conversations(tmp_path: Path) -> None:
    chat = ["--workload", "chat", "--requests", "2", "--turns", "3", "--think", "0.001"]
    report, shown = bench(tmp_path, "memory", "--backends", "static,paged", *chat)
    check_report(report, "memory", ["static", "paged"])
    assert "KV utilization" in shown
    requests = report["runs"][0]["repeats"][0]["requests"]
    for session in (0, 1):
        turns = requests[session::2]
        for before, after in pairwise(turns):
            assert after["arrival_s"] >= before["finished_s"]
            assert after["prompt_len"] > before["prompt_len"] + before["output_len"]


def test_traces_replay_at_their_own_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival": i * 0.02, "prompt_len": 5 + i, "output_len": 3} for i in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    report, _ = bench(
        tmp_path, "serve", "--backends", "paged,static", "--trace", str(file), "--time-scale", "2"
    )
    check_report(report, "serve", ["paged", "static"])
    assert report["workload"]["format"] == "own" and report["arrivals"] == {
        "kind": "trace", "time_scale": 2.0, "max_concurrency": None,
    }  # fmt: skip
    requests = report["runs"][0]["repeats"][0]["requests"]
    assert [(r["arrival_s"], r["prompt_len"]) for r in requests] == [(0, 5), (0.04, 6), (0.08, 7), (0.12, 8)]


def test_sweeps_stand_side_by_side(tmp_path: Path) -> None:
    sweep = ["--block-sizes", "8,32", "--page-bytes", "4KiB,64KiB", "--layouts", "interleaved"]
    report, _ = bench(tmp_path, "throughput", "--requests", "2", *sweep)
    names = ["static", "paged-8", "paged-32", "virtual-4KiB", "virtual-64KiB"]
    check_report(report, "throughput", names)
    assert [run["kv"].get("block_size") for run in report["runs"][1:3]] == [8, 32]
    assert [run["kv"].get("page_bytes") for run in report["runs"][3:]] == [4096, 65536]


def test_any_option_of_the_engine_can_be_swept(tmp_path: Path) -> None:
    sweep = ["--backends", "paged", "--sweep", "batching=continuous,static", "--sweep", "overlap=true,false"]
    report, _ = bench(tmp_path, "throughput", "--max-num-seqs", "2", *sweep)
    names = [f"paged-{b}-overlap={o}" for b in ("continuous", "static") for o in ("true", "false")]
    check_report(report, "throughput", names)
    assert [run["batching"] for run in report["runs"]] == ["continuous"] * 2 + ["static"] * 2
    assert [run["options"]["overlap"] for run in report["runs"]] == [True, False] * 2


def test_kernels(tmp_path: Path) -> None:
    report, shown = bench(tmp_path, "kernels", "--contexts", "16,48", "--backends", "static,paged")
    assert (report["format"], report["kind"]) == ("vattn-bench-1", "kernels")
    for run in report["runs"]:
        assert [point["context"] for point in run["points"]] == [16, 48]
        for point in run["points"]:
            assert 0 < point["attend_us"]["low"] <= point["attend_us"]["high"] < math.inf
            assert point["plan_us"]["median"] > 0
    assert "attention over 2 layers" in shown


def test_vmm(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, "vmm", "--device", "cpu")
    assert (report["format"], report["kind"]) == ("vattn-bench-1", "vmm")
    assert report["calls"] and report["grants"] and report["overlap"] and report["environment"]["date"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["throughput", "--workload", "zipf"], "zipf"),
        (["throughput", "--backends", "magic"], "magic"),
        (["throughput", "--backends", "none"], "--peer"),
        (["throughput", "--backends", "paged,paged"], "each once"),
        (["throughput", "--kv-dtypes", "int3"], "int3"),
        (["throughput", "--sweep", "overlap"], "--sweep"),
        (["throughput", "--sweep", "driver=1"], "--sweep"),
        (["throughput", "--sweep", "overlap=true,true"], "each value once"),
        (["throughput", "--sweep", "batching=dynamic"], "continuous or static"),
        (["throughput", "--repeats", "0"], "--repeats"),
        (["throughput", "--prompt-len", "4000"], "--max-model-len"),
        (["throughput", "--prompt-len", "400", "--max-model-len", "300"], "--max-model-len"),
        (["throughput", "--peer", "magic"], "generate_batch"),
        (["throughput", "--json", "/nowhere/x.json"], "/nowhere"),
        (["serve", "--goodput", "speed:3"], "--goodput"),
        (["serve", "--request-rate", "0"], "--request-rate"),
        (["serve", "--max-concurrency", "0"], "--max-concurrency"),
        (["serve", "--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["kernels", "--contexts", "2", "--queries", "3"], "--queries"),
    ],
)
def test_mistakes_are_refused_by_name(args: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args, "--smoke"])
    assert isinstance(result.exception, ConfigError), result.output
    assert says in str(result.exception)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["throughput", "--block-sizes", "8,x"], "8,16,32"),
        (["throughput", "--kv-memory", "much"], "not a size"),
        (["throughput", "--page-bytes", "lots"], "not a size"),
        (["serve", "tpot:50"], "tpot:50"),
        (["nonsense"], "nonsense"),
    ],
)
def test_mistakes_of_writing_are_refused_by_the_option(args: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args])
    assert result.exit_code == 2 and says in result.output.replace("\n", " ")
