"""One colour per backend and one per kind of memory, everywhere; runs of one backend differ in their dash.

Colours live in page.css as variables, for light and dark; here are the names of the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vattn.lab.bench.read import Run

BACKENDS = ("static", "paged", "virtual", "peer")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "4 2 1 2", "1 4", "12 3 1 3 1 3")

MEMORY = (
    ("in_use", "in use", "needed by live requests; a shared page counts once"),
    ("cached", "cached", "kept for prefix hits only"),
    ("parked", "parked", "mapped, needed by nobody now"),
    ("free", "free", "created, in nobody's hands"),
)
"""Kinds of physical memory from the bottom up: column, label, meaning."""


class Style(NamedTuple):
    """How a run is drawn: the class sets the colour, the dash tells it from others of its backend."""

    css: str
    dash: str


def styles(runs: Sequence[Run]) -> dict[str, Style]:
    """By name of the run."""
    seen: dict[str, int] = {}
    found: dict[str, Style] = {}
    for run in runs:
        backend = run.backend if run.backend in BACKENDS else "peer"
        at = seen.get(backend, 0)
        seen[backend] = at + 1
        found[run.name] = Style(f"b-{backend}", DASHES[at % len(DASHES)])
    return found
