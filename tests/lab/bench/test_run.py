"""Who runs when, and what is written down about it."""

from __future__ import annotations

import gc
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.bench.test_load import StepTarget
from vattn.errors import ConfigError
from vattn.lab.bench import bench_report as reports
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.environment import environment
from vattn.lab.bench.interleaved_run import HEADLINES, Limits, Plan, run
from vattn.lab.bench.target import System, Target
from vattn.lab.bench.workload import RandomWorkload

LIMITS = Limits(4, 64, 64, 1 << 20)


class FakeSystem(System):
    def __init__(self, name: str, step_s: float, log: list[str]) -> None:
        self.name, self.options, self.step_s, self.log = name, {"step_s": step_s}, step_s, log

    @contextmanager
    def open(self) -> Iterator[Target]:
        self.log.append(self.name)
        yield StepTarget(self.step_s)
        self.log.append(f"/{self.name}")


def plan(kind: str = "throughput", repeats: int = 5) -> Plan:
    return Plan(kind, RandomWorkload(3, (4, 8), (2, 4)), Arrivals("at-once"), LIMITS, repeats)


def test_systems_warm_up_and_then_take_turns_that_rotate() -> None:
    log: list[str] = []
    run(plan(repeats=3), [FakeSystem(name, 1.0, log) for name in "ABC"], 50)
    opened = [name for name in log if "/" not in name]
    assert "".join(opened) == "ABC" + "ABC" + "BCA" + "CAB"
    assert log[1::2] == [f"/{name}" for name in opened], "one engine at a time"


def test_a_report_says_how_much_faster() -> None:
    measured = run(plan(), [FakeSystem("fast", 1.0, []), FakeSystem("slow", 2.0, [])], 50)
    report = reports.finish(measured, HEADLINES["throughput"])
    assert report["conclusions"] == [
        "All runs produced the same tokens.",
        "output_throughput: fast has 2 times that of slow (2 to 2 at 94% over 5 repeats).",
    ]
    assert report["runs"][0]["summary"]["output_throughput"]["n"] == 5
    assert report["runs"][0]["options"] == {"step_s": 1.0}


def test_progress_names_the_system_and_the_repeat() -> None:
    seen: list[tuple[str, int]] = []
    run(plan(repeats=2), [FakeSystem("A", 1.0, [])], 50, lambda name, repeat, *_: seen.append((name, repeat)))
    assert list(dict.fromkeys(seen)) == [("A", -1), ("A", 0), ("A", 1)]


def test_the_heap_is_thawed_afterwards_also_after_an_error() -> None:
    class Broken(FakeSystem):
        @contextmanager
        def open(self) -> Iterator[Target]:
            assert gc.get_freeze_count() > 0
            raise RuntimeError("broken")
            yield

    with pytest.raises(RuntimeError, match="broken"):
        run(plan(), [Broken("A", 1.0, [])], 50)
    assert gc.get_freeze_count() == 0


def test_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="A, A"):
        run(plan(), [FakeSystem("A", 1.0, []), FakeSystem("A", 2.0, [])], 50)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        plan("speed")
    with pytest.raises(ConfigError, match="--repeats"):
        plan(repeats=0)
    with pytest.raises(ConfigError, match="--max-model-len"):
        Plan("serve", RandomWorkload(1, (60, 64), (1, 4)), Arrivals("at-once"), LIMITS)


def test_json_is_strict_and_short(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": {"c": [{"d": "x"}, []]}, "e": {}, "f": []}
    reports.write(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == value
    assert '"a": [1, 2.5, null]' in text, "columns take one line"
    with pytest.raises(ValueError, match="nan"):
        reports.write(tmp_path / "y.json", {"a": float("nan")})
    with pytest.raises(ValueError):
        reports.write(tmp_path / "y.json", {"a": [1.0, float("inf")]})


def test_the_commit_is_vattns_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(reports.__file__).parent
    ours = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    assert environment()["commit"] == (ours.stdout.strip() or None)


def test_static_batches_are_run_as_such() -> None:
    """Limits allow four at once: the fifth and sixth request begin when all four have ended."""
    work = RandomWorkload(6, (4, 8), (1, 8))
    static = FakeSystem("static", 1.0, [])
    static.barrier = True
    asked = Plan("throughput", work, Arrivals("at-once"), LIMITS, repeats=1)
    one, other = run(asked, [static, FakeSystem("continuous", 1.0, [])], 50)["runs"]
    assert (one["batching"], other["batching"]) == ("static", "continuous")
    requests = one["repeats"][0]["requests"]
    ended = max(r["finished_s"] for r in requests[:4])
    assert all(r["first_token_s"] > ended for r in requests[4:])
    assert other["repeats"][0]["duration_s"] < one["repeats"][0]["duration_s"]
