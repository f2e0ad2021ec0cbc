"""A recording of page maps as a picture: memory over time, and the map at a few moments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.kv.page_map import PageState
from vattn.lab.charts.figure import Canvas, require_matplotlib, save_png
from vattn.lab.charts.palette import light
from vattn.lab.page_maps.page_lines import Line, lines
from vattn.lab.page_maps.page_state_charts import MEANING, colour, paint_bytes
from vattn.lab.page_maps.recorder import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOMENTS = 4


def save_page_map(recording: Recording, path: str | Path) -> None:
    """Draw it. Raises ConfigError without matplotlib."""
    require_matplotlib("a picture of page maps")
    frames = recording.frames
    count = min(MOMENTS, len(frames))
    chosen = sorted({round((i + 1) * (len(frames) - 1) / (count + 1)) for i in range(count)})
    drawn = [lines(recording.header, frames[index]) for index in chosen]
    width = max((max(line.room, len(line.cells)) for moment in drawn for line in moment), default=1)
    heights = [8.0, *(max(4, len(moment)) for moment in drawn)]

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch

        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        paint_bytes(Canvas(axes[0], narrow=False), frames)
        for axis, index, moment in zip(axes[1:], chosen, drawn, strict=True):
            _map(axis, moment, width if recording.header["unit"] == "row" else max(8, width))
            title = f"step {frames[index]['step']}, {frames[index]['time_s']:.2f} s"
            axis.set_title(title, loc="left", size=9)
        patches = [
            Patch(
                facecolor=light(colour(state)),
                label=state,
                hatch="//" if state is PageState.SHARED else None,
                edgecolor=light("back"),
            )
            for state in MEANING
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9)
        figure.suptitle(recording.describe(), size=10, x=0.01, ha="left")

    save_png(draw, Path(path), 11, 0.22 * sum(heights) + 0.7 * len(heights) + 1, dpi=150)


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
    axis.add_collection(PatchCollection(room, facecolor="none", edgecolor=light("line"), linewidth=0.6))
    for patches, alpha in ((pale, 0.3), (full, 1.0)):
        for state, found in patches.items():
            collection = PatchCollection(found, facecolor=light(colour(state)), alpha=alpha, linewidth=0)
            if state is PageState.SHARED:
                collection.set(hatch="////", edgecolor=light("back"))
            axis.add_collection(collection)
    axis.set(xlim=(0, width), ylim=(max(1, len(moment)), 0), xticks=[])
    axis.set_yticks([at + 0.5 for at in range(len(moment))], [line.label for line in moment], size=7)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
