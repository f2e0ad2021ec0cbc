"""One look for all figures: light, and told apart by anyone (the palette of Okabe and Ito)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError
from vattn.lab.experiments.base import Experiment, Parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000")
COLOURS = {
    "static": "#D55E00",
    "paged": "#0072B2",
    "virtual": "#009E73",
    "virtual, interleaved": "#56B4E9",
}
"""A backend has one colour in all figures."""
WASTE, USED, UNUSED = "#E69F00", "#009E73", "#D55E00"


def check_figure(file: Path | None) -> None:
    """Raise ConfigError before a run whose figure could not be made."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--figure {file}: there is no folder {file.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as why:
        raise ConfigError(f"--figure {file} needs matplotlib: pip install 'vattn[bench]'") from why


def save(experiment: Experiment, parts: Parts, file: Path) -> None:
    """Draw an experiment's figure as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: dict[str, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E3E3E3",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "legend.fontsize": 8,
        "legend.frameon": False,
    }
    with rc_context(look):
        figure = Figure(figsize=(9.2, 3.5), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        experiment.draw(parts, figure)
        figure.savefig(file, dpi=110, metadata={"Software": None})


def axes(figure: Figure, columns: int = 2) -> list[Axes]:
    return [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def colour(name: str, index: int = 0) -> str:
    return COLOURS.get(name, PALETTE[index % len(PALETTE)])


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
