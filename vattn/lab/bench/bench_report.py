"""The record of a benchmark, as JSON (`vattn-bench-1`): what was run, on what, and everything measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError
from vattn.lab.bench.conclusions import conclusions, same_tokens
from vattn.lab.bench.environment import environment
from vattn.lab.bench.intervals import interval
from vattn.lab.charts.figure import require_matplotlib

FORMAT = "vattn-bench-1"


def summarize(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and interval of every metric that all repeats have."""
    metrics = [repeat["metrics"] for repeat in repeats]
    names = [name for name in metrics[0] if all(m.get(name) is not None for m in metrics)]
    return {name: interval([m[name] for m in metrics]).to_dict() for name in names}


def finish(report: dict[str, Any], headlines: Sequence[str]) -> dict[str, Any]:
    """Add summaries and conclusions to a report whose runs are complete, and where it was made."""
    for run in report["runs"]:
        run["summary"] = summarize(run["repeats"])
    digests = {run["name"]: [r["tokens_digest"] for r in run["repeats"]] for run in report["runs"]}
    equal = same_tokens(digests)
    runs = {run["name"]: [repeat["metrics"] for repeat in run["repeats"]] for run in report["runs"]}
    return {
        "format": FORMAT,
        "kind": report["kind"],
        "environment": environment(),
        **{key: value for key, value in report.items() if key != "kind"},
        "conclusions": [*([equal] if equal else []), *conclusions(runs, headlines)],
    }


def check_writable(file: Path | None, option: str = "--json") -> None:
    """Raise ConfigError before a run whose record could not be written."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.absolute().parent}")


def check_drawable(file: Path | None) -> None:
    """Raise ConfigError before a run whose page could not be drawn or written."""
    check_writable(file, "--html")
    if file is not None:
        require_matplotlib(f"--html {file}")


def write(file: Path, report: Mapping[str, Any]) -> None:
    """Strict JSON: no NaN, no infinity. Lists of numbers stay on one line."""
    file.write_text(_pretty(report) + "\n")


def _pretty(value: Any, indent: int = 0) -> str:
    """JSON with one key per line, where lists of plain values take one line."""
    pad, inner = "  " * indent, "  " * (indent + 1)
    if isinstance(value, Mapping) and value:
        items = [f"{inner}{json.dumps(str(k))}: {_pretty(v, indent + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(v, (Mapping, list, tuple)) for v in value):
        return "[\n" + ",\n".join(inner + _pretty(v, indent + 1) for v in value) + f"\n{pad}]"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no place in a report")
    return json.dumps(value, allow_nan=False)
