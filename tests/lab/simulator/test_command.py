"""`vattn simulate`: tables, sweeps, capacity, and a record that the bench's readers know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.commands.simulate_options import configure, parse_assumptions, parse_sweeps
from vattn.errors import ConfigError
from vattn.lab.bench.slo import Slo
from vattn.lab.simulator.capacity import highest_rate
from vattn.lab.simulator.sweep import combinations

BASE = {"model": "llama-3-8b", "gpu": "h100", "backend": "virtual"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def simulate_json(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "sim.json"
    run(*arguments, "--json", str(file))
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_all_backends_side_by_side(tmp_path: Path) -> None:
    report = simulate_json(
        tmp_path, "-m", "llama-3-70b", "--gpu", "h200", "-n", "40", "--request-rate", "20",
        "--goodput", "ttft:500", "tpot:50",
    )  # fmt: skip
    assert (report["format"], report["kind"]) == ("vattn-bench-1", "simulate")
    assert [r["name"] for r in report["runs"]] == ["virtual", "paged", "static"]
    assert report["goodput_slo"] == {"ttft": 500.0, "tpot": 50.0}
    assert report["model"]["name"] == "llama-3-70b" and report["model"]["tp"] == 2
    for entry in report["runs"]:
        [repeat] = entry["repeats"]
        assert repeat["metrics"]["completed"] == 40
        assert repeat["metrics"]["request_goodput"] > 0
    assert any("roofline" in sentence for sentence in report["conclusions"])


def test_a_sweep_is_every_combination_that_differs() -> None:
    swept = {"backend": ["virtual", "paged"], **parse_sweeps(["block_size=8,16", "tp=1,2"])}
    runs = combinations(BASE, swept)
    assert list(runs) == [
        "virtual tp=1",
        "virtual tp=2",
        "paged block_size=8 tp=1",
        "paged block_size=8 tp=2",
        "paged block_size=16 tp=1",
        "paged block_size=16 tp=2",
    ]
    assert configure(runs["paged block_size=8 tp=2"]).kv.block_size == 8
    assert configure(runs["paged block_size=8 tp=2"]).tp == 2


def test_smaller_blocks_waste_less_in_a_swept_run(tmp_path: Path) -> None:
    report = simulate_json(tmp_path, "-n", "30", "--backend", "paged", "--sweep", "block_size=8,64,256")
    used = [r["repeats"][0]["metrics"]["kv_utilization"] for r in report["runs"]]
    assert [r["options"]["block_size"] for r in report["runs"]] == [8, 64, 256]
    assert used == sorted(used, reverse=True) and used[0] > used[-1] + 0.1


def test_capacity_is_a_rate_that_keeps_the_limits_and_hardly_more_does() -> None:
    from vattn.lab.bench.arrivals import Arrivals
    from vattn.lab.simulator.capacity import attainment
    from vattn.lab.simulator.setup import Simulation, simulate
    from vattn.lab.simulator.source import Plan

    config = configure({**BASE, "max_num_seqs": 32})
    slo = Slo(ttft=200.0, tpot=14.0)

    def at(rate: float) -> Simulation:
        return simulate(config, [Plan(200, 30)] * 80, Arrivals("poisson", rate))

    found = highest_rate(at, slo, most=200.0)
    assert 0 < found.rate < 200 and found.attained >= 0.9
    assert attainment(at(found.rate), slo) == found.attained
    assert attainment(at(found.rate * 1.05), slo) < 0.9
    assert highest_rate(at, Slo(ttft=1e-3), most=200.0).rate == 0


def test_capacity_is_told_a_gpu() -> None:
    output = run(
        "-n", "50", "--backend", "paged", "--goodput", "ttft:500", "tpot:50", "--capacity",
    )  # fmt: skip
    assert "a GPU" in output and "requests/s (Poisson) keep ttft:500 tpot:50" in " ".join(output.split())


def test_step_times_can_be_those_of_another_record(tmp_path: Path) -> None:
    """A simulated record stands in for a measured one: what was simulated with it takes as long."""
    options = ("-n", "30", "--backend", "paged", "--request-rate", "40")
    first = simulate_json(tmp_path, *options)
    (tmp_path / "sim.json").rename(tmp_path / "bench.json")
    second = simulate_json(tmp_path, *options, "--calibrate", str(tmp_path / "bench.json"))
    assert second["runs"][0]["cost"]["kind"] == "fitted"
    durations = [r["runs"][0]["repeats"][0]["duration_s"] for r in (first, second)]
    assert durations[1] == pytest.approx(durations[0], rel=0.1)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("colour=red,blue", "--sweep colour: unknown; sweep one of model, gpu, tp"),
        ("tp=", "write a name once and its values"),
        ("tp=2,2", "write a name once and its values"),
    ],
)
def test_sweeps_of_nothing_are_refused(sweep: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combinations(BASE, parse_sweeps([sweep]))


def test_wrong_values_name_the_knob() -> None:
    for knob, value, message in (
        ("tp", "two", "tp='two' is not a whole number"),
        ("mapping", "secret", "mapping='secret': use hidden or exposed"),
        ("linear_flops", "fast", "linear_flops='fast' is not a number"),
        ("backend", "magic", "kv_backend='magic' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure({**BASE, knob: value})
    with pytest.raises(ConfigError, match="--assume 'speed=1': write NAME=VALUE"):
        parse_assumptions(["speed=1"])
    with pytest.raises(ConfigError, match="--capacity needs --goodput"):
        run("--capacity")
