"""Every figure as a table: read without a script, and by a screen reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from vattn import units
from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.bench.metric_table import METRICS, Metric, metric
from vattn.lab.report.parts import Cell, Table

Rows = list[Sequence[str | Cell]]
DUPLICATES = {f"p50_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")}
"""Medians under their second name."""


def metric_tables(bench: Bench) -> Iterator[Table]:
    """A table per group of metrics, a column per run: median, and the interval where repeats differ."""
    there = {key for run in bench.runs for key in run.summary} - DUPLICATES
    known = [m for m in METRICS.values() if m.key in there]
    others = dict.fromkeys(key for run in bench.runs for key in run.summary if key in there - METRICS.keys())
    for title, group in groupby([*known, *map(metric, others)], key=lambda m: m.group):
        rows: Rows = [[m.label, *(interval_cell(run, m) for run in bench.runs)] for m in group]
        yield Table(title, ["", *(run.name for run in bench.runs)], rows)


def interval_cell(run: Run, shown: Metric) -> str | Cell:
    """Median and interval of a metric; a dash where the run does not have it."""
    found = run.summary.get(shown.key)
    if found is None:
        return "–"
    middle, low, high = (shown.show(found[name]) for name in ("median", "low", "high"))
    return middle if low == high else Cell(middle, f"[{low} – {high}]")


def counter_table(bench: Bench) -> list[Table]:
    """What engine, cache and driver counted, in the repeat that is drawn."""
    runs = [run for run in bench.runs if run.counters]
    keys = dict.fromkeys(k for run in runs for k, v in run.counters.items() if not isinstance(v, Mapping))
    rows: Rows = []
    for key in keys:
        values = [run.counters.get(key) for run in runs]
        if any(values):
            show = _counter_units(key)
            rows.append([_words(key), *("–" if v is None else show(v) for v in values)])
    return [Table("Counters", ["", *(run.name for run in runs)], rows)] if rows else []


def _counter_units(key: str) -> Callable[[float], str]:
    if "bytes" in key:
        return units.nbytes
    return units.seconds if key.endswith(("_s", "seconds")) else units.number


def driver_table(bench: Bench) -> list[Table]:
    """Calls, their time in all and on average, by kind and run."""
    rows: Rows = []
    for run in bench.runs:
        seconds = run.counters.get("driver_seconds") or {}
        for kind, calls in (run.counters.get("driver_calls") or {}).items():
            if calls:
                spent = float(seconds.get(kind, 0.0))
                rows.append(
                    [run.name, kind, f"{calls:,}", units.seconds(spent), units.seconds(spent / calls)]
                )
    head = ["run", "call", "calls", "in all", "each, on average"]
    return [Table("Driver calls, while requests were served", head, rows)] if rows else []


def kernel_table(bench: Bench) -> list[Table]:
    """Attention and planning by context."""
    rows: Rows = []
    for run in bench.runs:
        for p in run.record.get("points") or ():
            us, plan = p["attend_us"], p["plan_us"]
            attend = Cell(f"{us['median']:,.0f}", f"[{us['low']:,.0f} – {us['high']:,.0f}]")
            rows.append([run.name, f"{p['context']:,}", attend, f"{plan['median']:,.0f}"])
    head = ["run", "context", "attention (µs)", "planning (µs)"]
    return [Table("Attention", head, rows)] if rows else []


def record_table(record: Mapping[str, Any], caption: str) -> Table:
    """Names and values, nested ones in words."""
    return Table(caption, ["", "value"], [[_words(key), _value(key, value)] for key, value in record.items()])


def length_table(bench: Bench) -> list[Table]:
    """Quantiles of the lengths of prompts and outputs."""
    run = next((run for run in bench.runs if run.requests), None)
    if run is None:
        return []
    rows: Rows = []
    for column, label in (("prompt_len", "prompt tokens"), ("output_len", "output tokens")):
        values = np.array([r[column] for r in run.requests], np.float64)
        found = np.percentile(values, (0, 25, 50, 75, 90, 99, 100))
        rows.append([label, *(units.number(round(float(v), 1)) for v in (values.mean(), *found))])
    return [Table("Lengths", ["", "mean", "least", "25%", "median", "75%", "90%", "99%", "most"], rows)]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _value(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(k))} {_value(str(k), v)}" for k, v in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (key.endswith("_bytes") or key == "kv_memory_bytes"):
        return f"{units.nbytes(value)} ({value:,})" if value >= 1024 else f"{value:,} B"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
