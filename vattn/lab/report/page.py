"""The whole page: sections of charts, the same figures as tables, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import NamedTuple

from vattn import units
from vattn.lab.bench.bench_record import Bench
from vattn.lab.bench.metric_table import LATENCIES
from vattn.lab.charts.figure import require_matplotlib
from vattn.lab.doctor.diagnose import diagnose_bench
from vattn.lab.page_maps.page_state_charts import (
    MEANING,
    colour,
    drawn_units,
    paint_units,
    units_height,
)
from vattn.lab.page_maps.recorder import Recording
from vattn.lab.report import bar_charts, distribution_charts, memory_charts, request_timeline, tables
from vattn.lab.report.distributions import MAX_POINTS
from vattn.lab.report.parts import Code, Columns, Diagnosed, Key, Legend, Note, Part, Points, full_chart, grid
from vattn.lab.report.style import run_legend, styles
from vattn.lab.templating import render


class Section(NamedTuple):
    """A part of the page; one without parts is left out."""

    anchor: str
    title: str
    parts: Sequence[Part]


def report_html(bench: Bench, recordings: Sequence[Recording] = ()) -> str:
    """One file that needs nothing else. `recordings`: page maps over time, drawn where there are any.

    Raises ConfigError without matplotlib.
    """
    require_matplotlib("a report")
    made = f"Made by vattn {version('vattn')} from a {bench.record.get('format', 'benchmark')} record."
    sections = [section for section in _sections(bench, recordings) if section.parts]
    return render(
        "report.html", title=_title(bench), subtitle=_subtitle(bench), sections=sections, footer=made
    )


def _title(bench: Bench) -> str:
    names = [run.name for run in bench.runs]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{bench.kind.capitalize()}: {shown}"


def _subtitle(bench: Bench) -> str:
    model, parts = bench.model, []
    if model.get("name"):
        parts.append(f"{model['name']} ({model.get('dtype')}, {model.get('device', 'cpu')})")
    if bench.limits.get("kv_memory_bytes"):
        parts.append(f"KV budget {units.nbytes(bench.limits['kv_memory_bytes'])}")
    repeats = bench.record.get("repeats") or max((len(run.repeats) for run in bench.runs), default=0)
    if repeats:
        parts.append(f"{repeats} repeats" if repeats > 1 else "one repeat")
    if bench.environment.get("date"):
        parts.append(str(bench.environment["date"]))
    return " · ".join(parts)


def _sections(bench: Bench, recordings: Sequence[Recording]) -> Iterator[Section]:
    said = bench.record.get("conclusions") or ()
    yield Section("conclusions", "Conclusions", [Points(list(map(str, said)))] if said else [])
    yield Section("diagnosis", "Diagnosis", _diagnosis(bench))
    yield Section("glance", "At a glance", _glance(bench))
    yield Section("kernels", "Attention by context", _kernels(bench))
    yield Section("memory", "Memory over time", _memory(bench))
    yield Section("pages", "Page map over time", [part for r in recordings for part in _pages(r)])
    yield Section("latency", "Latency", _latency(bench))
    yield Section("requests", "Requests", _requests(bench))
    yield Section("lengths", "Lengths and fills", _lengths(bench))
    yield Section("driver", "Driver calls", _driver(bench))
    yield Section("tables", "All figures", _tables(bench))
    yield Section("setting", "How it was measured", _setting(bench))


def _diagnosis(bench: Bench) -> list[Part]:
    found: list[Part] = [
        Diagnosed(diagnosis.name, diagnosis.sentence, diagnosis.findings)
        for diagnosis in diagnose_bench(bench)
        if diagnosis.verdict != "unknown"
    ]
    return [Note("As vattn doctor sees it. Open a sentence for its evidence."), *found] if found else []


GLANCE = {
    "output_throughput": "Output tokens / s",
    "request_throughput": "Requests / s",
    "request_goodput": "Goodput, requests / s",
    "median_ttft_ms": "TTFT, median",
    "p99_ttft_ms": "TTFT, 99th percentile",
    "median_tpot_ms": "TPOT, median",
    "peak_in_use_bytes": "Peak KV memory in use",
    "kv_utilization": "KV utilization: tokens / memory mapped",
    "mean_running": "Requests running, on average",
    "attention_share": "Attention's share of the time",
}


def _glance(bench: Bench) -> list[Part]:
    look = styles(bench.runs)
    found = grid([bar_charts.bar_chart(bench.runs, look, key, title) for key, title in GLANCE.items()])
    note = "Bars are medians over repeats, whiskers the interval that holds the true median."
    return [Note(note), *found] if found else []


def _kernels(bench: Bench) -> list[Part]:
    look = styles(bench.runs)
    chart = bar_charts.kernel_chart(bench, look)
    return [run_legend(bench.runs, look), chart] if chart else []


def _end(bench: Bench) -> float:
    """Seconds of the longest run that is drawn."""
    return max((float(run.repeat.get("duration_s") or 0) for run in bench.runs), default=0.0) or 1.0


def _memory(bench: Bench) -> list[Part]:
    end, look = _end(bench), styles(bench.runs)
    top = memory_charts.most_bytes(bench)
    drawn = [chart for run in bench.runs if (chart := memory_charts.memory_chart(bench, run, end, top))]
    if not drawn:
        return []
    longest = max(len(run.steps.get("time_s", ())) for run in bench.runs)
    thinned = (
        f" Of up to {longest:,} steps at most {MAX_POINTS} are drawn: of each stretch that which needed most."
        if longest > MAX_POINTS
        else ""
    )
    return [
        Note(f"The repeat of median duration, on one scale.{thinned}"),
        memory_charts.memory_legend(bench),
        *drawn,
        run_legend(bench.runs, look),
        *grid([memory_charts.queue_chart(bench.runs, look, c, end) for c in ("running", "waiting")]),
    ]


def _pages(recording: Recording) -> list[Part]:
    unit, frames = recording.header["unit"], recording.frames
    there = [state for state in MEANING if any(frame["bytes"].get(state) for frame in frames)]
    moments, ids = drawn_units(recording)
    every = len({u for frame in frames for found in frame["units"].values() for u in found})
    parts: list[Part] = [
        Legend([Key(colour(state), str(state), MEANING[state]) for state in there]),
        full_chart(
            f"{recording.header['backend']}: every {unit} over time",
            lambda canvas: paint_units(canvas, recording),
            units_height(recording),
        ),
    ]
    if len(ids) < every or len(moments) < len(frames):
        note = f"{len(ids):,} of {every:,} {unit}s and {len(moments):,} of {len(frames):,} moments are drawn."
        parts.append(Note(note))
    return parts


def _latency(bench: Bench) -> list[Part]:
    look = styles(bench.runs)
    drawn = grid([distribution_charts.latency_chart(bench, name, look) for name in LATENCIES])
    note = "Requests of all repeats together. A line further left is faster."
    return [Note(note), run_legend(bench.runs, look), *drawn] if drawn else []


def _requests(bench: Bench) -> list[Part]:
    end, look = _end(bench), styles(bench.runs)
    parts: list[Part] = []
    for run in bench.runs:
        found = request_timeline.timeline_chart(run, look[run.name], end)
        if found:
            parts += [found[0], *([Note(found[1])] if found[1] else [])]
    return [request_timeline.LEGEND, *parts] if parts else []


def _lengths(bench: Bench) -> list[Part]:
    look = styles(bench.runs)
    drawn = grid(
        [
            distribution_charts.length_chart(bench, "prompt_len", "Prompt lengths"),
            distribution_charts.length_chart(bench, "output_len", "Output lengths"),
            *(distribution_charts.fill_chart(bench, run, look) for run in bench.runs),
        ]
    )
    return [*drawn, *tables.length_table(bench)] if drawn else []


def _driver(bench: Bench) -> list[Part]:
    look = styles(bench.runs)
    kinds = dict.fromkeys(k for run in bench.runs for k in run.counters.get("driver_latency_log2_ns") or {})
    drawn = grid([distribution_charts.driver_chart(bench.runs, look, kind) for kind in kinds])
    called = [run for run in bench.runs if any((run.counters.get("driver_calls") or {}).values())]
    return [*([run_legend(called, look), *drawn] if drawn else []), *tables.driver_table(bench)]


def _tables(bench: Bench) -> list[Part]:
    note = Note("Medians over repeats, with the interval where repeats differ.")
    parts = [*tables.metric_tables(bench), *tables.kernel_table(bench), *tables.counter_table(bench)]
    return [note, *parts] if parts else []


def _setting(bench: Bench) -> list[Part]:
    environment = dict(bench.environment)
    command = environment.pop("command", None)
    records = (
        (bench.workload, "Workload"),
        (bench.arrivals, "Arrivals"),
        (bench.limits, "Limits, the same for all"),
        (bench.record.get("goodput_slo") or {}, "Limits of a good request (ms)"),
        (bench.model, "Model"),
        *(({**run.options, **run.kv}, f"Options and memory of {run.name}") for run in bench.runs),
        (environment, "Environment"),
    )
    columns = Columns([tables.record_table(record, caption) for record, caption in records if record])
    return [*([Code(str(command))] if command else []), columns]
