"""What a section of a page is made of. `templates/parts.html` says how each part looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from markupsafe import Markup

from vattn.lab.charts.figure import Paint, svg

NARROW, WIDE = 400, 1060
"""Units across a chart: on a telephone, or as one of two columns; and across the whole page."""


class Part:
    """`kind`: the macro that draws it."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Note(Part):
    kind = "note"
    text: str


@dataclass(frozen=True)
class Points(Part):
    """A list of sentences."""

    kind = "points"
    sentences: Sequence[str]


@dataclass(frozen=True)
class Code(Part):
    kind = "code"
    text: str


class Key(NamedTuple):
    """An entry of a legend. `mark`: box, or a line's `stroke-dasharray`."""

    colour: str
    """A name of the palette, or a CSS value for a box."""
    label: str
    meaning: str = ""
    dash: str | None = None
    """None: a box. "": a solid line."""


@dataclass(frozen=True)
class Legend(Part):
    kind = "legend"
    keys: Sequence[Key]


class Cell(NamedTuple):
    """Of a table, with what is said in smaller type behind it."""

    text: str
    more: str = ""


@dataclass(frozen=True)
class Table(Part):
    """The first column names the row. Cells are texts or `Cell`s."""

    kind = "table"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Columns(Part):
    """Small tables side by side."""

    kind = "columns"
    tables: Sequence[Table]


class Readout(NamedTuple):
    """What a pointer over a chart is told: at each x, a text per row."""

    x: Sequence[float]
    rows: Sequence[tuple[str, Sequence[str]]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "x": [round(x, 6) for x in self.x],
            "rows": [{"name": name, "values": list(values)} for name, values in self.rows],
        }


@dataclass(frozen=True)
class Chart(Part):
    """`drawings`: one, or a narrow and a wide one of which the page shows what fits."""

    kind = "chart"
    title: str
    drawings: Sequence[Markup]
    readout: Readout | None = None


@dataclass(frozen=True)
class Grid(Part):
    """Charts in two columns, or one where the page is narrow."""

    kind = "grid"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Diagnosed(Part):
    """What `vattn doctor` found in one run."""

    kind = "diagnosed"
    name: str
    sentence: str
    findings: Sequence[Any]


def small_chart(title: str, paint: Paint, height: int = 230) -> Chart:
    """For a grid."""
    return Chart(title, [svg(title, paint, NARROW, height, narrow=True, font=11)])


def full_chart(
    title: str,
    paint: Paint,
    height: int = 280,
    readout: Readout | None = None,
    narrow_height: int | None = None,
) -> Chart:
    """As wide as the page."""
    return Chart(
        title,
        [
            svg(title, paint, NARROW, height, narrow=True, font=11),
            svg(title, paint, WIDE, height, narrow=False, font=12),
        ],
        readout,
    )


def grid(charts: Sequence[Chart | None]) -> list[Part]:
    """Those that there are; nothing of none."""
    found = [chart for chart in charts if chart is not None]
    return [Grid(found)] if found else []
