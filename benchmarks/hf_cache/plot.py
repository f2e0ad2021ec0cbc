"""The picture: time of the cache, time of the model and peak memory by context length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError
from vattn.lab.charts.figure import require_matplotlib, save_png
from vattn.lab.charts.palette import SERIES, light

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "virtual": light("virtual"),
    "virtual-tokens": light("virtual-2"),
    "static": light("static"),
    "dynamic": SERIES[1],
    "quantized-fp8": SERIES[0],
    "quantized-quanto": SERIES[3],
    "quantized-hqq": SERIES[4],
}


def plot(report: dict[str, Any], path: Path) -> None:
    """Write a PNG; without matplotlib say so and leave it."""
    try:
        require_matplotlib("the picture")
    except ConfigError as why:
        print(f"no picture: {why}")
        return
    save_png(lambda figure: _draw(report, figure), path, 15, 4.2 * len(report["models"]))


def _draw(report: dict[str, Any], figure: Figure) -> None:
    contexts, models = report["contexts"], report["models"]
    grid = figure.subplots(len(models), 3, squeeze=False)
    for (name, result), (cache, model, memory) in zip(models.items(), grid, strict=True):
        for axes, kind in ((cache, "cache_s"), (model, "model_s")):
            for label, rows in result[kind].items():
                middle = [1e3 * statistics.median(row) for row in rows]
                axes.plot(contexts, middle, marker="o", label=label, color=COLOURS.get(label))
                low, high = ([1e3 * f(row) for row in rows] for f in (min, max))
                axes.fill_between(contexts, low, high, color=COLOURS.get(label), alpha=0.15)
            axes.set_ylabel("ms per token")
        for label, peaks in result["memory"].items():
            shown = [peak["peak"] / 2**20 for peak in peaks]
            memory.plot(contexts, shown, marker="o", label=label, color=COLOURS.get(label))
        used = [result["token_bytes"] * context / 2**20 for context in contexts]
        memory.plot(contexts, used, linestyle=":", color=light("ink"), label="bytes of the tokens")
        memory.set_ylabel("peak MiB")
        for axes, title in (
            (cache, "cache alone"),
            (model, "whole model"),
            (memory, "peak memory of the cache"),
        ):
            axes.set_title(f"{name}: {title}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("tokens in the cache")
        memory.legend(fontsize=8)
