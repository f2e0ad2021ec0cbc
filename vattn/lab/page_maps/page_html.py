"""A recording of page maps as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from vattn.kv.page_map import PageState
from vattn.lab.page_maps.page_chart import MEANING, format_bytes, stacked_svg, times
from vattn.lab.page_maps.page_lines import lines, owners
from vattn.lab.page_maps.recorder import Recording


def page_map_html(recording: Recording) -> str:
    """The page: the chart, the map with a slider over time, the figures as a table.

    It opens at the moment at which live requests held most.
    """
    header, frames = recording.header, recording.frames
    first = fullest(recording)
    template = Template((files("vattn.lab.page_maps") / "page_map.html").read_text(encoding="utf-8"))
    return template.substitute(
        subtitle=escape(subtitle(recording)),
        unit=escape(header["unit"]),
        legend="".join(_legend(state) for state in MEANING) + _PALE,
        chart=stacked_svg(frames, first),
        moment=escape(words(frames[first])),
        first=first,
        last=len(frames) - 1,
        table=_table(recording),
        data=_script_json(_data(recording)),
    )


def fullest(recording: Recording) -> int:
    """Index of the moment at which live requests needed most, and of these the one with most tokens."""

    def needed(index: int) -> tuple[int, int]:
        frame = recording.frames[index]
        tokens = sum(row["tokens"] for row in frame["rows"])
        return frame["bytes"]["private"] + frame["bytes"]["shared"], tokens

    return max(range(len(recording.frames)), key=needed)


def subtitle(recording: Recording) -> str:
    """What is shown, in a sentence."""
    header, frames = recording.header, recording.frames
    size = f"{format_bytes(header['unit_bytes'])}, {header['unit_tokens']:g} tokens"
    moments = "1 moment" if len(frames) == 1 else f"{len(frames)} moments"
    return f"{header['backend']}: every {header['unit']} is {size}. {moments}, {frames[-1]['step']} steps."


def words(frame: Mapping[str, Any]) -> str:
    """One moment in a sentence."""
    held = ", ".join(f"{s} {format_bytes(frame['bytes'][s])}" for s in MEANING if frame["bytes"][s])
    queue = ""
    if "running" in frame:
        queue = f" {frame['running']} running, {frame['waiting']} waiting."
    return f"Step {frame['step']}, {frame['time_s']:.2f} s.{queue} {held or 'nothing held'}."


def _data(recording: Recording) -> dict[str, Any]:
    frames = []
    for frame, x in zip(recording.frames, times(recording.frames), strict=True):
        frames.append(
            {
                "x": x,
                "words": words(frame),
                "lines": [line._asdict() for line in lines(recording.header, frame)],
                "owners": owners(frame),
                "cached": frame["in_prefix_cache"],
            }
        )
    return {"unit": recording.header["unit"], "meaning": MEANING, "frames": frames}


def _script_json(data: dict[str, Any]) -> str:
    """JSON that can't end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _legend(state: PageState) -> str:
    hatch = '<rect class="hatch" width="16" height="16"/>' if state is PageState.SHARED else ""
    box = f'<svg viewBox="0 0 16 16"><rect class="s-{state}" width="16" height="16"/>{hatch}</svg>'
    return f"<li>{box}{state} <span>{MEANING[state]}</span></li>"


_PALE = (
    '<li><svg viewBox="0 0 16 16"><rect class="s-private dim" width="16" height="16"/></svg>pale'
    " <span>no token there (yet)</span></li>"
)


def _table(recording: Recording) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("step", "seconds", *MEANING, "budget"))
    rows = []
    for frame in recording.frames:
        cells = [f"{frame['step']}", f"{frame['time_s']:.3f}"]
        cells += [f"{frame['bytes'][state]:,}" for state in MEANING] + [f"{frame['budget_bytes']:,}"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
