"""Bytes by state over time, stacked, as a small SVG that needs no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vattn.kv.page_map import PageState

MEANING = {
    PageState.PRIVATE: "needed by one request",
    PageState.SHARED: "needed by several requests",
    PageState.CACHED: "kept for prefix hits",
    PageState.AHEAD: "mapped ahead or surplus of a row",
    PageState.PARKED: "in a row nobody uses now",
    PageState.RETIRING: "given up, unmapped when safe",
    PageState.FREE: "in nobody's hands",
}
"""Bottom to top."""

WIDTH, HEIGHT, LEFT, BOTTOM = 1050, 220, 78, 24


def format_bytes(n: float) -> str:
    """Bytes in a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def times(frames: Sequence[Mapping[str, Any]]) -> list[float]:
    """X of every moment."""
    start, end = frames[0]["time_s"], frames[-1]["time_s"]
    span = (end - start) or 1.0
    return [round(LEFT + (frame["time_s"] - start) / span * (WIDTH - LEFT - 8), 2) for frame in frames]


def stacked_svg(frames: Sequence[Mapping[str, Any]], now: int) -> str:
    """The chart, with a mark at moment `now`. Colours come from the page's classes `s-…`."""
    top = max(max(f["budget_bytes"], sum(f["bytes"].values())) for f in frames) or 1
    xs = times(frames)

    def y(nbytes: float) -> float:
        return round(8 + (HEIGHT - BOTTOM - 8) * (1 - nbytes / top), 2)

    parts = []
    below = [0] * len(frames)
    for state in MEANING:
        above = [base + frame["bytes"][state] for base, frame in zip(below, frames, strict=True)]
        if above != below:
            points = [f"{x},{y(v)}" for x, v in zip(xs, above, strict=True)]
            points += [f"{x},{y(v)}" for x, v in zip(reversed(xs), reversed(below), strict=True)]
            shape = " ".join(points)
            parts.append(f'<polygon class="s-{state}" points="{shape}"><title>{state}</title></polygon>')
            if state is PageState.SHARED:
                parts.append(f'<polygon class="hatch" points="{shape}"/>')
        below = above
    budget = " ".join(f"{x},{y(frame['budget_bytes'])}" for x, frame in zip(xs, frames, strict=True))
    parts.append(f'<polyline class="budget" points="{budget}"><title>budget</title></polyline>')
    for share in (0, 0.5, 1):
        parts.append(f'<text x="0" y="{y(share * top) + 4}">{format_bytes(share * top)}</text>')
    floor = y(0)
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{floor}" y2="{floor}"/>')
    first, last = frames[0], frames[-1]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">step {first["step"]}</text>')
    end = f"step {last['step']}, {last['time_s']:.2f} s"
    parts.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{end}</text>')
    parts.append(f'<line id="now" x1="{xs[now]}" x2="{xs[now]}" y1="4" y2="{floor}"/>')
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory by state">{inner}</svg>'
