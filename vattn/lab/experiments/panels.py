"""An experiment's figure: panels side by side, in the colours of `vattn.lab.charts.palette`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError
from vattn.lab.charts.figure import require_matplotlib, save_png
from vattn.lab.charts.palette import SERIES, light
from vattn.lab.experiments.experiment import Experiment, Parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "static": light("static"),
    "paged": light("paged"),
    "virtual": light("virtual"),
    "virtual, interleaved": light("virtual-2"),
}
USED, WASTE, UNUSED = light("in-use"), light("parked"), light("free")
"""Of memory: holds tokens, lies behind them, is never written."""


def check_figure(file: Path | None) -> None:
    """Raise ConfigError before a run whose figure could not be made."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--figure {file}: there is no folder {file.absolute().parent}")
    require_matplotlib(f"--figure {file}")


def save(experiment: Experiment, parts: Parts, file: Path) -> None:
    """Draw an experiment's figure as PNG."""
    save_png(lambda figure: experiment.draw(parts, figure), file, 9.2, 3.5)


def axes(figure: Figure, columns: int = 2) -> list[Axes]:
    return [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def colour(name: str, index: int = 0) -> str:
    return COLOURS.get(name, SERIES[index % len(SERIES)])


def bars(
    ax: Axes, labels: list[str], values: list[tuple[float, float, float]], title: str, unit: str, **kw: Any
) -> None:
    """One bar per label with its interval, values as `reading.bounds` has them; the number stands on top."""
    heights = [v[0] for v in values]
    errors = [[v[1] for v in values], [v[2] for v in values]]
    colours = kw.pop("colours", None) or [colour(label, i) for i, label in enumerate(labels)]
    ax.bar(range(len(labels)), heights, yerr=errors, capsize=3, color=colours, width=0.65)
    for i, (height, _, up) in enumerate(values):
        ax.annotate(
            f"{height:,.3g}" if height < 1000 else f"{height:,.0f}",
            (i, height + up),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    ax.set_xticks(range(len(labels)), labels, **kw)
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.15)
