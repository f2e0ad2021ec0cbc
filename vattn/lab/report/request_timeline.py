"""What became of every request: queue, prefill, decode, and the gaps that preemption tore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vattn import units
from vattn.lab.bench.bench_record import Run
from vattn.lab.charts.figure import Canvas
from vattn.lab.charts.palette import light
from vattn.lab.report.parts import Chart, Key, Legend, full_chart
from vattn.lab.report.style import Style

MAX_ROWS = 150
LEGEND = Legend(
    [
        Key("queue", "queue", "arrival to first scheduled"),
        Key("prefill", "prefill", "to the first token"),
        Key(
            "linear-gradient(90deg, var(--static) 33%, var(--paged) 33% 66%, var(--virtual) 66%)",
            "decode",
            "in the colour of the backend",
        ),
        Key("preempted", "preempted", "longest gaps, one for each preemption that came during decode"),
        Key("failed", "failed"),
    ]
)


def timeline_chart(run: Run, style: Style, end: float) -> tuple[Chart, str] | None:
    """Bars by arrival, and a word on what was left out; None without requests."""
    known = [r for r in run.requests if r.get("arrival_s") is not None]
    if not known:
        return None
    ordered = sorted(known, key=lambda r: (r["arrival_s"], r["id"]))
    every = -(-len(ordered) // MAX_ROWS)
    rows = ordered[::every]

    def paint(canvas: Canvas) -> None:
        ax = canvas.ax
        canvas.x_axis("seconds", units.axis)
        ax.set_xlim(0, end)
        ax.set_ylim(len(rows), 0)
        ax.set_yticks([])
        ax.set_ylabel("requests by arrival")
        ax.grid(axis="y", visible=False)
        for at, request in enumerate(rows):
            for phase in phases(request, style, end):
                # At least a hair wide, so that nothing short vanishes.
                wide = max(phase.stop - phase.start, end / 1500)
                [bar] = ax.barh(at + 0.5, wide, 0.8, left=phase.start, color=light(phase.colour))
                canvas.mark(bar, f"bar {phase.colour}", phase.words)

    tall = round(max(4.0, min(14.0, 420 / len(rows))) * len(rows)) + 60
    note = f"Every {every}th of {len(ordered):,} requests is drawn." if every > 1 else ""
    return full_chart(f"{run.name}: every request", paint, tall), note


class Phase(NamedTuple):
    """A stretch of a request's life, in seconds after the start."""

    start: float
    stop: float
    colour: str
    words: str


def phases(request: Mapping[str, Any], style: Style, end: float) -> Iterator[Phase]:
    """In the order in which they are drawn: gaps lie on the decode they interrupt."""
    sent, begun = request["arrival_s"], request.get("first_scheduled_s")
    first, last = request.get("first_token_s"), request.get("finished_s")
    stop = end if last is None else last
    words = (
        f"request {request['id']}: prompt {request['prompt_len']:,} "
        f"({request.get('cached_tokens', 0):,} cached), "
        f"output {request['output_len']:,}, preempted {request.get('preemptions', 0)} times"
    )
    if request.get("error") is not None:
        yield Phase(sent, stop, "failed", f"{words}: {request['error']}")
        return
    to = stop if first is None else first
    if begun is None:  # a peer does not tell
        yield Phase(sent, to, "prefill", f"{words}: to the first token")
    else:
        if begun > sent:
            yield Phase(sent, begun, "queue", f"{words}: queued {units.seconds(begun - sent)}")
        yield Phase(begun, to, "prefill", f"{words}: prefill {units.seconds(to - begun)}")
    if first is None:
        return
    if stop > first:
        yield Phase(first, stop, style.colour, f"{words}: decode {units.seconds(stop - first)}")
    for start, until in preempted_gaps(request):
        yield Phase(start, until, "preempted", f"{words}: no token for {units.seconds(until - start)}")


def preempted_gaps(request: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Start and end of the longest gaps between tokens, one per preemption.

    A record counts preemptions but has no times for them. One that came before the first token shows in no
    gap, so a gap counts only if it is three times the median one. Several outputs can't be told apart.
    """
    gaps: Sequence[float] = request.get("itl_s") or ()
    count = int(request.get("preemptions") or 0)
    if not count or not gaps or int(request.get("outputs") or 1) > 1:
        return []
    usual = sorted(gaps)[len(gaps) // 2]
    longest = sorted(range(len(gaps)), key=lambda i: -gaps[i])[:count]
    starts, now = [], float(request["first_token_s"])
    for gap in gaps:
        starts.append(now)
        now += gap
    return [(starts[i], starts[i] + gaps[i]) for i in sorted(longest) if gaps[i] >= 3 * usual]
