"""Numbers out of the parts of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vattn.lab.bench.conclusions import ratio
from vattn.lab.bench.intervals import Interval, interval

Part = Mapping[str, Any]


def names(part: Part) -> list[str]:
    """Its systems, in order."""
    return [run["name"] for run in part["runs"]]


def run_of(part: Part, name: str) -> Mapping[str, Any]:
    named: list[Mapping[str, Any]] = [run for run in part["runs"] if run["name"] == name]
    return named[0]


def found(part: Part, name: str, metric: str) -> Interval:
    """Over the repeats. KeyError where a repeat lacks it."""
    return interval([repeat["metrics"][metric] for repeat in run_of(part, name)["repeats"]])


def median(part: Part, name: str, metric: str) -> float:
    return found(part, name, metric).median


def bounds(part: Part, name: str, metric: str) -> tuple[float, float, float]:
    """(median, down to the low end, up to the high end), as error bars want it."""
    over = found(part, name, metric)
    return over.median, over.median - over.low, over.high - over.median


def ratio_of(part: Part, name: str, other: str, metric: str) -> Interval | None:
    """`name` / `other`, taken within each repeat."""
    first, second = (
        [repeat["metrics"] for repeat in run_of(part, system)["repeats"]] for system in (name, other)
    )
    return ratio(first, second, metric)


def points(part: Part, name: str, key: str) -> list[float]:
    """Of a kernel part: medians of `attend_us` or `plan_us`, by context."""
    return [point[key]["median"] for point in run_of(part, name)["points"]]


def point_interval(part: Part, name: str, index: int, key: str = "attend_us") -> Interval:
    return Interval(**run_of(part, name)["points"][index][key])
