"""Memory over time: what the physical bytes are there for, and what an ideal allocator would hold."""

from __future__ import annotations

from collections.abc import Sequence

from vattn import units
from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.charts.figure import Canvas, steps
from vattn.lab.charts.palette import light
from vattn.lab.report.distributions import thin
from vattn.lab.report.parts import Chart, Key, Legend, Readout, full_chart, small_chart
from vattn.lab.report.style import MEMORY, Look

LOGICAL, SHARED, BUDGET = "", "6 3", "2 3"
"""Dashes of the lines above the areas."""


def most_bytes(bench: Bench) -> float:
    """Top of the scale that all memory charts share."""
    found = [float(bench.limits.get("kv_memory_bytes") or 0)]
    for run in bench.runs:
        found.append(float(run.options.get("kv_cache_memory_bytes") or 0))
        if run.steps and run.steps["time_s"]:
            mapped = [a + b for a, b in zip(run.steps["in_use"], run.steps["shared_saved"], strict=True)]
            found += [float(max(column)) for column in (run.steps["physical"], run.steps["logical"], mapped)]
    return max(found)


def memory_chart(bench: Bench, run: Run, end: float, top: float) -> Chart | None:
    """One run's memory up to `top` bytes, stacked by kind, over `end` seconds; None if none was recorded.

    Lines on top: logical bytes (an ideal allocator's), all that requests map where sharing saves some, and
    the budget. Between logical and in use lies waste.
    """
    log = run.steps
    if not log or not log["time_s"] or not any(log["physical"]):
        return None
    kept = thin([float(h) for h in log["in_use"]])
    times = [float(log["time_s"][i]) for i in kept]
    logical = [log["logical"][i] for i in kept]
    mapped = [log["in_use"][i] + log["shared_saved"][i] for i in kept]
    budget = run.options.get("kv_cache_memory_bytes") or bench.limits.get("kv_memory_bytes")
    stop = times[-1] + float(log["duration_s"][-1])

    def paint(canvas: Canvas) -> None:
        ax = canvas.ax
        canvas.x_axis("seconds", units.axis)
        canvas.y_axis("KV memory", units.nbytes, bytes_up_to=top)
        ax.set_xlim(0, max(end, stop))
        ax.set_ylim(0, top * 1.04)
        below = [0.0] * len(kept)
        for column, colour, label, meaning in MEMORY:
            above = [low + log[column][i] for low, i in zip(below, kept, strict=True)]
            if above != below:
                edges = ([*times, stop], [*below, below[-1]], [*above, above[-1]])
                area = ax.fill_between(*edges, step="post", color=light(colour), alpha=0.86, linewidth=0)
                canvas.mark(area, f"area {colour}", f"{label}: {meaning}")
            below = above
        if any(log["shared_saved"]):
            line = steps(canvas, times, mapped, stop, color=light("shared"), linestyle=(0, (3.4, 1.7)))
            canvas.mark(line, "line shared", "mapped by requests: what sharing saves lies above")
        line = steps(canvas, times, logical, stop, color=light("ink"), linewidth=1.6)
        canvas.mark(line, "line logical", "logical: tokens x bytes of a token")
        if budget:
            line = ax.axhline(budget, color=light("soft"), linewidth=1.4, linestyle=(0, (1.4, 2.1)))
            canvas.mark(line, "line budget", "budget")

    names = [(label, [log[column][i] for i in kept]) for column, _, label, _ in MEMORY]
    names += [("logical", logical), ("saved by sharing", [log["shared_saved"][i] for i in kept])]
    names += [("wasted", [log["tail_waste"][i] + log["external_waste"][i] for i in kept])]
    rows = [(name, [units.nbytes(v) for v in values]) for name, values in names if any(values)]
    rows += [(name, [units.number(log[name][i]) for i in kept]) for name in ("running", "waiting")]
    return full_chart(f"{run.name}: memory by kind", paint, 260, Readout(times, rows))


def memory_legend(bench: Bench) -> Legend:
    """Of all memory charts."""
    logs = [run.steps for run in bench.runs if run.steps]
    keys = [
        Key(colour, label, meaning)
        for column, colour, label, meaning in MEMORY
        if any(any(log[column]) for log in logs)
    ]
    waste = "an ideal allocator, no sharing; waste lies between it and what is in use"
    keys.append(Key("ink", "logical", waste, LOGICAL))
    if any(any(log["shared_saved"]) for log in logs):
        keys.append(Key("shared", "mapped by requests", "above in use: saved by sharing", SHARED))
    return Legend([*keys, Key("soft", "budget", dash=BUDGET)])


def queue_chart(runs: Sequence[Run], look: Look, column: str, end: float) -> Chart | None:
    """Requests running or waiting over time, a line per run."""
    watched = [run for run in runs if run.steps and run.steps["time_s"]]
    if not watched:
        return None

    def paint(canvas: Canvas) -> None:
        canvas.x_axis("seconds", units.axis)
        canvas.y_axis("requests", units.axis, whole=True)
        for run in watched:
            kept = thin([float(v) for v in run.steps[column]], 300)
            times, values = ([run.steps[c][i] for i in kept] for c in ("time_s", column))
            stop = run.steps["time_s"][-1] + run.steps["duration_s"][-1]
            line = steps(canvas, times, values, stop, **look[run.name].line())
            canvas.mark(line, f"line {look[run.name].colour}", run.name)
        canvas.ax.set_xlim(0, end)
        canvas.ax.set_ylim(0, max(1, *(max(run.steps[column]) for run in watched)) * 1.05)

    return small_chart(f"Requests {column}", paint)
