"""A benchmark whose process dies goes on in a new one, without what killed it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(path: Path, how: str, budget: str = "60") -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks.gpu.survive", "tests.benchmarks.dying"]
    done = subprocess.run(
        [*command, "--json", str(path), "--budget-s", budget, "--how", how],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(path.read_text()), done.stdout


@pytest.mark.parametrize(
    ("how", "reason"),
    [("loses its context", "RuntimeError: illegal access"), ("is killed", "the process ended with -11")],
)
def test_what_kills_the_process_is_left_out_and_the_rest_runs(tmp_path: Path, how: str, reason: str) -> None:
    code, state, printed = run(tmp_path / "f.json", how)
    assert code == 3, "the status is that of the process that reached the end"
    assert state["done"] == ["a", "c"]
    assert state["fatal"] == {"b": reason, "d": reason}
    assert "error" not in state
    assert f"b took the process with it: {reason}" in printed
    assert state["budgets"] == sorted(state["budgets"], reverse=True) and len(state["budgets"]) == 3


def test_figures_of_an_earlier_run_are_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text('{"done": ["c"], "budgets": [], "fatal": {"a": "long ago"}}')
    _, state, _ = run(path, "is killed")
    assert state["done"] == ["a", "c"]


def test_a_process_that_dies_before_it_runs_anything_is_not_started_again(tmp_path: Path) -> None:
    code, state, printed = run(tmp_path / "f.json", "dies first")
    assert code == 1 and len(state["budgets"]) == 1
    assert "not known what to leave out" in printed


def test_without_time_left_it_ends(tmp_path: Path) -> None:
    code, state, printed = run(tmp_path / "f.json", "is killed", budget="5")
    assert code == 1 and state["fatal"].keys() == {"b"}
    assert "no time is left" in printed
