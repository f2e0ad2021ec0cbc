"""What became of every request: queue, prefill, decode, and the gaps that preemption tore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vattn.lab.bench.read import Run
from vattn.lab.report import units
from vattn.lab.report.style import Style
from vattn.lab.report.svg import Chart

MAX_ROWS = 150
LEGEND = (
    '<ul class="legend"><li><i class="box r-queue"></i>queue <span>arrival to first scheduled</span></li>'
    '<li><i class="box r-prefill"></i>prefill <span>to the first token</span></li>'
    '<li><i class="box r-decode"></i>decode <span>in the colour of the backend</span></li>'
    '<li><i class="box r-gap"></i>preempted <span>its longest gaps, one for each preemption that came while '
    "it was decoding</span></li>"
    '<li><i class="box r-error"></i>failed</li></ul>'
)


def timeline_chart(run: Run, style: Style, end: float) -> tuple[str, str] | None:
    """Bars by arrival, and a word on what was left out; None without requests."""
    known = [r for r in run.requests if r.get("arrival_s") is not None]
    if not known:
        return None
    ordered = sorted(known, key=lambda r: (r["arrival_s"], r["id"]))
    every = -(-len(ordered) // MAX_ROWS)
    rows = ordered[::every]
    tall = max(4.0, min(14.0, 420 / len(rows)))
    chart = Chart(
        f"{run.name}: every request",
        (0, end),
        (0, len(rows)),
        "seconds",
        "requests by arrival",
        units.axis,
        units.axis,
        width=1060,
        height=round(tall * len(rows)) + 70,
        y_ticks=(),
    )
    for at, request in enumerate(rows):
        _bar(chart, request, len(rows) - at - 1, style, end)
    note = f"Every {every}th of {len(ordered):,} requests is drawn." if every > 1 else ""
    return chart.svg(), note


def _bar(chart: Chart, request: Mapping[str, Any], y: int, style: Style, end: float) -> None:
    sent, begun = request["arrival_s"], request.get("first_scheduled_s")
    first, last = request.get("first_token_s"), request.get("finished_s")
    stop = end if last is None else last
    cached, torn = request.get("cached_tokens", 0), request.get("preemptions", 0)
    words = (
        f"request {request['id']}: prompt {request['prompt_len']:,} ({cached:,} cached), "
        f"output {request['output_len']:,}, preempted {torn} times"
    )
    low, high = y + 0.1, y + 0.9
    if request.get("error") is not None:
        chart.rect(sent, stop, low, high, "r-error", f"{words}: {request['error']}")
        return
    if begun is None:  # a peer does not tell
        chart.rect(
            sent, stop if first is None else first, low, high, "r-prefill", f"{words}: to the first token"
        )
    else:
        if begun > sent:
            chart.rect(sent, begun, low, high, "r-queue", f"{words}: queued {units.seconds(begun - sent)}")
        to = stop if first is None else first
        chart.rect(begun, to, low, high, "r-prefill", f"{words}: prefill {units.seconds(to - begun)}")
    if first is None:
        return
    if stop > first:
        chart.rect(
            first, stop, low, high, f"bar {style.css}", f"{words}: decode {units.seconds(stop - first)}"
        )
    for start, until in preempted_gaps(request):
        chart.rect(start, until, low, high, "r-gap", f"{words}: no token for {units.seconds(until - start)}")


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
