"""Figures of one look, and what becomes of them: SVG inside a page, or a PNG.

matplotlib writes light colours; `svg` turns them into the variables of `palette.css_variables`, so that one
drawing serves light and dark pages. Text stays text: it is searched, read aloud and set in the page's font.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from vattn.errors import ConfigError
from vattn.lab.charts.palette import COLOURS, light

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_VARIABLES = {colour.light: f"var(--{name})" for name, colour in COLOURS.items()}
_FLUFF = re.compile(
    r"<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL
)
_OWN_IDS = re.compile(r' id="(?![mph][0-9a-f]{10}")[^"]*"')
"""Of groups: no two charts of a page may have the same. Ids of markers, clip paths and hatches are hashes."""
_TAGS = re.compile("<[^>]+>")
_LONG_NUMBERS = re.compile(r"-?\d+\.\d{2,}")


def require_matplotlib(what: str) -> None:
    """Raise ConfigError, before anything is run or read, where `what` could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as why:
        raise ConfigError(f"{what} needs matplotlib: pip install 'vattn[bench]'") from why


@contextmanager
def look(**more: Any) -> Iterator[None]:
    """The one look of all figures; `more`: other rcParams."""
    from matplotlib import rc_context

    soft, line, ink = light("soft"), light("line"), light("ink")
    with rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": soft,
            "axes.labelcolor": soft,
            "axes.titlelocation": "left",
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": line,
            "grid.linewidth": 0.8,
            "text.color": ink,
            "xtick.color": soft,
            "ytick.color": soft,
            "hatch.linewidth": 0.8,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "lines.solid_joinstyle": "round",
            "svg.fonttype": "none",
            **more,
        }
    ):
        yield


def save_png(draw: Callable[[Figure], None], path: Path, width: float, height: float, dpi: int = 110) -> None:
    """Let `draw` fill a figure of `width` x `height` inches, and write it."""
    from matplotlib.figure import Figure

    small = {"font.size": 9, "axes.titlesize": 9.5, "axes.titlelocation": "center", "legend.fontsize": 8}
    with look(**small):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        draw(figure)
        figure.savefig(path, dpi=dpi, format="png", metadata={"Software": None})


@dataclass
class Canvas:
    """One pair of axes to draw a chart on, and what is said about its marks.

    `narrow`: it is drawn for a telephone; ticks and words must be few.
    """

    ax: Axes
    narrow: bool
    _marks: dict[str, tuple[str, str]] = field(default_factory=dict)

    def mark(self, artist: Artist, kind: str, words: str = "") -> None:
        """Give a mark a class, and words that a pointer over it shows."""
        name = f"mark{len(self._marks)}."
        artist.set_gid(name)
        self._marks[name] = (kind, words)

    def x_axis(
        self, label: str, show: Callable[[float], str], log: tuple[float, float] | None = None
    ) -> None:
        """Its name, and how its numbers are written. `log`: logarithmic, over that range."""
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

        axis, count = self.ax.xaxis, 4 if self.narrow else 11
        axis.set_label_text(label)
        if log is None:
            axis.set_major_locator(MaxNLocator(count))
        else:
            self.ax.set_xscale("log")
            self.ax.set_xlim(*log)
            axis.set_major_locator(FixedLocator(log_ticks(*log, count)))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: show(value))

    def y_axis(
        self,
        label: str,
        show: Callable[[float], str],
        *,
        whole: bool = False,
        bytes_up_to: float | None = None,
    ) -> None:
        """Its name, and how its numbers are written: about four round ones.

        `whole`: of things that are counted. `bytes_up_to`: in steps of a power of two.
        """
        from matplotlib.ticker import MaxNLocator, MultipleLocator

        axis = self.ax.yaxis
        axis.set_label_text(label)
        if bytes_up_to is None:
            axis.set_major_locator(MaxNLocator(4, integer=whole))
        else:
            axis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(bytes_up_to, 4) / 4))))
        axis.set_major_formatter(lambda value, _: show(value))
        self.ax.grid(axis="x", visible=False)

    def name_marks(self, text: str) -> str:
        """Classes and `<title>`s instead of the ids that `mark` left."""

        def named(match: re.Match[str]) -> str:
            kind, words = self._marks[match[1]]
            return f'<g class="mark {kind}">' + (f"<title>{escape(words)}</title>" if words else "")

        return re.sub(r'<g id="(mark\d+\.)">', named, text)


Paint = Callable[[Canvas], None]


def svg(title: str, paint: Paint, width: int, height: int, *, narrow: bool, font: float) -> Markup:
    """One chart of `width` x `height` units: CSS pixels where it has that width.

    The element has the classes `chart` and `narrow` or `wide`, and `title` as its label. `data-plot` is left,
    top, right and bottom of its axes in its own units, `data-x` the range they show: what a script needs to
    find a moment. It is markup: words in it have been escaped.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    out = StringIO()
    # Equal hashes name equal parts within a chart, never those of another.
    salt = f"{title} {width} {height}"
    with look(**{"font.size": font, "axes.labelsize": font, "svg.hashsalt": salt}):
        layout = ConstrainedLayoutEngine(w_pad=3 / 72, h_pad=3 / 72)
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout=layout)
        canvas = Canvas(figure.add_subplot(), narrow)
        paint(canvas)
        # Laid out once; `savefig` would draw everything another time to do it again.
        layout.execute(figure)
        figure.set_layout_engine(None)
        figure.savefig(out, format="svg", dpi=72, transparent=True)
    text = canvas.name_marks(_FLUFF.sub("", out.getvalue()))
    text = _OWN_IDS.sub("", text)
    text = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda m: _VARIABLES.get(m[0], m[0]), text)
    text = re.sub(r'font: ([\d.]+)px [^;"]*', r"font-size: \1px", text)
    text = re.sub(rf'font-family: [^;]*; |font-size: {font:g}px; | transform="rotate\(-0 [^"]*"', "", text)
    text = _TAGS.sub(lambda tag: _LONG_NUMBERS.sub(lambda m: f"{float(m[0]):.1f}", tag[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    box, (low, high) = canvas.ax.get_position(), canvas.ax.get_xlim()
    plot = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    opening = (
        f'<svg class="chart {"narrow" if narrow else "wide"}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" data-plot="{" ".join(f"{v:.1f}" for v in plot)}" '
        f'data-x="{float(low):.9g} {float(high):.9g}" style="font-size: {font:g}px">'
    )
    return Markup(re.sub(r"^\s*<svg [^>]*>", lambda _: opening, text).strip())


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` numbers in [low, high]: 1, 2 and 5 times powers of ten, or fewer of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= count:
            return found
    return found[:: -(-len(found) // count)]


def say(ax: Axes, x: float, words: str) -> None:
    """Words at the top beside a vertical line at `x`, on the side where there is more room."""
    right = ax.transAxes.inverted().transform(ax.transData.transform((x, 0)))[0] > 0.5
    ax.annotate(
        words,
        (x, 1),
        (-4 if right else 4, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top",
        gid="words",
    )


def steps(
    canvas: Canvas, xs: Sequence[float], ys: Sequence[float], end: float | None = None, **kw: Any
) -> Any:
    """A line that holds each value until the next, the last one until `end`."""
    if end is not None:
        xs, ys = [*xs, end], [*ys, ys[-1]]
    [line] = canvas.ax.plot(xs, ys, drawstyle="steps-post", **kw)
    return line
