"""How runs and kinds of memory are told apart: by colour, and runs of one backend by their dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vattn.lab.bench.bench_record import Run
from vattn.lab.charts.palette import backend_name, light
from vattn.lab.report.parts import Key, Legend

DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "4 2 1 2", "1 4", "12 3 1 3 1 3")
"""As `stroke-dasharray`, in pixels."""

MEMORY = (
    ("in_use", "in-use", "in use", "needed by live requests; a shared page counts once"),
    ("cached", "cached", "cached", "kept for prefix hits only"),
    ("parked", "parked", "parked", "mapped, needed by nobody now"),
    ("free", "free", "free", "created, in nobody's hands"),
)
"""Kinds of physical memory from the bottom up: column of the step log, colour, label, meaning."""


class Style(NamedTuple):
    """How a run is drawn."""

    colour: str
    """A name of the palette."""
    dash: str
    """One of DASHES."""

    def line(self, width: float = 1.8) -> dict[str, Any]:
        """For matplotlib, whose dashes are multiples of the width."""
        pattern = [float(length) / width for length in self.dash.split()]
        return {
            "color": light(self.colour),
            "linewidth": width,
            "linestyle": (0, pattern) if pattern else "-",
        }


Look = Mapping[str, Style]


def styles(runs: Sequence[Run]) -> dict[str, Style]:
    """By name of the run."""
    seen: dict[str, int] = {}
    found: dict[str, Style] = {}
    for run in runs:
        backend = backend_name(run.backend)
        at = seen.get(backend, 0)
        seen[backend] = at + 1
        found[run.name] = Style(backend, DASHES[at % len(DASHES)])
    return found


def run_legend(runs: Sequence[Run], look: Look) -> Legend:
    """Colour and dash of every run."""
    return Legend([Key(look[run.name].colour, run.name, dash=look[run.name].dash) for run in runs])
