"""A recording of page maps as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vattn.lab.charts.figure import require_matplotlib
from vattn.lab.page_maps.page_lines import lines, owners
from vattn.lab.page_maps.page_state_charts import MEANING, colour, paint_bytes
from vattn.lab.page_maps.recorder import Recording
from vattn.lab.report.parts import Table, full_chart
from vattn.lab.templating import render
from vattn.units import nbytes


def page_map_html(recording: Recording) -> str:
    """The page: the chart, the map with a slider over time, the figures as a table.

    It opens at the moment at which live requests held most. Raises ConfigError without matplotlib.
    """
    require_matplotlib("a page of page maps")
    frames, first = recording.frames, recording.fullest()
    return render(
        "page_map.html",
        title="Page map",
        subtitle=recording.describe(),
        unit=recording.header["unit"],
        states=[(str(state), colour(state), meaning) for state, meaning in MEANING.items()],
        chart=full_chart("Memory by state", lambda canvas: paint_bytes(canvas, frames), 220),
        moment=words(frames[first]),
        first=first,
        last=len(frames) - 1,
        table=_table(recording),
        data=_data(recording),
    )


def words(frame: Mapping[str, Any]) -> str:
    """One moment in a sentence."""
    held = ", ".join(f"{s} {nbytes(frame['bytes'][s])}" for s in MEANING if frame["bytes"][s])
    queue = ""
    if "running" in frame:
        queue = f" {frame['running']} running, {frame['waiting']} waiting."
    return f"Step {frame['step']}, {frame['time_s']:.2f} s.{queue} {held or 'nothing held'}."


def _data(recording: Recording) -> dict[str, Any]:
    return {
        "unit": recording.header["unit"],
        "meaning": MEANING,
        "colour": {state: colour(state) for state in MEANING},
        "frames": [
            {
                "time_s": frame["time_s"],
                "words": words(frame),
                "lines": [line._asdict() for line in lines(recording.header, frame)],
                "owners": owners(frame),
                "cached": frame["in_prefix_cache"],
            }
            for frame in recording.frames
        ],
    }


def _table(recording: Recording) -> Table:
    rows = [
        [
            f"{frame['step']}",
            f"{frame['time_s']:.3f}",
            *(f"{frame['bytes'][state]:,}" for state in MEANING),
            f"{frame['budget_bytes']:,}",
        ]
        for frame in recording.frames
    ]
    return Table("", ["step", "seconds", *map(str, MEANING), "budget"], rows)
