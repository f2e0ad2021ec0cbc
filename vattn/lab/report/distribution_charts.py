"""Distributions: latencies, lengths, fills of the last page, durations of driver calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vattn import units
from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.bench.metric_table import LATENCIES
from vattn.lab.charts.figure import Canvas, say, steps
from vattn.lab.charts.palette import light
from vattn.lab.report.distributions import bins, ecdf, latencies, tail_fills
from vattn.lab.report.parts import Chart, small_chart
from vattn.lab.report.style import Look

SPREAD = 20
"""Where the largest is this many times the smallest, the axis is logarithmic."""


def latency_chart(bench: Bench, name: str, look: Look) -> Chart | None:
    """Share of all requests (of ITL: of all gaps) that took no longer, a line per run."""
    found = {run.name: [v for v in latencies(run, name) if v > 0] for run in bench.runs}
    found = {key: values for key, values in found.items() if values}
    if not found:
        return None
    low, high = min(map(min, found.values())), max(map(max, found.values()))
    log = high / low > SPREAD
    limit = (bench.record.get("goodput_slo") or {}).get(name)

    def paint(canvas: Canvas) -> None:
        ax = canvas.ax
        edges = (low if log else 0, high * 1.02)
        canvas.x_axis("milliseconds" + (" (log)" if log else ""), units.axis, edges if log else None)
        ax.set_xlim(*edges)
        canvas.y_axis("share of all", units.percent)
        ax.set_ylim(0, 1.02)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
        if limit and edges[0] <= limit <= edges[1]:
            words = f"limit {limit:g} ms"
            _upright(canvas, limit, words, "limit")
        for key, values in found.items():
            xs, shares = ecdf(values)
            middle, late = (units.millis(float(np.percentile(values, p))) for p in (50, 99))
            line = steps(canvas, [xs[0], *xs], [0.0, *shares], **look[key].line())
            words = f"{key}: median {middle}, p99 {late}, n {len(values):,}"
            canvas.mark(line, f"line {look[key].colour}", words)

    return small_chart(f"{name.upper()}: {LATENCIES[name][0]}", paint)


def _bars(
    canvas: Canvas, edges: Sequence[float], counts: Sequence[int], colour: str, words: Sequence[str]
) -> None:
    for low, high, count, said in zip(edges[:-1], edges[1:], counts, words, strict=True):
        if count:
            [bar] = canvas.ax.bar(low, count, high - low, align="edge", color=light(colour))
            bar.set(edgecolor=light("back"), linewidth=0.6)
            canvas.mark(bar, f"bar {colour}", said)
    canvas.ax.set_ylim(0, max(counts) * 1.18)
    canvas.ax.set_xlim(edges[0], edges[-1])
    canvas.y_axis("requests", units.axis, whole=True)


def _upright(canvas: Canvas, x: float, words: str, kind: str) -> None:
    """A vertical line with its meaning beside it."""
    line = canvas.ax.axvline(x, color=light("ink"), linewidth=1.2, linestyle=(0, (3, 3)))
    canvas.mark(line, kind, words)
    say(canvas.ax, x, words)


def length_chart(bench: Bench, column: str, title: str) -> Chart | None:
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
    words = [
        f"{math.ceil(low):,} to {math.floor(high):,} tokens: {count} requests"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]

    def paint(canvas: Canvas) -> None:
        canvas.x_axis(
            "tokens" + (" (log)" if log else ""), units.axis, (edges[0], edges[-1]) if log else None
        )
        _bars(canvas, list(map(float, edges)), list(map(int, counts)), "neutral", words)
        middle = float(np.median(values))
        _upright(canvas, middle, f"median {units.number(middle)}, n {len(values):,}", "middle")

    return small_chart(title, paint, 210)


def fill_chart(bench: Bench, run: Run, look: Look) -> Chart | None:
    """How full a request's last block, page or row was when it ended."""
    fills = tail_fills(bench, run)
    if not fills:
        return None
    unit = {"static": "row", "paged": "last block", "virtual": "last page"}[run.backend]
    counts, edges = np.histogram(fills, np.linspace(0, 1, 11))
    words = [
        f"{low:.0%} to {high:.0%} full: {count} requests"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]

    def paint(canvas: Canvas) -> None:
        canvas.x_axis(f"share of the {unit} filled", units.percent)
        _bars(canvas, list(map(float, edges)), list(map(int, counts)), look[run.name].colour, words)
        _upright(canvas, float(np.mean(fills)), f"mean {np.mean(fills):.0%}", "middle")

    return small_chart(f"{run.name}: how full the {unit} was at the end", paint, 210)


def driver_chart(runs: Sequence[Run], look: Look, kind: str) -> Chart | None:
    """How long one kind of driver call took, by powers of two."""
    found: dict[str, dict[int, int]] = {}
    for run in runs:
        buckets = (run.counters.get("driver_latency_log2_ns") or {}).get(kind) or {}
        if buckets:
            found[run.name] = {int(b): int(n) for b, n in buckets.items()}
    if not found:
        return None
    low, high = min(map(min, found.values())), max(map(max, found.values()))

    def paint(canvas: Canvas) -> None:
        canvas.x_axis("duration of a call (log)", units.nanos, (2.0 ** (low - 1), 2.0**high))
        canvas.y_axis("calls", units.axis, whole=True)
        xs = [2.0 ** (b - 1) for b in range(low, high + 1)]
        for name, buckets in found.items():
            ys = [float(buckets.get(b, 0)) for b in range(low, high + 1)]
            area: dict[str, Any] = {"color": light(look[name].colour), "alpha": 0.16, "linewidth": 0}
            canvas.ax.fill_between([*xs, 2.0**high], [*ys, ys[-1]], step="post", **area)
            line = steps(canvas, [xs[0], *xs], [0.0, *ys], 2.0**high, **look[name].line())
            canvas.mark(line, f"line {look[name].colour}", f"{name}: {sum(buckets.values()):,} calls")
        canvas.ax.set_ylim(bottom=0)

    return small_chart(kind, paint, 200)
