"""Memory over time: what the physical bytes are there for, and what an ideal allocator would hold."""

from __future__ import annotations

from vattn.lab.bench.read import Bench, Run
from vattn.lab.report import units
from vattn.lab.report.series import thin
from vattn.lab.report.style import MEMORY, Style
from vattn.lab.report.svg import Chart, binary_ticks


def most_bytes(bench: Bench) -> float:
    """Top of the scale that all memory charts share."""
    found = [float(bench.limits.get("kv_memory_bytes") or 0)]
    for steps in (run.steps for run in bench.runs if run.steps and run.steps["time_s"]):
        mapped = [a + b for a, b in zip(steps["in_use"], steps["shared_saved"], strict=True)]
        found += [float(max(column)) for column in (steps["physical"], steps["logical"], mapped)]
    return max(found)


def memory_chart(bench: Bench, run: Run, end: float, top: float) -> str | None:
    """One run's memory up to `top` bytes, stacked by kind, over `end` seconds; None if none was recorded.

    Lines on top: logical bytes (an ideal allocator's), all that requests map where sharing saves some, and
    the budget. Between logical and in use lies waste.
    """
    steps = run.steps
    if not steps or not steps["time_s"] or not any(steps["physical"]):
        return None
    kept = thin([float(h) for h in steps["in_use"]])
    times = [float(steps["time_s"][i]) for i in kept]
    mapped = [steps["in_use"][i] + steps["shared_saved"][i] for i in kept]
    logical = [steps["logical"][i] for i in kept]
    budget = run.options.get("kv_cache_memory_bytes") or bench.limits.get("kv_memory_bytes")
    top = max(top, budget or 0)
    stop = times[-1] + float(steps["duration_s"][-1])
    chart = Chart(
        f"{run.name}: memory by kind",
        (0, max(end, stop)),
        (0, top * 1.04),
        "seconds",
        "KV memory",
        units.axis,
        units.nbytes,
        width=1060,
        height=270,
        y_ticks=binary_ticks(top),
    )
    below = [0] * len(kept)
    for kind, label, meaning in MEMORY:
        above = [low + steps[kind][i] for low, i in zip(below, kept, strict=True)]
        if above != below:
            chart.area(times, below, above, stop, f"m-{kind}", f"{label}: {meaning}")
        below = above
    if any(steps["shared_saved"]):
        chart.line(
            chart.steps(times, mapped, stop),
            "m-shared",
            "mapped by requests: what sharing saves lies above",
            "6 3",
        )
    chart.line(chart.steps(times, logical, stop), "m-logical", "logical: tokens x bytes of a token")
    if budget:
        chart.line(f"M{chart.x(0)} {chart.y(budget)}H{chart.x(max(end, stop))}", "m-budget", "budget", "2 3")
    names = [(label, [steps[kind][i] for i in kept]) for kind, label, _ in MEMORY]
    names += [("logical", logical), ("saved by sharing", [steps["shared_saved"][i] for i in kept])]
    waste = [steps["tail_waste"][i] + steps["external_waste"][i] for i in kept]
    names += [("wasted", waste)]
    rows = [(name, [units.nbytes(v) for v in values]) for name, values in names if any(values)]
    rows += [(name, [units.number(steps[name][i]) for i in kept]) for name in ("running", "waiting")]
    chart.read(times, rows)
    return chart.svg()


def legend(bench: Bench) -> str:
    """Of all memory charts."""
    columns = [run.steps for run in bench.runs if run.steps]
    parts = [
        f'<li><i class="box m-{kind}"></i>{label} <span>{meaning}</span></li>'
        for kind, label, meaning in MEMORY
        if any(any(steps[kind]) for steps in columns)
    ]
    parts.append(
        '<li><i class="stroke m-logical"></i>logical <span>an ideal allocator, no sharing; waste lies '
        "between it and what is in use</span></li>"
    )
    if any(any(steps["shared_saved"]) for steps in columns):
        parts.append(
            '<li><i class="stroke dashed m-shared"></i>mapped by requests '
            "<span>above in use: saved by sharing</span></li>"
        )
    parts.append('<li><i class="stroke dotted m-budget"></i>budget</li>')
    return f'<ul class="legend">{"".join(parts)}</ul>'


def queue_chart(runs: list[Run], look: dict[str, Style], column: str, end: float) -> str | None:
    """Requests running or waiting over time, a line per run."""
    watched = [run for run in runs if run.steps and run.steps["time_s"]]
    if not watched:
        return None
    top = max(max(run.steps[column]) for run in watched)
    chart = Chart(
        f"Requests {column}",
        (0, end),
        (0, max(1, top) * 1.05),
        "seconds",
        "requests",
        units.axis,
        units.axis,
    )
    for run in watched:
        steps = run.steps
        kept = thin([float(v) for v in steps[column]], 300)
        times, values = [steps["time_s"][i] for i in kept], [steps[column][i] for i in kept]
        stop = steps["time_s"][-1] + steps["duration_s"][-1]
        chart.line(chart.steps(times, values, stop), look[run.name].css, run.name, look[run.name].dash)
    return chart.svg()
