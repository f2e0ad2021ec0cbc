"""The GPU benchmark's one command, end to end on the CPU: so that it can't fail on a typo on the day."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
STAGES = ("machine", "conformance", "tests", "sanitizer", "vmm", "kernels", "engine")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "results"
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(
        [str(RUN), "--dry"],
        env=environment | {"PYTHON": sys.executable, "OUT": str(folder), "COMMIT": "abc1234"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def records(out: Path) -> dict[str, dict[str, Any]]:
    return {stage: json.loads((out / f"gpu-{stage}.json").read_text()) for stage in STAGES}


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, and where it is."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{i}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def test_every_stage_reports_into_a_flat_folder_of_at_most_eight_files(out: Path) -> None:
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted([*(f"gpu-{stage}.json" for stage in STAGES), "gpu-summary.md"])
    assert len(files) <= 8


def test_every_stage_runs_within_its_limit(records: dict[str, dict[str, Any]]) -> None:
    for stage, record in records.items():
        expected = "not available" if stage == "sanitizer" else "ok"
        assert record["status"] == expected, record["log_tail"]
        assert record["dry"] is True
        assert 0 < record["seconds"] < record["limit_s"]
        assert record["result"] is not None


def test_every_figure_is_finite_and_rates_are_positive(records: dict[str, dict[str, Any]]) -> None:
    rates = ("_us", "_per_s", "share_of_copy", "share_of_matmul", "seconds", "p50", "p99", "relative_error")
    found = 0
    for stage, record in records.items():
        for path, number in numbers(record["result"]):
            assert math.isfinite(number) and number >= 0, f"{stage}{path} is {number}"
            if path.endswith(rates):
                found += 1
                assert number > 0, f"{stage}{path} is 0"
    assert found > 100


def test_kernels_are_right_in_every_kind_of_memory(records: dict[str, dict[str, Any]]) -> None:
    problems = records["kernels"]["result"]["problems"]
    assert {p["kind"] for p in problems} == {"decode", "prefill"}
    for problem in problems:
        timed = {c for c, v in problem["contestants"].items() if "median_us" in v}
        places = (
            "virtual interleaved",
            "virtual per_layer",
            "static per_layer",
            "paged 16",
            "paged 64",
            "paged 256",
        )
        assert timed >= {f"triton @ {place}" for place in places}
        assert timed >= {f"sdpa flash @ {place}" for place in places[:3]}
        for contestant in problem["contestants"].values():
            assert "failed" not in contestant
            assert contestant.get("relative_error", 0) < 1e-2
            assert "median_us" in contestant or contestant["skipped"], "what is not timed says why"
    assert records["kernels"]["result"]["not_run"] == []


def test_engines_do_the_same_work_on_every_backend(records: dict[str, dict[str, Any]]) -> None:
    result = records["engine"]["result"]
    assert result["complete"] and not result["failed"] and not result["not_run"]
    runs = result["runs"]
    backends = ["virtual interleaved", "paged 16", "virtual per_layer", "paged 64", "static"]
    assert {r["backend"] for r in runs} == set(backends)
    assert all(r["tokens_equal_share"] == 1.0 for r in runs)
    assert [r["books"] for r in runs if r["books"] is not None] == ["balance"] * len(backends)
    assert all(r["kv_utilization"] <= 1 and r["peak_held_bytes"] > 0 for r in runs)
    for number in (0, 1):
        order = [r["backend"] for r in runs if r["round"] == number and r["work"] == "saturation"]
        assert order == backends[number:] + backends[:number], (
            "engines take turns, each round begins elsewhere"
        )
    mapped = {e["backend"]: e["driver_calls_of_warm_up"].get("map", 0) for e in result["engines"]}
    assert mapped["virtual interleaved"] > 0 and mapped["paged 16"] == 0


def test_the_summary_claims_nothing_about_a_gpu(out: Path) -> None:
    text = (out / "gpu-summary.md").read_text()
    assert "dry run: no GPU figure" in text
    assert "abc1234" in text
    bars = [line for line in text.split("## ")[1].splitlines() if "**" in line]
    assert len(bars) == 11
    assert all("**not measured**" in line for line in bars)
    for heading in (
        "## Stages",
        "## Kernel tests",
        "## Kernels: decode",
        "## Kernels: prefill",
        "## Engine: tiny",
    ):
        assert heading in text
    assert "incomplete" not in text


def test_unknown_arguments_are_refused() -> None:
    done = subprocess.run([str(RUN), "--fast"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage" in done.stderr


def test_without_a_gpu_it_points_to_the_dry_run(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([str(RUN)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--dry" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "says"), [("exit 1", "does not run"), ("echo triton typer", "lacks: triton typer")]
)
def test_a_python_that_will_not_do_is_refused_before_anything_runs(
    tmp_path: Path, script: str, says: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "out")}
    done = subprocess.run([str(RUN), "--dry"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr and "PYTHON=" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
