"""Pages by state over time: bytes stacked, and every page or block as a line of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vattn import units
from vattn.kv.page_map import PageState
from vattn.lab.charts.figure import Canvas
from vattn.lab.charts.palette import light
from vattn.lab.page_maps.page_lines import unit_states
from vattn.lab.page_maps.recorder import Recording

MEANING = {
    PageState.PRIVATE: "needed by one request",
    PageState.SHARED: "needed by several requests",
    PageState.CACHED: "kept for prefix hits",
    PageState.AHEAD: "mapped ahead or surplus of a row",
    PageState.PARKED: "in a row nobody uses now",
    PageState.RETIRING: "given up, unmapped when safe",
    PageState.FREE: "in nobody's hands",
}
"""Bottom to top."""
MAX_MOMENTS, MAX_UNITS = 240, 256
"""Of the drawing with a line per unit."""


def colour(state: PageState) -> str:
    """Name in the palette."""
    return "in-use" if state is PageState.PRIVATE else str(state)


def paint_bytes(canvas: Canvas, frames: Sequence[Mapping[str, Any]]) -> None:
    """Bytes by state, stacked, and the budget."""
    ax = canvas.ax
    times = [frame["time_s"] for frame in frames]
    canvas.x_axis("seconds", units.axis)
    top = max(max(f["budget_bytes"], sum(f["bytes"].values())) for f in frames)
    canvas.y_axis("KV memory", units.nbytes, bytes_up_to=top)
    below = np.zeros(len(frames))
    for state in MEANING:
        above = below + [frame["bytes"][state] for frame in frames]
        if (above > below).any():
            shared = state is PageState.SHARED
            area = ax.fill_between(times, below, above, color=light(colour(state)), linewidth=0)
            if shared:
                area.set(hatch="////", edgecolor=light("back"))
            canvas.mark(area, f"area {colour(state)}", f"{state}: {MEANING[state]}")
        below = above
    line = ax.plot(
        times, [f["budget_bytes"] for f in frames], color=light("ink"), linestyle="--", linewidth=1
    )
    canvas.mark(line[0], "line budget", "budget")
    ax.set_xlim(times[0], times[-1] if times[-1] > times[0] else times[0] + 1)
    ax.set_ylim(bottom=0)


def drawn_units(recording: Recording) -> tuple[list[int], list[int]]:
    """Indices of moments and ids of units that are drawn of a long recording, evenly spaced."""
    count = len(recording.frames)
    moments = np.unique(np.linspace(0, count - 1, min(count, MAX_MOMENTS)).round().astype(int)).tolist()
    ids = sorted({unit for frame in recording.frames for units in frame["units"].values() for unit in units})
    return moments, ids[:: -(-len(ids) // MAX_UNITS) or 1]


def paint_units(canvas: Canvas, recording: Recording) -> None:
    """Every page, block or row over time, by what it was there for."""
    ax, header = canvas.ax, recording.header
    at, ids = drawn_units(recording)
    frames = [recording.frames[i] for i in at]
    times = [float(frame["time_s"]) for frame in frames]
    end = times[-1] + (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else times[0] + 1
    moments = [unit_states(frame) for frame in frames]
    canvas.x_axis("seconds", units.axis)
    ax.set(xlim=(times[0], end), ylim=(max(1, len(ids)), 0), yticks=[], ylabel=f"{header['unit']}s")
    ax.grid(visible=False)
    for state in PageState:
        spans: list[tuple[float, float, int]] = []
        for line, unit in enumerate(ids):
            spans += _stretches([m.get(unit) is state for m in moments], [*times, end], line)
        if spans:
            bars = ax.hlines(  # one mark for all units of a state keeps the page small
                [line + 0.5 for *_, line in spans],
                [start for start, *_ in spans],
                [stop for _, stop, _ in spans],
                color=light(colour(state)),
                linewidth=(units_height(recording) - 60) / max(1, len(ids)),
                capstyle="butt",
            )
            canvas.mark(bars, f"unit {colour(state)}", f"{state}: {MEANING[state]}")


def _stretches(there: Sequence[bool], times: Sequence[float], line: int) -> list[tuple[float, float, int]]:
    """Start, end and line of each run of True."""
    padded = np.diff(np.array([False, *there, False]).astype(int))
    starts, stops = np.flatnonzero(padded == 1), np.flatnonzero(padded == -1)
    return [(times[int(a)], times[int(b)], line) for a, b in zip(starts, stops, strict=True)]


def units_height(recording: Recording) -> int:
    """Of the drawing by `paint_units`, in units of the chart."""
    return max(150, min(520, 3 * len(drawn_units(recording)[1]))) + 60
