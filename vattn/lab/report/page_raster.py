"""The page map over time: every page or block a line, coloured by what it was there for.

page 0   |#####====........#########|      # private   = shared   . free
page 1   |  ######################  |      runs of the same state are one rectangle
"""

from __future__ import annotations

from collections.abc import Mapping

from vattn.kv.page_map import PageState
from vattn.lab.page_maps.page_lines import unit_states
from vattn.lab.page_maps.recorder import Recording
from vattn.lab.report import units
from vattn.lab.report.series import thin
from vattn.lab.report.svg import Chart

MAX_MOMENTS, MAX_UNITS = 240, 256
MEANING = {
    PageState.PRIVATE: "needed by one request",
    PageState.SHARED: "needed by several",
    PageState.CACHED: "kept for prefix hits",
    PageState.AHEAD: "mapped ahead, or surplus of a row",
    PageState.PARKED: "in a row nobody uses now",
    PageState.RETIRING: "given up, unmapped when safe",
    PageState.FREE: "in nobody's hands",
}


def raster(recording: Recording) -> tuple[str, str]:
    """The drawing, and a word on what was left out."""
    frames = [recording.frames[i] for i in thin([0.0] * len(recording.frames), MAX_MOMENTS)]
    moments = [unit_states(frame) for frame in frames]
    ids = sorted({unit for states in moments for unit in states})
    every = -(-len(ids) // MAX_UNITS)
    shown = ids[::every]
    times = [float(frame["time_s"]) for frame in frames]
    end = times[-1] + (times[-1] - times[0]) / max(1, len(times) - 1) if len(times) > 1 else times[0] + 1
    header = recording.header
    chart = Chart(
        f"{header['backend']}: every {header['unit']} over time",
        (times[0], end),
        (0, max(1, len(shown))),
        "seconds",
        f"{header['unit']}s",
        units.axis,
        units.axis,
        width=1060,
        height=max(150, min(520, 3 * len(shown))) + 70,
        y_ticks=(),
    )
    for at, unit in enumerate(shown):
        _line(
            chart,
            [states.get(unit) for states in moments],
            [*times, end],
            len(shown) - at - 1,
            f"{header['unit']} {unit}",
        )
    notes = []
    if every > 1:
        notes.append(f"every {every}th of {len(ids):,} {header['unit']}s is drawn")
    if len(frames) < len(recording.frames):
        notes.append(f"{len(frames)} of {len(recording.frames):,} moments are drawn")
    return chart.svg(), ("; ".join(notes) + ".").capitalize() if notes else ""


def _line(chart: Chart, states: list[PageState | None], times: list[float], y: int, name: str) -> None:
    begun = 0
    for at in range(1, len(states) + 1):
        if at == len(states) or states[at] != states[begun]:
            state = states[begun]
            if state is not None:
                chart.rect(times[begun], times[at], y, y + 1, f"s-{state}", f"{name}: {state}")
            begun = at


def legend(recording: Recording) -> str:
    """Of the states that occur."""
    totals: Mapping[str, int] = {
        state: sum(frame["bytes"].get(state, 0) for frame in recording.frames) for state in PageState
    }
    items = "".join(
        f'<li><i class="box s-{state}"></i>{state} <span>{words}</span></li>'
        for state, words in MEANING.items()
        if totals[state]
    )
    return f'<ul class="legend">{items}</ul>'
