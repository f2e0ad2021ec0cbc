"""Findings claim what the repeats show, and nothing that noise hides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vattn.cli import app
from vattn.errors import ConfigError
from vattn.lab.bench.intervals import interval
from vattn.lab.experiments.experiment import Experiment
from vattn.lab.experiments.reading import bounds, median, ratio_of
from vattn.lab.experiments.registry import EXPERIMENTS, experiment
from vattn.lab.experiments.words import apart, compared, mib, percent, sentence


def part(**systems: list[float]) -> dict[str, Any]:
    """Each system's speed, repeat by repeat."""
    return {
        "runs": [
            {"name": name, "repeats": [{"metrics": {"speed": value}} for value in values]}
            for name, values in systems.items()
        ]
    }


def test_ratios_are_taken_within_a_repeat() -> None:
    """The machine slowed down all the time, and still one was twice as fast in every repeat."""
    found = ratio_of(part(a=[10, 8, 6, 4, 2], b=[5, 4, 3, 2, 1]), "a", "b", "speed")
    assert compared(found, "a", "b", "speed") == "a has 2.00 times the speed of b"


def test_a_clear_difference_is_told_with_its_interval() -> None:
    found = ratio_of(part(a=[2, 3, 2, 4, 2], b=[1, 1, 1, 1, 1]), "a", "b", "speed")
    assert compared(found, "a", "b", "speed") == "a has 2.00 times the speed of b (2.00 to 4.00)"


def test_noise_is_told_instead_of_a_difference() -> None:
    found = ratio_of(part(a=[2, 3, 2, 0.5, 2], b=[1, 1, 1, 1, 1]), "a", "b", "speed")
    said = compared(found, "a", "b", "speed")
    assert said == "noise hides whether the speed of a differs from that of b (0.50 to 3.00 times)"


def test_few_repeats_conclude_nothing() -> None:
    found = ratio_of(part(a=[2, 2, 2], b=[1, 1, 1]), "a", "b", "speed")
    assert compared(found, "a", "b", "speed") == "3 repeats can't tell the speed of a from that of b"


def test_the_same_is_the_same() -> None:
    found = ratio_of(part(a=[7] * 5, b=[7] * 5), "a", "b", "speed")
    assert compared(found, "a", "b", "speed") == "a has the same speed as b"


def test_what_was_not_measured_is_not_compared() -> None:
    found = ratio_of(part(a=[1.0] * 5, b=[0.0] * 5), "a", "b", "speed")
    assert compared(found, "a", "b", "speed") == "the speed of a and b can't be compared"


def test_intervals_that_meet_are_not_apart() -> None:
    low, high = interval([1, 2, 3, 4, 5]), interval([5, 6, 7, 8, 9])
    assert not apart(low, high) and apart(low, interval([6, 7, 8, 9, 10]))
    assert not apart(interval([1, 2]), interval([8, 9])), "two repeats tell nothing apart"


def test_numbers() -> None:
    found = part(a=[1, 2, 3, 4, 9])
    assert median(found, "a", "speed") == 3 and bounds(found, "a", "speed") == (3, 2, 6)
    assert (percent(0.1234), mib(3 << 20), mib(1536)) == ("12.3 %", "3.0 MiB", "1.5 KiB")
    assert sentence("one thing", "another") == "One thing; another."


@pytest.mark.parametrize("known", EXPERIMENTS, ids=lambda known: known.name)
def test_every_experiment_has_a_name_and_a_question(known: Experiment) -> None:
    assert known.name == known.name.lower() and known.question
    assert experiment(known.name) is known


def test_the_list_names_them_all() -> None:
    shown = CliRunner().invoke(app, ["bench", "experiment", "list"]).output
    assert len(EXPERIMENTS) == 10 and all(known.name in shown for known in EXPERIMENTS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["speed"], "there are waste, block-size"),
        (["waste", "--json", "/nowhere/x.json"], "/nowhere"),
        (["waste", "--figure", "/nowhere/x.png"], "/nowhere"),
        (["waste", "--repeats", "0"], "--repeats"),
        (["waste", "--from", "/nowhere.json"], "/nowhere.json"),
        (["waste", "--from", "/nowhere.json", "--json", "x.json"], "--from"),
    ],
)
def test_mistakes_are_refused_by_name(args: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "experiment", *args])
    assert isinstance(result.exception, ConfigError), result.output
    assert says in str(result.exception)


def test_a_record_of_another_experiment_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"format": "vattn-experiment-1", "name": "cow"}')
    result = CliRunner().invoke(app, ["bench", "experiment", "waste", "--from", str(file)])
    assert isinstance(result.exception, ConfigError) and "'cow'" in str(result.exception)
