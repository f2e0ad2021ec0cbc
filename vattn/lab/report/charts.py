"""Distributions, bars and histograms, a colour per backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from vattn.lab.bench.read import Bench, Run
from vattn.lab.report import units
from vattn.lab.report.series import bins, ecdf, latencies, tail_fills
from vattn.lab.report.style import Style
from vattn.lab.report.svg import Chart, Show, binary_ticks

Look = Mapping[str, Style]


def run_legend(runs: Sequence[Run], look: Look) -> str:
    """Colour and dash of every run."""
    parts = []
    for run in runs:
        style = look[run.name]
        dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
        parts.append(
            '<li><svg class="key" viewBox="0 0 30 10" aria-hidden="true">'
            f'<path class="line {style.css}" d="M1 5H29"{dash}/></svg>{escape(run.name)}</li>'
        )
    return f'<ul class="legend">{"".join(parts)}</ul>'


def latency_chart(bench: Bench, name: str, look: Look) -> str | None:
    """Share of all requests (of ITL: of all gaps) that took no longer, a line per run."""
    found = {run.name: [v for v in latencies(run, name) if v > 0] for run in bench.runs}
    found = {key: values for key, values in found.items() if values}
    if not found:
        return None
    low, high = min(map(min, found.values())), max(map(max, found.values()))
    log = high / low > 20
    edges = (low, high * 1.02) if log else (0.0, high * 1.02)
    chart = Chart(
        TITLES[name],
        edges,
        (0, 1),
        "milliseconds" + (" (log)" if log else ""),
        "share of all",
        units.axis,
        units.percent,
        log_x=log,
        y_ticks=(0, 0.25, 0.5, 0.75, 1),
    )
    limit = (bench.record.get("goodput_slo") or {}).get(name)
    if limit and edges[0] <= limit <= edges[1]:
        chart.line(f"M{chart.x(limit)} {chart.y(0)}V{chart.y(1)}", "slo", f"limit: {limit:g} ms", "3 3")
        at, half = chart.x(limit), (chart.left + chart.width - chart.right) / 2
        place, anchor = (at + 4, "start") if at < half else (at - 4, "end")  # where there is room
        chart.text(place, chart.y(1) + 10, f"limit {limit:g} ms", "label", anchor)
    for key, values in found.items():
        xs, shares = ecdf(values)
        path = chart.steps([xs[0], *xs], [0.0, *shares])
        middle, late = (units.millis(float(np.percentile(values, p))) for p in (50, 99))
        words = f"{key}: median {middle}, p99 {late}, n {len(values):,}"
        chart.line(path, look[key].css, words, look[key].dash)
    return chart.svg()


TITLES = {
    "ttft": "TTFT: time to first token",
    "tpot": "TPOT: mean time per output token after the first",
    "itl": "ITL: every gap between tokens",
    "e2el": "E2EL: from arrival to the last token",
}


def length_chart(bench: Bench, column: str, title: str) -> str | None:
    """How long prompts or outputs were: the same requests for all runs."""
    run = next((run for run in bench.runs if run.requests), None)
    if run is None:
        return None
    values = [
        float(r[column]) / max(1, r.get("outputs") or 1 if column == "output_len" else 1)
        for r in run.requests
    ]
    edges, log = bins(values)
    counts, _ = np.histogram(values, edges)
    chart = Chart(
        title,
        (float(edges[0]), float(edges[-1])),
        (0, float(max(counts)) * 1.05),
        "tokens" + (" (log)" if log else ""),
        "requests",
        units.axis,
        units.axis,
        log_x=log,
        height=220,
    )
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            words = f"{math.ceil(low):,} to {math.floor(high):,} tokens: {count} requests"
            chart.rect(float(low), float(high), 0, float(count), "bar neutral", words)
    middle = float(np.median(values))
    chart.line(
        f"M{chart.x(middle)} {chart.y(0)}V{chart.top}", "mark", f"median {units.number(middle)}", "3 3"
    )
    chart.text(
        chart.x(middle) + 4, chart.top + 10, f"median {units.number(middle)}, n {len(values):,}", "label"
    )
    return chart.svg()


def fill_chart(bench: Bench, run: Run, look: Look) -> str | None:
    """How full a request's last block, page or row was when it ended."""
    fills = tail_fills(bench, run)
    if not fills:
        return None
    unit = {"static": "row", "paged": "last block", "virtual": "last page"}[run.backend]
    counts, edges = np.histogram(fills, np.linspace(0, 1, 11))
    chart = Chart(
        f"{run.name}: how full the {unit} was at the end",
        (0, 1),
        (0, float(max(counts)) * 1.05),
        f"share of the {unit} filled",
        "requests",
        units.percent,
        units.axis,
        height=220,
    )
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            words = f"{low:.0%} to {high:.0%} full: {count} requests"
            chart.rect(
                float(low) + 0.004, float(high) - 0.004, 0, float(count), f"bar {look[run.name].css}", words
            )
    mean = float(np.mean(fills))
    chart.line(f"M{chart.x(mean)} {chart.y(0)}V{chart.top}", "mark", f"mean {mean:.0%}", "3 3")
    anchor = "end" if mean > 0.7 else "start"
    chart.text(chart.x(mean) + (-4 if mean > 0.7 else 4), chart.top + 10, f"mean {mean:.0%}", "label", anchor)
    return chart.svg()


