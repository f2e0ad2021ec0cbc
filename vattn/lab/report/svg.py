"""Axes and marks as SVG text: seen without a script, printed sharp, coloured by the page's style sheet.

+--------------------------- width ---------------------------+
| left |  plot area: x() and y() map data to pixels  | right  |
|      |                                             |        | height
|      +-- ticks ------------------------------------+        |
|                    x label                          bottom  |
+-------------------------------------------------------------+
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Show = Callable[[float], str]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten) in [low, high]."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def binary_ticks(high: float, count: int = 4) -> list[float]:
    """From 0 in a step that is a power of two: for bytes."""
    if high <= 0:
        return [0.0]
    step = 2.0 ** math.ceil(math.log2(high / count))
    return [k * step for k in range(int(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high]; with few of them also 2 and 5 times."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**p for p in powers if low <= 10.0**p <= high]
    if len(found) >= 4:
        return found
    return sorted(m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high)


@dataclass
class Chart:
    """One chart; marks are added in the order in which they lie on each other."""

    title: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_label: str
    y_label: str
    x_show: Show
    y_show: Show
    width: int = 520
    height: int = 260
    log_x: bool = False
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    left: int = 74
    right: int = 26
    top: int = 26
    bottom: int = 44
    marks: list[str] = field(default_factory=list)
    readout: dict[str, Any] | None = None

    def x(self, value: float) -> float:
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.left + share * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 1)

    def steps(self, xs: Sequence[float], ys: Sequence[float], end: float | None = None) -> str:
        """Path commands that hold each value until the next; the last one until `end`."""
        parts: list[str] = []
        last = None
        for x, y in zip(xs, ys, strict=True):
            px, py = self.x(x), self.y(y)
            parts.append(f"M{px} {py}" if last is None else f"H{px}" if py == last else f"H{px}V{py}")
            last = py
        if end is not None and parts:
            parts.append(f"H{self.x(end)}")
        return "".join(parts)

    def line(self, path: str, css: str, title: str, dash: str = "") -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.marks.append(
            f'<path class="line {css}" d="{path}"{dashed}><title>{escape(title)}</title></path>'
        )

    def straight(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        """Path commands from point to point."""
        points = (f"{self.x(x)} {self.y(y)}" for x, y in zip(xs, ys, strict=True))
        return "M" + "L".join(points)

    def area(
        self,
        xs: Sequence[float],
        low: Sequence[float],
        high: Sequence[float],
        end: float,
        css: str,
        title: str,
    ) -> None:
        """What lies between two step lines."""
        above = self.steps(xs, high, end)
        back: list[str] = []
        right = self.x(end)
        for x, y in zip(reversed(xs), reversed(low), strict=True):
            back.append(f"L{right} {self.y(y)}H{self.x(x)}")
            right = self.x(x)
        self.marks.append(
            f'<path class="area {css}" d="{above}{"".join(back)}Z"><title>{escape(title)}</title></path>'
        )

    def rect(self, x0: float, x1: float, y0: float, y1: float, css: str, title: str = "") -> None:
        """In data coordinates; at least a hair wide, so that nothing short vanishes."""
        left, top = self.x(min(x0, x1)), self.y(max(y0, y1))
        wide = max(0.6, round(self.x(max(x0, x1)) - left, 1))
        tall = max(0.5, round(self.y(min(y0, y1)) - top, 1))
        inner = f"<title>{escape(title)}</title>" if title else ""
        box = f'<rect class="{css}" x="{left}" y="{top}" width="{wide}" height="{tall}"'
        self.marks.append(f"{box}>{inner}</rect>" if inner else f"{box}/>")

    def text(self, px: float, py: float, words: str, css: str = "", anchor: str = "start") -> None:
        """In pixels."""
        self.marks.append(
            f'<text class="{css}" x="{px}" y="{py}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """The whole element."""
        plot_bottom, plot_right = self.height - self.bottom, self.width - self.right
        parts = [
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}" '
            f'data-plot="{self.left} {self.top} {plot_right} {plot_bottom}">'
            f'<text class="title" x="0" y="13">{escape(self.title)}</text>'
        ]
        for value in self.y_ticks if self.y_ticks is not None else nice_ticks(*self.y_range, 4):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{self.left} {y}H{plot_right}"/>')
            parts.append(
                f'<text x="{self.left - 6}" y="{y + 4}" text-anchor="end">{escape(self.y_show(value))}</text>'
            )
        for value in self._x_ticks():
            x = self.x(value)
            parts.append(f'<path class="grid" d="M{x} {plot_bottom}v4"/>')
            parts.append(
                f'<text x="{x}" y="{plot_bottom + 17}" text-anchor="middle">'
                f"{escape(self.x_show(value))}</text>"
            )
        parts += self.marks
        parts.append(f'<path class="axis" d="M{self.left} {plot_bottom}H{plot_right}"/>')
        middle = (self.left + plot_right) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
        )
        if self.y_label:
            y = (self.top + plot_bottom) / 2
            parts.append(
                f'<text class="label" transform="translate(11 {y}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.y_label)}</text>"
            )
        parts.append("</svg>")
        return "".join(parts) + (script_json(self.readout, "readout") if self.readout else "")

    def _x_ticks(self) -> list[float]:
        if self.x_ticks is not None:
            return list(self.x_ticks)
        found = (
            log_ticks(*self.x_range) if self.log_x else nice_ticks(*self.x_range, max(2, self.width // 90))
        )
        # Labels must not run into each other.
        room = 8 + max((len(self.x_show(v)) for v in found), default=1) * 6.4
        kept: list[float] = []
        for value in found:
            if not kept or self.x(value) - self.x(kept[-1]) >= room:
                kept.append(value)
        return kept

    def read(self, xs: Sequence[float], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
        """What a pointer over the chart is told: at each x a text per row."""
        self.readout = {
            "x": [self.x(x) for x in xs],
            "at": [f"{x:,.3f}" for x in xs],
            "rows": [{"name": name, "values": list(values)} for name, values in rows],
        }


def script_json(data: Any, css: str) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" class="{css}">{text}</script>'
