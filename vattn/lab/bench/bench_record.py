"""A bench JSON (`vattn-bench-1`), read back: what reports and diagnoses look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError
from vattn.lab.bench.bench_report import FORMAT


@dataclass(frozen=True)
class Run:
    """One system of a comparison."""

    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @cached_property
    def backend(self) -> str:
        """`static`, `paged`, `virtual`; `peer` for any other engine."""
        return str(self.record.get("options", {}).get("kv_backend", "peer"))

    @property
    def repeats(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self.record.get("repeats", [])
        return found

    @cached_property
    def repeat(self) -> Mapping[str, Any]:
        """The repeat of median duration (of an even number the shorter): what is drawn over time."""
        ordered = sorted(self.repeats, key=lambda repeat: float(repeat.get("duration_s") or 0.0))
        return ordered[(len(ordered) - 1) // 2] if ordered else {}

    @property
    def steps(self) -> Mapping[str, list[Any]]:
        """Columns of `repeat`; empty where nobody could look inside."""
        return self.repeat.get("steps") or {}

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """Those of `repeat`."""
        return self.repeat.get("requests") or []

    @property
    def counters(self) -> Mapping[str, Any]:
        return self.repeat.get("counters") or {}

    @property
    def kv(self) -> Mapping[str, Any]:
        return self.record.get("kv") or {}

    @property
    def options(self) -> Mapping[str, Any]:
        return self.record.get("options") or {}

    @property
    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        return self.record.get("summary") or {}


@dataclass(frozen=True)
class Bench:
    """The whole record. `runs` of a kernel benchmark have `points` instead of repeats."""

    record: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.record["kind"])

    @cached_property
    def runs(self) -> list[Run]:
        return [Run(run) for run in self.record["runs"]]

    @property
    def model(self) -> Mapping[str, Any]:
        return self.record.get("model") or {}

    @property
    def limits(self) -> Mapping[str, Any]:
        return self.record.get("limits") or {}

    @property
    def workload(self) -> Mapping[str, Any]:
        return self.record.get("workload") or {}

    @property
    def arrivals(self) -> Mapping[str, Any]:
        return self.record.get("arrivals") or {}

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.record.get("environment") or {}


def load_json(file: Path) -> Mapping[str, Any]:
    """Raises ConfigError for a file that is not there or is no JSON object."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{file} holds a {type(record).__name__}, not a JSON object")
    return record


def load_bench(file: Path) -> Bench:
    """Raises ConfigError for anything but a bench JSON."""
    return as_bench(load_json(file), str(file))


def as_bench(record: Mapping[str, Any], source: str = "the record") -> Bench:
    """Raises ConfigError unless `record` is what `vattn bench --json` or `vattn simulate --json` writes."""
    found = record.get("format")
    if found != FORMAT:
        raise ConfigError(
            f"{source} is no benchmark record: its format is {found!r}, not {FORMAT!r}; "
            "write one with vattn bench … --json FILE"
        )
    runs = record.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(r, dict) and "name" in r for r in runs):
        raise ConfigError(f"{source} is a damaged benchmark record: it has no runs with names")
    for run in runs:
        for repeat in run.get("repeats", []):
            lengths = {len(column) for column in (repeat.get("steps") or {}).values()}
            if len(lengths) > 1:
                raise ConfigError(f"{source} is damaged: columns of steps of {run['name']} differ in length")
    return Bench({"kind": "bench", **record})
