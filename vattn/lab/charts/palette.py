"""The colours, defined once: by name, for a light and a dark page. PNGs have the light ones."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class Colour(NamedTuple):
    """Hexadecimal, lower case. No two light ones are alike: `figure.svg` tells them apart by value."""

    light: str
    dark: str


COLOURS = MappingProxyType(
    {
        # the page
        "back": Colour("#ffffff", "#111318"),
        "ink": Colour("#1c2024", "#eceef2"),
        "soft": Colour("#5a5f6b", "#a8adb9"),
        "line": Colour("#dcdfe6", "#30343e"),
        "panel": Colour("#f6f7f9", "#181b22"),
        # backends; the second layout of `virtual` where both are drawn
        "static": Colour("#7357c8", "#a48cf0"),
        "paged": Colour("#c9501a", "#f28b54"),
        "virtual": Colour("#007f78", "#35b8ae"),
        "virtual-2": Colour("#58b7b0", "#8adcd5"),
        "peer": Colour("#6b7280", "#9aa2b1"),
        # kinds of memory, in charts of steps and in page maps
        "in-use": Colour("#2f6fd0", "#5b96f0"),
        "shared": Colour("#a2378f", "#d672c4"),
        "cached": Colour("#1f8a5b", "#45b884"),
        "ahead": Colour("#6fb7e8", "#8fcbf2"),
        "parked": Colour("#d98a1f", "#eda94a"),
        "retiring": Colour("#8a5a44", "#c08f78"),
        "free": Colour("#d5d7dc", "#474b56"),
        # phases of a request; decoding has the colour of the backend
        "queue": Colour("#d3d6de", "#3c414d"),
        "prefill": Colour("#3f4a5f", "#c3cad8"),
        "preempted": Colour("#e3b505", "#f7d354"),
        "failed": Colour("#c8102e", "#ff6b7d"),
        # what is no backend
        "neutral": Colour("#64748b", "#94a3b8"),
        "series-1": Colour("#0072b2", "#56a8dc"),
        "series-2": Colour("#d55e00", "#f2904a"),
        "series-3": Colour("#009e73", "#3fc9a3"),
        "series-4": Colour("#cc79a7", "#e3a3c5"),
        "series-5": Colour("#e69f00", "#f5c04d"),
    }
)
SERIES = tuple(COLOURS[f"series-{i}"].light for i in range(1, 6))
"""For lines and bars that stand for no backend, told apart by anyone (the palette of Okabe and Ito)."""
BACKENDS = ("static", "paged", "virtual", "peer")


def light(name: str) -> str:
    """The colour to draw with, whatever it is drawn for."""
    return COLOURS[name].light


def backend_name(backend: str) -> str:
    """Name of a backend's colour; engines of others share one."""
    return backend if backend in BACKENDS else "peer"


def css_variables() -> str:
    """`--paged: light-dark(#…, #…); …` for a style sheet."""
    return " ".join(f"--{name}: light-dark({c.light}, {c.dark});" for name, c in COLOURS.items())
