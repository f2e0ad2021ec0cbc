"""Charts of medians: a metric of every run as bars, and attention by context length."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from vattn import units
from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.bench.metric_table import METRICS
from vattn.lab.charts.figure import Canvas
from vattn.lab.charts.palette import light
from vattn.lab.report.parts import Chart, full_chart, small_chart
from vattn.lab.report.style import Look

LONGEST_NAME = 22
"""Characters of a run's name on one line."""


def bar_chart(runs: Sequence[Run], look: Look, key: str, title: str) -> Chart | None:
    """A metric of every run as a bar from nought, with its interval as a whisker."""
    shown = [(run, run.summary[key]) for run in runs if run.summary.get(key)]
    if not shown or not any(s["high"] for _, s in shown):
        return None
    show = METRICS[key].show
    names = [textwrap.fill(run.name, LONGEST_NAME, break_on_hyphens=True) for run, _ in shown]

    def paint(canvas: Canvas) -> None:
        ax = canvas.ax
        most = max(float(s["high"]) for _, s in shown)
        # Room for the longest value behind the longest bar.
        ax.set_xlim(0, most * (1.12 + 0.03 * max(len(show(s["median"])) for _, s in shown)))
        ax.set_ylim(len(shown) - 0.5, -0.5)
        ax.set_yticks(range(len(shown)), names, color=light("ink"))
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False)
        ax.xaxis.set_visible(False)
        ax.spines["bottom"].set_visible(False)
        for at, (run, s) in enumerate(shown):
            [bar] = ax.barh(at, s["median"], 0.64, color=light(look[run.name].colour))
            words = f"{run.name}: {show(s['median'])} [{show(s['low'])} – {show(s['high'])}]"
            canvas.mark(bar, f"bar {look[run.name].colour}", words)
            if s["low"] != s["high"]:
                error = [[s["median"] - s["low"]], [s["high"] - s["median"]]]
                ax.errorbar(s["median"], at, xerr=error, color=light("ink"), capsize=3, linewidth=1.2)
            end = max(s["high"], s["median"])
            ax.annotate(
                show(s["median"]), (end, at), (6, 0), textcoords="offset points", va="center", weight="bold"
            )

    lines = sum(name.count("\n") + 1 for name in names)
    return small_chart(title, paint, 16 + 24 * max(len(shown), round(0.6 * lines)))


def kernel_chart(bench: Bench, look: Look) -> Chart | None:
    """Attention alone by context length."""
    points: dict[str, list[Mapping[str, Any]]] = {
        run.name: list(run.record["points"]) for run in bench.runs if run.record.get("points")
    }
    if not points:
        return None

    def paint(canvas: Canvas) -> None:
        canvas.x_axis("tokens of context", units.axis)
        canvas.y_axis("µs", units.axis)
        for name, found in points.items():
            style = look[name]
            xs, us = [p["context"] for p in found], [p["attend_us"] for p in found]
            [line] = canvas.ax.plot(xs, [u["median"] for u in us], **style.line())
            canvas.mark(line, f"line {style.colour}", name)
            canvas.ax.vlines(
                xs, [u["low"] for u in us], [u["high"] for u in us], light(style.colour), linewidth=1.2
            )
            for x, u in zip(xs, us, strict=True):
                [dot] = canvas.ax.plot(x, u["median"], marker="o", markersize=5, color=light(style.colour))
                canvas.mark(dot, f"dot {style.colour}", f"{name}, {x:,} tokens: {u['median']:,.0f} µs")
        canvas.ax.set_xlim(left=0)
        canvas.ax.set_ylim(bottom=0)

    return full_chart("Attention over all layers by context length", paint, 300)
