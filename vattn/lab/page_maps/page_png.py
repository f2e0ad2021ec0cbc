"""A recording of page maps as a picture: memory over time, and the map at a few moments. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vattn.errors import ConfigError
from vattn.kv.page_map import PageState
from vattn.lab.page_maps.page_chart import MEANING
from vattn.lab.page_maps.page_html import subtitle
from vattn.lab.page_maps.page_lines import Line, lines
from vattn.lab.page_maps.recorder import Recording

COLOURS = {
    PageState.PRIVATE: "#2f6fd0",
    PageState.SHARED: "#a2378f",
    PageState.CACHED: "#1f8a5b",
    PageState.AHEAD: "#6fb7e8",
    PageState.PARKED: "#d98a1f",
    PageState.RETIRING: "#c2402b",
    PageState.FREE: "#d5d7dc",
}
MOMENTS = 4


def save_png(recording: Recording, path: str | Path) -> None:
    """Draw it. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError("a PNG needs matplotlib: pip install 'vattn[bench]', or ask for HTML") from error

    frames = recording.frames
    count = min(MOMENTS, len(frames))
    chosen = sorted({round((i + 1) * (len(frames) - 1) / (count + 1)) for i in range(count)})
    drawn = [lines(recording.header, frames[index]) for index in chosen]
    width = max((max(line.room, len(line.cells)) for moment in drawn for line in moment), default=1)
    heights = [8.0, *(max(4, len(moment)) for moment in drawn)]
    figure = Figure(figsize=(11, 0.22 * sum(heights) + 0.7 * len(heights) + 1), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _stack(axes[0], frames)
    for axis, index, moment in zip(axes[1:], chosen, drawn, strict=True):
        _map(axis, moment, width if recording.header["unit"] == "row" else max(8, width))
        axis.set_title(f"step {frames[index]['step']}, {frames[index]['time_s']:.2f} s", loc="left", size=9)
    patches = [
        Patch(facecolor=colour, label=state, hatch="//" if state is PageState.SHARED else None, edgecolor="w")
        for state, colour in COLOURS.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.suptitle(subtitle(recording), size=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150, format="png")


def _stack(axis: Any, frames: list[dict[str, Any]]) -> None:
    times = [frame["time_s"] for frame in frames]
    series = [[frame["bytes"][state] / 2**20 for frame in frames] for state in MEANING]
    layers = axis.stackplot(times, series, colors=[COLOURS[state] for state in MEANING])
    layers[list(MEANING).index(PageState.SHARED)].set(hatch="//", edgecolor="white", linewidth=0)
    axis.plot(times, [f["budget_bytes"] / 2**20 for f in frames], "k--", linewidth=1, label="budget")
    axis.set(ylabel="MiB", xlabel="seconds", xlim=(times[0], times[-1] or 1))
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)


def _map(axis: Any, moment: list[Line], width: int) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    pale: dict[PageState, list[Any]] = {}
    full: dict[PageState, list[Any]] = {}
    room = []
    for at, line in enumerate(moment):
        room.append(Rectangle((0, at + 0.1), line.room, 0.8))
        for position, cell in enumerate(line.cells):
            if cell.fill < 1:
                pale.setdefault(cell.state, []).append(Rectangle((position, at + 0.1), 0.92, 0.8))
            full.setdefault(cell.state, []).append(Rectangle((position, at + 0.1), 0.92 * cell.fill, 0.8))
    axis.add_collection(PatchCollection(room, facecolor="none", edgecolor="#d9d9e0", linewidth=0.6))
    for patches, alpha in ((pale, 0.3), (full, 1.0)):
        for state, found in patches.items():
            collection = PatchCollection(found, facecolor=COLOURS[state], alpha=alpha, linewidth=0)
            if state is PageState.SHARED:
                collection.set(hatch="////", edgecolor="white")
            axis.add_collection(collection)
    axis.set(xlim=(0, width), ylim=(max(1, len(moment)), 0), xticks=[])
    axis.set_yticks([at + 0.5 for at in range(len(moment))], [line.label for line in moment], size=7)
    axis.spines[:].set_visible(False)
