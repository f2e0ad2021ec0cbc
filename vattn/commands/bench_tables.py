"""What `vattn bench` shows on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from vattn.lab.bench.metric_table import LATENCIES, Metric, metric

SPEED = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    *(f"{statistic}_{name}_ms" for name in LATENCIES for statistic in ("mean", "p50", "p99")),
)
"""The latencies that are shown. The JSON has more figures of each."""
MEMORY = (
    "peak_in_use_bytes",
    "peak_kv_bytes",
    "peak_physical_bytes",
    "kv_utilization",
    "tail_waste_share",
    "external_waste_share",
    "shared_saved_share",
    "attention_share",
)
COUNTERS = ("preemptions", "recomputed_tokens", "prefix_hit_tokens", "rows_adopted")
Runs = Sequence[Mapping[str, Any]]
"""Entries of `runs` in a bench JSON, measured or simulated."""


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """Speed and latency, memory, and what the driver did: a column per run."""
    runs = report["runs"]
    title = f"vattn bench {report['kind']}: {_repeats(report['repeats'])}"
    yield table_of(title, runs, metric_rows(runs, SPEED))
    counted: dict[str, Callable[[Any], Any]] = {
        key.replace("_", " "): partial(_counter, key) for key in COUNTERS
    }
    for kind in ("create", "map", "set_access", "unmap"):
        counted[f"driver: {kind} calls"] = partial(_driver_calls, kind)
    counted["driver (ms)"] = lambda c: sum(c["driver_seconds"].values()) * 1e3 if c else None
    counted["map stall (ms)"] = lambda c: c["map_stall_s"] * 1e3 if c else None
    yield table_of("memory", runs, [*metric_rows(runs, MEMORY), *counter_rows(runs, counted)])


def _counter(key: str, counters: Mapping[str, Any]) -> Any:
    return counters.get(key)


def _driver_calls(kind: str, counters: Mapping[str, Any]) -> Any:
    return counters.get("driver_calls", {}).get(kind)


def metric_rows(runs: Runs, keys: Sequence[str]) -> list[list[str]]:
    """Label, and the metric of every run with its interval; left out where no run has it."""
    rows = []
    for shown in map(metric, keys):
        found = [run["summary"].get(shown.key) for run in runs]
        if any(found):
            rows.append([shown.title, *(_interval(s, shown) for s in found)])
    return rows


def counter_rows(runs: Runs, counted: Mapping[str, Callable[[Any], Any]]) -> list[list[str]]:
    """One row per label, from the counters of the last repeat. Rows with only zeros are left out."""
    rows = []
    for label, pick in counted.items():
        found = [pick(run["repeats"][-1]["counters"]) for run in runs]
        if any(found):
            shown = (f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" for v in found if v is not None)
            rows.append([label, *("-" if v is None else next(shown) for v in found)])
    return rows


def table_of(title: str, runs: Runs, rows: Sequence[Sequence[str]]) -> Table:
    """A column per run."""
    table = Table(title=title)
    table.add_column("")
    for run in runs:
        table.add_column(run["name"], justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _interval(found: Mapping[str, Any] | None, shown: Metric) -> str:
    if found is None:
        return "-"
    middle, low, high = (shown.show(found[name]) for name in ("median", "low", "high"))
    return middle if low == high else f"{middle} [dim]\\[{low} - {high}][/]"


def in_words(record: Mapping[str, Any]) -> str:
    """A workload or arrivals of a report in one line: `random: requests 6, prompt_len uniform 4:24`."""
    head, *rest = record.items()
    parts = []
    for key, value in rest:
        if isinstance(value, Mapping):
            share = f", {value['long_share']:.0%} long" if "long_share" in value else ""
            value = f"{value['kind']} {value['low']}:{value['high']}{share}"
        parts.append(f"{key} {value}")
    return f"{head[1]}: {', '.join(parts)}" if parts else str(head[1])


def kernel_table(report: Mapping[str, Any]) -> Table:
    """Microseconds by context: attention over all layers, and planning the step."""
    runs = report["runs"]
    table = Table(
        title=f"attention over {report['layers']} layers, microseconds: median \\[low - high] + plan"
    )
    table.add_column("context", justify="right")
    for run in runs:
        table.add_column(run["name"], justify="right", overflow="fold")
    for points in zip(*(run["points"] for run in runs), strict=True):
        cells = []
        for point in points:
            us, plan = point["attend_us"], point["plan_us"]
            cells.append(
                f"{us['median']:,.0f} \\[{us['low']:,.0f} - {us['high']:,.0f}]\n+ {plan['median']:,.0f}"
            )
        table.add_row(f"{points[0]['context']:,}", *cells)
    return table


def engine_table(report: Mapping[str, Any]) -> Table:
    """Host microseconds per request and decode step, by batch size."""
    runs = report["runs"]
    table = Table(title=f"host µs per request and step: median \\[low - high] of {report['rounds']} rounds")
    table.add_column("batch", justify="right")
    for run in runs:
        table.add_column(run["name"], justify="right", overflow="fold")
    for points in zip(*(run["points"] for run in runs), strict=True):
        found = [point["us_per_request"] for point in points]
        cells = [f"{us['median']:,.1f}\n\\[{us['low']:,.1f} - {us['high']:,.1f}]" for us in found]
        table.add_row(f"{points[0]['batch']:,}", *cells)
    return table


def _repeats(n: int) -> str:
    return "one repeat" if n == 1 else f"medians of {n} repeats \\[low - high]"
