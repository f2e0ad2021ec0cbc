"""The page as a file: whole, self-contained, and complete without scripts."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.lab.report.pages import Reader, bench_record, page, recording
from vattn.cli import app
from vattn.errors import ConfigError
from vattn.lab.bench.bench_record import as_bench
from vattn.lab.charts.palette import COLOURS
from vattn.lab.report.page import report_html
from vattn.lab.report.parts import NARROW


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(page())


def test_nothing_is_loaded_from_anywhere(reader: Reader) -> None:
    for tag, attributes in reader.tags:
        for name in ("src", "href", "data", "action"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), (tag, target)
    assert "@import" not in page() and "http" not in re.sub(r"<pre>.*?</pre>", "", page())
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page()))
    assert len(page().encode()) < 600_000


def test_what_a_chart_points_to_is_in_it_and_has_no_double(reader: Reader) -> None:
    ids = [a["id"] for tag, a in reader.tags if "id" in a]
    assert len(set(ids)) == len(ids)
    for drawing in re.findall(r'<svg class="chart.*?</svg>', page(), re.DOTALL):
        wanted = set(re.findall(r'(?:url\(|xlink:href=")#(\w+)', drawing))
        assert wanted <= set(re.findall(r' id="(\w+)"', drawing))


def test_every_section_is_there(reader: Reader) -> None:
    anchors = [a["id"] for tag, a in reader.tags if tag == "section"]
    assert anchors == [
        "conclusions", "diagnosis", "glance", "memory", "pages", "latency", "requests", "lengths", "driver",
        "tables", "setting",
    ]  # fmt: skip
    links = [a["href"] for tag, a in reader.tags if tag == "a"]
    assert links == [f"#{anchor}" for anchor in anchors]


def test_figures_are_in_tables(reader: Reader) -> None:
    """Every metric of every run, to be read without a chart."""
    rows = {row[0]: row[1:] for row in reader.cells if row}
    runs = bench_record()["runs"]
    names = [run["name"] for run in runs]
    assert names == ["static", "paged-8", "paged-16", "virtual"]
    assert any(row[1:] == names for row in reader.cells)
    for label in (
        "output tokens / s",
        "goodput, requests / s",
        "KV utilization",
        "attention's share of the time",
    ):
        assert len(rows[label]) == len(names) and all(re.search(r"\d", cell) for cell in rows[label]), label
    completed = [f"{run['summary']['completed']['median']:.0f}" for run in runs]
    assert rows["requests completed"] == completed == ["12"] * 4
    assert rows["p99"] and rows["preemptions"]
    assert rows["cpus"] and rows["torch"] and rows["token bytes"] == ["512 B"]


def test_charts_are_drawn_and_named(reader: Reader) -> None:
    charts = [a for tag, a in reader.tags if tag == "svg" and "chart" in (a.get("class") or "")]
    assert len(charts) > 25
    assert all(a["role"] == "img" and a["aria-label"] for a in charts)
    for kind in ("in-use", "cached", "static", "paged", "virtual", "logical", "budget", "shared"):
        assert reader.count("g", kind), kind
    assert reader.count("g", "prefill") >= 2 * 48 and reader.count("g", "unit")
    labels = " ".join(str(a["aria-label"]) for a in charts)
    for part in (
        "TTFT",
        "TPOT",
        "ITL",
        "E2EL",
        "Prompt lengths",
        "Output lengths",
        "last block",
        "last page",
        "map",
    ):
        assert part in labels


def test_runs_of_one_backend_differ_in_their_dash() -> None:
    keys = re.findall(
        r'<svg class="key".*?stroke="var\(--paged\)"[^>]*?(stroke-dasharray="[^"]+")?/>', page()
    )
    assert len(set(keys)) == 2


def test_a_colour_is_a_variable_of_the_page_wherever_it_is_drawn() -> None:
    """So that a chart is dark where the page is, and a backend has one colour."""
    charts = re.findall(r'<svg class="chart.*?</svg>', page(), re.DOTALL)
    assert charts and not [found for chart in charts for found in re.findall(r"#[0-9a-f]{6}\b", chart)]
    known = set(re.findall(r"--([\w-]+): light-dark", page()))
    assert set(re.findall(r"var\(--([\w-]+)\)", page())) <= known


def test_light_colours_can_be_told_apart_by_their_value() -> None:
    lights = [colour.light for colour in COLOURS.values()]
    assert len(set(lights)) == len(lights) and all(re.fullmatch("#[0-9a-f]{6}", found) for found in lights)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "bench.json"
    record.write_text(json.dumps(bench_record()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for asked in (
        ["report", str(record), "--html", str(tmp_path / "a.html")],
        ["bench", "throughput", "--smoke", "--html", str(tmp_path / "a.html")],
        ["pagemap", "--html", str(tmp_path / "a.html")],
        ["pagemap", "--png", str(tmp_path / "a.png")],
    ):
        result = CliRunner().invoke(app, asked)
        assert isinstance(result.exception, ConfigError)
        assert "needs matplotlib: pip install 'vattn[bench]'" in str(result.exception)
        assert "warm-up" not in result.output, "it is said before anything runs"
    assert not list(tmp_path.glob("a.*"))


def test_text_is_escaped(reader: Reader) -> None:
    assert "A sentence with <b>marks</b> & signs." in reader.words
    record = {**bench_record(), "environment": {"command": "</script><script>alert(1)</script>"}}
    assert "alert" in page_text(report_html(as_bench(record)))


def page_text(text: str) -> str:
    """Words of a page, outside of scripts."""
    return "".join(Reader(text).words)


def test_values_are_those_of_the_record(reader: Reader) -> None:
    """The readout of a memory chart adds up to what the engine reported."""
    text = re.search(r'<script type="application/json" class="readout">(.*?)</script>', page(), re.DOTALL)
    assert text is not None
    readout = json.loads(text[1])
    steps = next(r for r in bench_record()["runs"] if r["name"] == "static")["repeats"]
    counts = {len(repeat["steps"]["time_s"]) for repeat in steps}
    assert len(readout["x"]) in {min(count, 401) for count in counts}
    assert {row["name"] for row in readout["rows"]} >= {"in use", "logical", "running", "waiting"}
    assert all(len(row["values"]) == len(readout["x"]) for row in readout["rows"])


def test_a_record_with_little_in_it_is_drawn() -> None:
    """A peer that tells nothing about its inside, and a kernel benchmark."""
    peer = {"name": "peer", "options": {}, "repeats": [], "summary": {}}
    Reader(report_html(as_bench({"format": "vattn-bench-1", "kind": "serve", "runs": [peer]})))
    us = {"median": 10.0, "low": 9.0, "high": 12.0}
    points = [{"context": n, "attend_us": us, "plan_us": us} for n in (64, 128)]
    run = {"name": "paged", "options": {"kv_backend": "paged"}, "points": points}
    found = Reader(report_html(as_bench({"format": "vattn-bench-1", "kind": "kernels", "runs": [run]})))
    assert found.count("g", "dot") == 2 * 2, "in the narrow and the wide drawing"


def test_what_did_not_happen_is_left_out() -> None:
    """A run nobody looked into, requests that failed, and runs without a request."""
    closed, failed, empty = (copy.deepcopy(bench_record()) for _ in range(3))
    closed["runs"][0] |= {"name": "<peer> & co", "options": {}, "kv": {}}
    for repeat in closed["runs"][0]["repeats"]:
        repeat |= {"steps": None, "counters": {}}
    for repeat in failed["runs"][1]["repeats"]:
        for request in repeat["requests"][:3]:
            request |= {
                "error": "too long",
                "finished_s": None,
                "first_token_s": None,
                "first_scheduled_s": None,
            }
    for run in empty["runs"]:
        for repeat in run["repeats"]:
            repeat |= {"requests": [], "steps": {name: [] for name in repeat["steps"]}}
    pages = [Reader(report_html(as_bench(record))) for record in (closed, failed, empty)]
    assert "<peer> & co: memory by kind" not in {a.get("aria-label") for _, a in pages[0].tags}
    assert pages[0].count("g", "in-use") == 2 * 3
    assert pages[1].count("g", "failed") == 2 * 3 and not pages[0].count("g", "failed")
    assert pages[2].count("svg", "chart") < pages[0].count("svg", "chart")


def test_the_commands_write_a_page(tmp_path: Path) -> None:
    html, record, pages = tmp_path / "a.html", tmp_path / "bench.json", tmp_path / "pages.jsonl"
    record.write_text(json.dumps(bench_record()))
    recording().save(pages)
    done = CliRunner().invoke(
        app, ["report", str(record), "--html", str(html), "--page-map", str(pages)], catch_exceptions=False
    )
    assert done.exit_code == 0 and "KiB" in done.output
    assert Reader(html.read_text()).count("g", "unit")
    html.unlink()
    smoke = ["bench", "throughput", "--smoke", "--backends", "paged", "--repeats", "1", "--html", str(html)]
    done = CliRunner().invoke(app, smoke, catch_exceptions=False)
    assert done.exit_code == 0 and Reader(html.read_text()).count("svg", "chart") > 5


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "a.html")
    for command in (
        ["report", "x.json", "--html", nowhere],
        ["bench", "memory", "--smoke", "--html", nowhere],
    ):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, ConfigError) and "no folder" in str(result.exception)
    other = tmp_path / "x.json"
    other.write_text('{"format": "other"}')
    result = CliRunner().invoke(app, ["report", str(other), "--html", str(tmp_path / "a.html")])
    assert isinstance(result.exception, ConfigError) and "no benchmark record" in str(result.exception)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.9])
def test_the_label_of_a_limit_is_beside_its_line_where_there_is_room(share: float) -> None:
    record = copy.deepcopy(bench_record())
    waits = [
        1e3 * (r["first_token_s"] - r["arrival_s"])
        for run in record["runs"]
        for repeat in run["repeats"]
        for r in repeat["requests"]
    ]
    record["goodput_slo"] = {"ttft": min(waits) + share * (max(waits) - min(waits))}
    label = re.compile(r'<text style="(text-anchor: end; )?[^"]*"[^>]*? x="([\d.]+)"[^>]*>limit ([^<]*)<')
    found = label.findall(report_html(as_bench(record)))
    assert found
    for end, x, text in found:
        length = 7 * len("limit " + text)
        left = float(x) - (length if end else 0)
        assert left >= 0 and left + length <= NARROW