def bar_chart(
    runs: Sequence[Run], look: Look, key: str, title: str, show: Show, top: float | None = None
) -> str | None:
    """A metric of every run as a bar from nought, with its interval as a whisker."""
    shown = [(run, run.summary[key]) for run in runs if run.summary.get(key)]
    if not shown or not any(s["high"] for _, s in shown):
        return None
    height = 44 + 26 * len(shown) + 8
    most = top or max(float(s["high"]) for _, s in shown) * 1.25
    left = min(190, 22 + max(len(run.name) for run, _ in shown) * 7)
    chart = Chart(
        title,
        (0, most),
        (0, len(shown)),
        "",
        "",
        show,
        show,
        height=height,
        y_ticks=(),
        left=left,
        bottom=24,
        x_ticks=binary_ticks(most) if show is units.nbytes else None,
    )
    for at, (run, s) in enumerate(shown):
        y = len(shown) - at - 0.5
        words = f"{run.name}: {show(s['median'])} [{show(s['low'])} – {show(s['high'])}]"
        chart.rect(0, s["median"], y - 0.32, y + 0.32, f"bar {look[run.name].css}", words)
        if s["low"] != s["high"]:
            a, b, py = chart.x(s["low"]), chart.x(s["high"]), chart.y(y)
            chart.marks.append(f'<path class="whisker" d="M{a} {py}H{b}M{a} {py - 4}v8M{b} {py - 4}v8"/>')
        chart.text(chart.left - 8, chart.y(y) + 4, run.name, "", "end")
        chart.text(chart.x(max(s["high"], s["median"])) + 7, chart.y(y) + 4, show(s["median"]), "value")
    return chart.svg()


def driver_chart(runs: Sequence[Run], look: Look, kind: str) -> str | None:
    """How long one kind of driver call took, by powers of two."""
    found: dict[str, dict[int, int]] = {}
    for run in runs:
        buckets = (run.counters.get("driver_latency_log2_ns") or {}).get(kind) or {}
        if buckets:
            found[run.name] = {int(b): int(n) for b, n in buckets.items()}
    if not found:
        return None
    low, high = min(map(min, found.values())), max(map(max, found.values()))
    top = max(max(b.values()) for b in found.values())
    chart = Chart(
        kind,
        (2.0 ** (low - 1), 2.0**high),
        (0, top * 1.05),
        "duration of a call (log)",
        "calls",
        units.nanos,
        units.axis,
        log_x=True,
        height=200,
    )
    for name, buckets in found.items():
        xs = [2.0 ** (b - 1) for b in range(low, high + 1)]
        ys = [float(buckets.get(b, 0)) for b in range(low, high + 1)]
        path = chart.steps([xs[0], *xs], [0.0, *ys], 2.0**high)
        chart.marks.append(f'<path class="fill {look[name].css}" d="{path}V{chart.y(0)}Z"/>')
        chart.line(path, look[name].css, f"{name}: {sum(buckets.values()):,} calls", look[name].dash)
    return chart.svg()


def kernel_chart(bench: Bench, look: Look) -> str | None:
    """Attention alone by context length."""
    points: dict[str, list[Mapping[str, Any]]] = {
        run.name: list(run.record["points"]) for run in bench.runs if run.record.get("points")
    }
    if not points:
        return None
    contexts = sorted({p["context"] for found in points.values() for p in found})
    top = max(p["attend_us"]["high"] for found in points.values() for p in found)
    chart = Chart(
        "Attention over all layers by context length",
        (0, contexts[-1] * 1.03),
        (0, top * 1.05),
        "tokens of context",
        "µs",
        units.axis,
        units.axis,
        width=1060,
        height=320,
    )
    for name, found in points.items():
        style = look[name]
        xs, ys = [p["context"] for p in found], [p["attend_us"]["median"] for p in found]
        chart.line(chart.straight(xs, ys), style.css, name, style.dash)
        for p in found:
            us, x = p["attend_us"], chart.x(p["context"])
            spread = f"M{x} {chart.y(us['low'])}V{chart.y(us['high'])}"
            chart.marks.append(f'<path class="line thin {style.css}" d="{spread}"/>')
            words = f"{name}, {p['context']:,} tokens: {us['median']:,.0f} µs"
            y = chart.y(us["median"])
            chart.marks.append(
                f'<circle class="dot {style.css}" cx="{x}" cy="{y}" r="3.5">'
                f"<title>{escape(words)}</title></circle>"
            )
    return chart.svg()
