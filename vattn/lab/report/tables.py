"""Every figure as a table: read without a script, and by a screen reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from vattn.lab.bench.read import Bench, Run
from vattn.lab.report import units
from vattn.lab.report.svg import Show

LATENCIES = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")

METRICS: tuple[tuple[str, tuple[tuple[str, str, Show], ...]], ...] = (
    (
        "Throughput",
        (
            ("duration", "duration", units.seconds),
            ("completed", "requests completed", units.number),
            ("failed", "requests failed", units.number),
            ("total_input_tokens", "prompt tokens", units.number),
            ("total_output_tokens", "output tokens", units.number),
            ("request_throughput", "requests / s", units.number),
            ("request_goodput", "goodput, requests / s", units.number),
            ("output_throughput", "output tokens / s", units.number),
            ("total_token_throughput", "all tokens / s", units.number),
        ),
    ),
    *(
        (
            name.upper(),
            tuple(
                (f"{s}_{name}_ms", {"std": "standard deviation"}.get(s, s), units.millis) for s in STATISTICS
            ),
        )
        for name in LATENCIES
    ),
    (
        "Memory",
        (
            ("peak_in_use_bytes", "peak in use", units.nbytes),
            ("peak_kv_bytes", "peak held (in use, parked, cached)", units.nbytes),
            ("peak_physical_bytes", "peak physical", units.nbytes),
            ("kv_utilization", "KV utilization", units.percent),
            ("tail_waste_share", "wasted in tails", units.percent),
            ("external_waste_share", "reserved, never used", units.percent),
            ("shared_saved_share", "saved by sharing", units.percent),
        ),
    ),
    (
        "Steps",
        (
            ("steps", "steps", units.number),
            ("mean_running", "mean running", units.number),
            ("peak_running", "peak running", units.number),
            ("attention_s", "time in attention", units.seconds),
            ("attention_share", "attention's share of the time", units.percent),
        ),
    ),
)
"""Groups of (metric, label, format)."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Cells are HTML already. The first column names the row."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption>{caption}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def metric_tables(bench: Bench) -> Iterator[str]:
    """A table per group of metrics, a column per run: median, and the interval where repeats differ."""
    runs = bench.runs
    head = ["", *(escape(run.name) for run in runs)]
    known = {key for _, metrics in METRICS for key, _, _ in metrics} | {f"p50_{n}_ms" for n in LATENCIES}
    rest = tuple((k, k.replace("_", " "), units.number) for k in _keys(runs) if k not in known)
    for title, metrics in (*METRICS, ("Others", rest)):
        rows = []
        for key, label, show in metrics:
            found = [run.summary.get(key) for run in runs]
            if any(found):
                rows.append([escape(label), *(_interval(s, show) for s in found)])
        if rows:
            yield table(head, rows, escape(title))


def _keys(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.summary))


def _interval(found: Mapping[str, Any] | None, show: Show) -> str:
    if found is None:
        return "–"
    if show(found["low"]) == show(found["high"]):
        return escape(show(found["median"]))
    spread = f"{show(found['low'])} – {show(found['high'])}"
    return f'{escape(show(found["median"]))} <span class="interval">[{escape(spread)}]</span>'


def counter_table(bench: Bench) -> str:
    """What engine, cache and driver counted, in the repeat that is drawn."""
    runs = [run for run in bench.runs if run.counters]
    keys = list(
        dict.fromkeys(k for run in runs for k, v in run.counters.items() if not isinstance(v, Mapping))
    )
    rows = []
    for key in keys:
        values = [run.counters.get(key) for run in runs]
        if any(values):
            show = (
                units.nbytes
                if "bytes" in key
                else units.seconds
                if key.endswith(("_s", "seconds"))
                else units.number
            )
            rows.append([escape(_words(key)), *("–" if v is None else escape(show(v)) for v in values)])
    return table(["", *(escape(run.name) for run in runs)], rows, "Counters") if rows else ""


def driver_table(bench: Bench) -> str:
    """Calls, their time in all and on average, by kind and run."""
    rows = []
    for run in bench.runs:
        seconds = run.counters.get("driver_seconds") or {}
        for kind, calls in (run.counters.get("driver_calls") or {}).items():
            if calls:
                spent = float(seconds.get(kind, 0.0))
                cells = [f"{calls:,}", escape(units.seconds(spent)), escape(units.seconds(spent / calls))]
                rows.append([escape(run.name), escape(kind), *cells])
    head = ["run", "call", "calls", "in all", "each, on average"]
    return table(head, rows, "Driver calls, while requests were served") if rows else ""


def kernel_table(bench: Bench) -> str:
    """Attention and planning by context."""
    rows = []
    for run in bench.runs:
        for p in run.record.get("points") or ():
            us, plan = p["attend_us"], p["plan_us"]
            attend = (
                f'{us["median"]:,.0f} <span class="interval">[{us["low"]:,.0f} – {us["high"]:,.0f}]</span>'
            )
            rows.append([escape(run.name), f"{p['context']:,}", attend, f"{plan['median']:,.0f}"])
    return table(["run", "context", "attention (µs)", "planning (µs)"], rows, "Attention") if rows else ""


def record_table(record: Mapping[str, Any], caption: str) -> str:
    """Names and values, nested ones in words."""
    rows = [[escape(_words(key)), escape(_value(key, value))] for key, value in record.items()]
    return table(["", "value"], rows, escape(caption)) if rows else ""


def length_table(bench: Bench) -> str:
    """Quantiles of the lengths of prompts and outputs."""
    import numpy as np

    run = next((run for run in bench.runs if run.requests), None)
    if run is None:
        return ""
    rows = []
    for column, label in (("prompt_len", "prompt tokens"), ("output_len", "output tokens")):
        values = np.array([r[column] for r in run.requests], np.float64)
        found = np.percentile(values, (0, 25, 50, 75, 90, 99, 100))
        rows.append([label, *(units.number(round(float(v), 1)) for v in (values.mean(), *found))])
    return table(["", "mean", "least", "25%", "median", "75%", "90%", "99%", "most"], rows, "Lengths")


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
