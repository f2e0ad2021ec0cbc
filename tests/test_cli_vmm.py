"""`vattn vmm`: the driver's rules and the cost of its calls, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.vmm.conformance import suite
from vattn.vmm.conformance.rule import Outcome, Result
from vattn.vmm.conformance.specification import RULES


def vattn(*args: str, code: int = 0) -> str:
    """What a user sees, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "vattn.cli", *args], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_test_prints_a_table_of_rules_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    shown = vattn("vmm", "test", "--device", "cpu", "--json", str(file))
    assert "host driver, granularity 64.0 KiB, 256.0 MiB of memory" in shown
    assert all(rule.name[:20] in shown for rule in RULES)
    assert f"{len(RULES) - 1} pass, 0 fail, 1 not supported" in shown
    report = json.loads(file.read_text())
    assert report["counts"] == {"pass": len(RULES) - 1, "fail": 0, "not supported": 1}
    assert [rule["rule"] for rule in report["rules"]] == [rule.name for rule in RULES]
    assert set(report["rules"][0]) == {"rule", "outcome", "detail", "seconds", "statement", "source"}
    assert report["about"]["granularity"] == 64 << 10 and report["environment"]["torch"]


class OneFailure(suite.Suite):
    """A driver that breaks one rule."""

    def __init__(self, spec: object) -> None:
        self.about: dict[str, Any] = {"driver": "broken", "granularity": 4096, "total": 1 << 20}

    def run_all(self, rules: object = RULES) -> Iterator[Result]:
        for index, rule in enumerate(RULES):
            yield Result(rule.name, Outcome.FAIL if index == 3 else Outcome.PASS, "seen 7", 0.1)

    def close(self) -> None:
        pass


def test_a_broken_rule_is_explained_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite, "Suite", OneFailure)
    file = tmp_path / "rules.json"
    done = CliRunner().invoke(app, ["vmm", "test", "--device", "cpu", "--json", str(file)])
    assert done.exit_code == 1, done.output
    assert f"{len(RULES) - 1} pass, 1 fail, 0 not supported" in done.output
    shown = " ".join(done.output.split())
    assert f"fail {RULES[3].statement} ({RULES[3].source})" in shown and "seen 7" in shown
    assert json.loads(file.read_text())["counts"]["fail"] == 1, "also written when something failed"


def test_bench_prints_tables_and_writes_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    shown = vattn(
        "vmm",
        "bench",
        "--device",
        "cpu",
        "--smoke",
        "--page",
        "64KiB",
        "--page",
        "128KiB",
        "--json",
        str(file),
    )
    assert "pages of 64.0 KiB" in shown and "pages of 128.0 KiB" in shown
    assert "one call each" in shown and "mapping while the device computes" in shown
    report = json.loads(file.read_text())
    assert {row["page_bytes"] for row in report["calls"]} == {64 << 10, 128 << 10}
    assert report["environment"]["threads"] >= 1 and report["grants"] and report["overlap"]
    assert {"call", "median_us", "p99_us", "n", "span"} <= set(report["calls"][0])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["test", "--device", "xpu"], "'xpu' is none of auto, cpu, cuda, cuda:N"),
        (["bench", "--device", "cpu", "--page", "lots"], "'lots' is not a size"),
    ],
)
def test_mistakes_are_explained(args: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["vmm", *args])
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["test", "--device", "cuda:77"], 1, "error: "),
        (["bench", "--device", "cpu", "--page", "1000"], 2, "not a multiple of the system page"),
    ],
)
def test_what_the_machine_cannot_do_ends_in_one_line(args: list[str], code: int, says: str) -> None:
    shown = vattn("vmm", *args, code=code)
    assert says in shown and "Traceback" not in shown
