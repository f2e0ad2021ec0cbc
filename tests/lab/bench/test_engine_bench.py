"""The engine without a model: what a step costs the host, counted and shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.lab.bench.engine_bench import CASES, DecodingBatch

CALLS_PER_REQUEST = {"virtual interleaved": 37, "virtual per_layer": 32, "paged": 33, "static": 32}
"""Python functions entered per request and decode step, at most: about a tenth more than there are."""


def calls_of_steps(case: str, requests: int, steps: int) -> int:
    """Python functions entered in `steps` decode steps."""
    batch = DecodingBatch.open(CASES[case], requests, steps)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(steps):
            batch.step()
    finally:
        sys.setprofile(None)
        batch.close()
    return calls


@pytest.mark.parametrize("case", CASES)
def test_a_request_adds_a_bounded_number_of_calls_to_a_step(case: str) -> None:
    few, many, steps = 16, 144, 16
    more = calls_of_steps(case, many, steps) - calls_of_steps(case, few, steps)
    per_request = more / ((many - few) * steps)
    assert 1 < per_request <= CALLS_PER_REQUEST[case]


def test_the_command_shows_every_backend_and_writes_each_round(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    arguments = ["bench", "engine", "--smoke", "--steps", "2", "--json", str(path)]
    result = CliRunner().invoke(app, arguments, terminal_width=80, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines()[:-2])) <= 80
    report = json.loads(path.read_text())
    assert report["kind"] == "engine" and {"commit", "load", "cpu"} <= report["environment"].keys()
    assert [run["name"] for run in report["runs"]] == list(CASES)
    for run in report["runs"]:
        assert [p["batch"] for p in run["points"]] == [1, 8]
        for point in run["points"]:
            us = point["us_per_request"]
            assert len(point["us_per_step"]) == 2 and 0 < us["low"] <= us["median"] <= us["high"]


@pytest.mark.parametrize("arguments", [["--batches", "0"], ["--steps", "0"], ["--rounds", "0"]])
def test_impossible_sizes_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", "--smoke", *arguments])
    assert result.exit_code != 0
