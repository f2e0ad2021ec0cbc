"""The picture: time of the cache, time of the model and peak memory by context length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

COLOURS = {
    "virtual": "tab:green",
    "virtual-tokens": "tab:olive",
    "dynamic": "tab:red",
    "static": "tab:blue",
    "quantized-fp8": "tab:purple",
    "quantized-quanto": "tab:brown",
    "quantized-hqq": "tab:pink",
}


def plot(report: dict[str, Any], path: Path) -> None:
    """Write a PNG; without matplotlib say so and leave it."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts, models = report["contexts"], report["models"]
    figure, grid = pyplot.subplots(len(models), 3, figsize=(15, 4.2 * len(models)), squeeze=False)
    for (name, result), (cache, model, memory) in zip(models.items(), grid, strict=True):
        for axes, kind in ((cache, "cache_s"), (model, "model_s")):
            for label, rows in result[kind].items():
                middle = [1e3 * statistics.median(row) for row in rows]
                axes.plot(contexts, middle, marker="o", label=label, color=COLOURS.get(label))
                low, high = ([1e3 * f(row) for row in rows] for f in (min, max))
                axes.fill_between(contexts, low, high, color=COLOURS.get(label), alpha=0.15)
            axes.set_ylabel("ms per token")
        for label, peaks in result["memory"].items():
            axes = memory
            axes.plot(
                contexts,
                [peak["peak"] / 2**20 for peak in peaks],
                marker="o",
                label=label,
                color=COLOURS.get(label),
            )
        used = [result["token_bytes"] * context / 2**20 for context in contexts]
        memory.plot(contexts, used, linestyle=":", color="black", label="bytes of the tokens")
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
            axes.grid(alpha=0.3)
        memory.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
