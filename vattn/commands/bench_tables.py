"""What `vattn bench` shows on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from vattn.units import nbytes

RATES = (
    ("request_throughput", "requests/s"),
    ("request_goodput", "goodput, requests/s"),
    ("output_throughput", "output tokens/s"),
    ("total_token_throughput", "all tokens/s"),
)
MEMORY = (
    ("peak_in_use_bytes", "peak in use"),
    ("peak_kv_bytes", "peak held (in use, parked, cached)"),
    ("peak_physical_bytes", "peak physical"),
)
SHARES = (
    ("kv_utilization", "KV utilization"),
    ("tail_waste_share", "waste: tails of blocks and pages"),
    ("external_waste_share", "waste: reserved, never used"),
    ("shared_saved_share", "saved by sharing"),
    ("attention_share", "attention's share of the time"),
)
SHOWN = ("mean", "p50", "p99")
"""Of each latency; the JSON has more."""
COUNTERS = ("preemptions", "recomputed_tokens", "prefix_hit_tokens", "rows_adopted")


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """Speed and latency, memory, and what the driver did: a column per run."""
    runs = report["runs"]
    speed = _table(f"vattn bench {report['kind']}: {_repeats(report['repeats'])}", runs)
    for key, label in RATES:
        _row(speed, label, runs, key, lambda v: f"{v:,.1f}" if v >= 100 else f"{v:.2f}")
    for name in ("ttft", "tpot", "itl", "e2el"):
        for key in SHOWN:
            _row(speed, f"{name.upper()} {key} (ms)", runs, f"{key}_{name}_ms", lambda v: f"{v:,.1f}")
    yield speed
    memory = _table("memory", runs)
    for key, label in MEMORY:
        _row(memory, label, runs, key, nbytes)
    for key, label in SHARES:
        _row(memory, label, runs, key, lambda v: f"{v:.1%}")
    for key in COUNTERS:
        _counted(memory, key.replace("_", " "), runs, lambda c, key=key: c.get(key))
    for kind in ("create", "map", "set_access", "unmap"):
        _counted(memory, f"driver: {kind} calls", runs, lambda c, k=kind: _of(c, "driver_calls", k))
    _counted(memory, "driver (ms)", runs, lambda c: sum(c["driver_seconds"].values()) * 1e3 if c else None)
    _counted(memory, "map stall (ms)", runs, lambda c: c["map_stall_s"] * 1e3 if c else None)
    yield memory


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


def _table(title: str, runs: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for run in runs:
        table.add_column(run["name"], justify="right", overflow="fold")
    return table


def _row(table: Table, label: str, runs: list[dict[str, Any]], key: str, show: Any) -> None:
    """A metric of every run with its interval; left out where no run has it."""
    found = [run["summary"].get(key) for run in runs]
    if not any(found):
        return
    cells = []
    for s in found:
        if s is None:
            cells.append("-")
        elif s["low"] == s["high"]:
            cells.append(show(s["median"]))
        else:
            cells.append(f"{show(s['median'])} [dim]\\[{show(s['low'])} - {show(s['high'])}][/]")
    table.add_row(label, *cells)


def _counted(table: Table, label: str, runs: list[dict[str, Any]], pick: Any) -> None:
    """A counter of the last repeat; left out where it is nought everywhere."""
    found = [pick(run["repeats"][-1]["counters"]) for run in runs]
    if any(found):
        table.add_row(
            label, *("-" if v is None else f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" for v in found)
        )


def _repeats(n: int) -> str:
    return "one repeat" if n == 1 else f"medians of {n} repeats \\[low - high]"


def _of(counters: Mapping[str, Any], key: str, kind: str) -> int | None:
    found: int | None = counters.get(key, {}).get(kind)
    return found
