"""The whole page: sections of charts, the same figures as tables, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import NamedTuple

from vattn.lab.bench.read import Bench
from vattn.lab.bench.serving import LATENCIES
from vattn.lab.doctor.diagnose import diagnose_bench
from vattn.lab.page_maps.recorder import Recording
from vattn.lab.report import charts, memory_charts, page_raster, requests, tables, units
from vattn.lab.report.series import MAX_POINTS
from vattn.lab.report.style import styles


class Section(NamedTuple):
    """A part of the page; one without a body is left out."""

    anchor: str
    title: str
    body: str


def report_html(bench: Bench, recordings: Sequence[Recording] = ()) -> str:
    """One file that needs nothing else. `recordings`: page maps over time, drawn where there are any."""
    sections = [section for section in _sections(bench, recordings) if section.body]
    folder = files("vattn.lab.report")

    def asset(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return Template(asset("page.html")).substitute(
        version=version("vattn"),
        title=escape(_title(bench)),
        subtitle=escape(_subtitle(bench)),
        css=asset("page.css"),
        js=asset("page.js"),
        nav="".join(f'<a href="#{s.anchor}">{s.title}</a>' for s in sections),
        sections="\n".join(
            f'<section id="{s.anchor}"><h2>{s.title}</h2>{s.body}</section>' for s in sections
        ),
        footer=escape(
            f"Made by vattn {version('vattn')} from a {bench.record.get('format', 'benchmark')} record."
        ),
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
    makers: tuple[tuple[str, str, Callable[[Bench], str]], ...] = (
        ("conclusions", "Conclusions", _conclusions),
        ("diagnosis", "Diagnosis", _diagnosis),
        ("glance", "At a glance", _glance),
        ("kernels", "Attention by context", _kernels),
        ("memory", "Memory over time", _memory),
        ("latency", "Latency", _latency),
        ("requests", "Requests", _requests),
        ("lengths", "Lengths and fills", _lengths),
        ("driver", "Driver calls", _driver),
    )
    for anchor, title, make in makers:
        yield Section(anchor, title, make(bench))
        if anchor == "memory":
            yield Section("pages", "Page map over time", _pages(recordings))
    yield Section("tables", "All figures", _tables(bench))
    yield Section("setting", "How it was measured", _setting(bench))


def _shell(svg: str) -> str:
    return f'<div class="shell">{svg}</div>'


def _grid(drawn: Sequence[str | None]) -> str:
    found = [f"<div>{_shell(svg)}</div>" for svg in drawn if svg]
    return f'<div class="grid">{"".join(found)}</div>' if found else ""


def _full(svg: str) -> str:
    return f'<div class="full">{_shell(svg)}</div>'


def _conclusions(bench: Bench) -> str:
    said = bench.record.get("conclusions") or ()
    return f'<ul class="said">{"".join(f"<li>{escape(str(s))}</li>" for s in said)}</ul>' if said else ""


def _diagnosis(bench: Bench) -> str:
    parts = []
    for found in diagnose_bench(bench):
        if found.verdict == "unknown":
            continue
        parts.append(f"<h3>{escape(found.name)}</h3><p>{escape(found.sentence)}</p>")
        for finding in found.findings:
            because = "".join(f"<li>{escape(text)}</li>" for text in finding.evidence)
            then = "".join(f"<li>→ {escape(text)}</li>" for text in finding.advice)
            parts.append(
                f'<details class="finding {finding.kind}"><summary><b>{escape(finding.sentence)}</b> '
                f"{finding.kind}</summary><ul>{because}</ul><ul class='then'>{then}</ul></details>"
            )
    note = '<p class="note">As <code>vattn doctor</code> sees it. Open a sentence for its evidence.</p>'
    return note + "".join(parts) if parts else ""


def _glance(bench: Bench) -> str:
    look, runs = styles(bench.runs), bench.runs
    drawn = [
        charts.bar_chart(runs, look, "output_throughput", "Output tokens / s", units.number),
        charts.bar_chart(runs, look, "request_throughput", "Requests / s", units.number),
        charts.bar_chart(runs, look, "request_goodput", "Goodput, requests / s", units.number),
        charts.bar_chart(runs, look, "median_ttft_ms", "TTFT, median", units.millis),
        charts.bar_chart(runs, look, "p99_ttft_ms", "TTFT, 99th percentile", units.millis),
        charts.bar_chart(runs, look, "median_tpot_ms", "TPOT, median", units.millis),
        charts.bar_chart(runs, look, "peak_in_use_bytes", "Peak KV memory in use", units.nbytes),
        charts.bar_chart(
            runs, look, "kv_utilization", "KV utilization: tokens / memory mapped", units.percent, 1.12
        ),
        charts.bar_chart(runs, look, "mean_running", "Requests running, on average", units.number),
        charts.bar_chart(runs, look, "attention_share", "Attention's share of the time", units.percent),
    ]
    grid = _grid(drawn)
    note = (
        '<p class="note">Bars are medians over repeats, whiskers the interval that holds the true median.</p>'
    )
    return note + grid if grid else ""


def _kernels(bench: Bench) -> str:
    look = styles(bench.runs)
    svg = charts.kernel_chart(bench, look)
    return charts.run_legend(bench.runs, look) + _full(svg) if svg else ""


def _end(bench: Bench) -> float:
    """Seconds of the longest run that is drawn."""
    return max((float(run.repeat.get("duration_s") or 0) for run in bench.runs), default=0.0) or 1.0


def _memory(bench: Bench) -> str:
    end, look = _end(bench), styles(bench.runs)
    top = memory_charts.most_bytes(bench)
    drawn = [svg for run in bench.runs if (svg := memory_charts.memory_chart(bench, run, end, top))]
    if not drawn:
        return ""
    longest = max(len(run.steps.get("time_s", ())) for run in bench.runs)
    thinned = (
        f" Of up to {longest:,} steps at most {MAX_POINTS} are drawn: of each stretch that which needed most."
        if longest > MAX_POINTS
        else ""
    )
    note = f'<p class="note">The repeat of median duration, on one scale.{thinned}</p>'
    queues = [memory_charts.queue_chart(bench.runs, look, column, end) for column in ("running", "waiting")]
    parts = [
        note,
        memory_charts.legend(bench),
        *map(_full, drawn),
        charts.run_legend(bench.runs, look),
        _grid(queues),
    ]
    return "".join(parts)


def _pages(recordings: Sequence[Recording]) -> str:
    parts = []
    for recording in recordings:
        svg, note = page_raster.raster(recording)
        said = f'<p class="note">{escape(note)}</p>' if note else ""
        parts.append(page_raster.legend(recording) + _full(svg) + said)
    return "".join(parts)


def _latency(bench: Bench) -> str:
    look = styles(bench.runs)
    drawn = _grid([charts.latency_chart(bench, name, look) for name in LATENCIES])
    note = '<p class="note">Requests of all repeats together. A line further left is faster.</p>'
    return note + charts.run_legend(bench.runs, look) + drawn if drawn else ""


def _requests(bench: Bench) -> str:
    end, look = _end(bench), styles(bench.runs)
    parts = []
    for run in bench.runs:
        found = requests.timeline_chart(run, look[run.name], end)
        if found:
            svg, note = found
            parts.append(_full(svg) + (f'<p class="note">{escape(note)}</p>' if note else ""))
    return requests.LEGEND + "".join(parts) if parts else ""


def _lengths(bench: Bench) -> str:
    look = styles(bench.runs)
    drawn = [
        charts.length_chart(bench, "prompt_len", "Prompt lengths"),
        charts.length_chart(bench, "output_len", "Output lengths"),
        *(charts.fill_chart(bench, run, look) for run in bench.runs),
    ]
    return _grid(drawn) + tables.length_table(bench) if any(drawn) else ""


def _driver(bench: Bench) -> str:
    look = styles(bench.runs)
    kinds = dict.fromkeys(k for run in bench.runs for k in run.counters.get("driver_latency_log2_ns") or {})
    drawn = _grid([charts.driver_chart(bench.runs, look, kind) for kind in kinds])
    called = [run for run in bench.runs if any((run.counters.get("driver_calls") or {}).values())]
    return (charts.run_legend(called, look) + drawn if drawn else "") + tables.driver_table(bench)


def _tables(bench: Bench) -> str:
    note = '<p class="note">Medians over repeats, with the interval where repeats differ.</p>'
    parts = [*tables.metric_tables(bench), tables.kernel_table(bench), tables.counter_table(bench)]
    return note + "".join(parts) if any(parts) else ""


def _setting(bench: Bench) -> str:
    environment = dict(bench.environment)
    command = environment.pop("command", None)
    said = f"<pre><code>{escape(str(command))}</code></pre>" if command else ""
    parts = []
    for record, caption in (
        (bench.workload, "Workload"),
        (bench.arrivals, "Arrivals"),
        (bench.limits, "Limits, the same for all"),
        (bench.record.get("goodput_slo") or {}, "Limits of a good request (ms)"),
        (bench.model, "Model"),
        *(({**run.options, **run.kv}, f"Options and memory of {run.name}") for run in bench.runs),
        (environment, "Environment"),
    ):
        if record:
            parts.append(f'<div class="record">{tables.record_table(record, caption)}</div>')
    return f'{said}<div class="columns">{"".join(parts)}</div>'
