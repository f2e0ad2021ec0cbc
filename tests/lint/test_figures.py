"""Numbers in the documentation are those of the records in benchmarks/results, and say which."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.experiments import document
from vattn.lab.experiments import record
from vattn.lab.experiments.experiment import Experiment
from vattn.lab.experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

PAGES = [
    "README.md", "docs/benchmarks.md", "docs/memory.md", "docs/hf.md", "docs/quantisation.md",
    "docs/sharing.md", "benchmarks/peers/README.md", "benchmarks/hf_cache/README.md",
    "benchmarks/fairness/README.md",
]  # fmt: skip
MEASURED = re.compile(r"\d\s?(?:ms|µs|MiB|GiB|tokens/s|×|%)(?!\w)")


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


# ------------------------------------------------------------------ the ten questions
def test_the_findings_are_what_the_records_say() -> None:
    text = document.DOCUMENT.read_text(encoding="utf-8")
    assert document.documented(text) == text, "run benchmarks/experiments/document.py"


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_a_record_is_of_a_full_run_and_has_its_figure(experiment: Experiment) -> None:
    file = document.RECORDS / f"{experiment.name}.json"
    made = record.read(file, experiment)
    assert not made["smoke"] and made["environment"]["commit"] and made["model"]["num_layers"] == 30
    assert f"bench experiment {experiment.name}" in made["environment"]["command"]
    assert made["findings"] == list(experiment.findings(made["parts"]))
    image = document.IMAGES / f"experiment-{experiment.name}.png"
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size < 120_000
    assert file.stat().st_size < 200_000
    if experiment.times:
        for part in made["parts"].values():
            timed = part["repeats"]
            assert timed >= 5 or experiment.name == "block-size", "fewer repeats conclude nothing"


# ------------------------------------------------------------------ where numbers come from
def sections(page: str) -> list[str]:
    return re.split(r"(?m)^(?=## )", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_tables_with_measured_numbers_name_their_record(page: str) -> None:
    """In their section, or, of a page about one benchmark, anywhere on it; the record is there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for section in sections(page):
        rows = [line for line in section.splitlines() if line.startswith(("|", "    "))]
        if not any(MEASURED.search(row) for row in rows):
            continue
        named = re.findall(r"[\w./-]+\.json", text if page.startswith("benchmarks/") else section)
        there = [name for name in named if any(RESULTS.rglob(Path(name).name))]
        assert there, f"{page}, {section.splitlines()[0]!r}: which JSON are these numbers from?"


def cells(page: str, label: str) -> list[str]:
    """Of the one row that begins with this label, in a table of bars or of columns of text."""
    found = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith(f"| {label} |"):
            found.append([cell.strip() for cell in line.split("|")[2:-1]])
        elif line.startswith(f"    {label}  "):
            found.append(re.split(r"\s{2,}", line.removeprefix(f"    {label}").strip()))
    assert len(found) == 1, f"{page}: {len(found)} rows {label!r}"
    return found[0]


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


README_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "output tokens/s": ("output_throughput", lambda v: f"{v:.1f}"),
    "TTFT p50 (ms)": ("median_ttft_ms", lambda v: f"{v:,.0f}"),
    "peak physical KV held": ("peak_kv_bytes", mib),
    "KV utilization": ("kv_utilization", percent),
    "peak running requests": ("peak_running", str),
}


@pytest.mark.parametrize("label", README_ROWS)
def test_the_table_of_the_readme(label: str) -> None:
    key, show = README_ROWS[label]
    compared = results("compare_cpu.json")
    backends = compared["backends"]
    assert cells("README.md", label) == [show(backends[name][key]) for name in ("virtual", "paged", "static")]
    assert compared["tokens_equal"] is True


def layouts() -> tuple[Any, Any]:
    """The records behind the table of layouts: interleaved, per-layer."""
    return tuple(  # type: ignore[return-value]
        results(name)["backends"]["virtual"] for name in ("compare_cpu.json", "compare_cpu_per_layer.json")
    )


def calls(of: Any) -> str:
    return " / ".join(f"{of['driver_calls'][kind]:,}" for kind in ("create", "map", "set_access"))


def test_the_table_of_layouts() -> None:
    page, both = "docs/memory.md", layouts()
    assert cells(page, "driver calls of 16 requests (create / map / set_access)") == [
        calls(of) for of in both
    ]
    assert cells(page, "map stall of those") == [f"{of['map_stall_ms']:.0f} ms" for of in both]
    assert cells(page, "KV utilization") == [f"{100 * of['kv_utilization']:.1f} %" for of in both]
    speeds = results("peers_cpu.json")["output_throughput"]
    assert cells(page, "output tokens/s, 32 requests, medians of three rounds") == [
        f"{speeds[name]:.1f}" for name in ("vattn virtual", "vattn virtual per-layer")
    ]


MODELS = {"SmolLM2": "smollm2", "Llama 1B": "llama"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_of_cache_layouts(model: str, dtype: str) -> None:
    [found] = [
        row["sdpa, grouped heads"]
        for row in results("hf_cache_choices.json")["attention_s"]
        if (row["model"], row["context"], row["dtype"]) == (MODELS[model], 8192, dtype)
    ]
    own = found["own tensor"]

    def cell(name: str) -> str:
        return f"{1e3 * median(found[name]):.2f} ({median(found[name]) / median(own):.2f}×)"

    expected = [f"{1e3 * median(own):.2f}", cell("heads"), cell("tokens")]
    assert cells("docs/hf.md", f"{model}, {dtype}") == expected


def test_the_table_of_cache_pages() -> None:
    times = results("hf_cache_choices.json")["update_s"]
    assert cells("docs/hf.md", "µs per token") == [
        f"{1e6 * median(times[str(page << 10)]):.1f}" for page in (4, 8, 16, 32, 64)
    ]


def test_the_table_of_peers() -> None:
    """Median, least and most of the rounds, and how much faster `virtual` is; a row for every engine."""
    found = results("peers_cpu.json")
    expected = set()
    for name, over in found["virtual_over"].items():
        rounds = [r[name] for r in found["rounds"]]
        faster = f"{over:.2f}" if name != "vattn virtual" else ""
        expected.add((f"{median(rounds):.1f}", f"{min(rounds):.1f}-{max(rounds):.1f}", faster))
    text = (ROOT / "benchmarks/peers/README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:-1] for line in text.splitlines() if re.search(r"\| \d+\.\d-\d+\.\d \|", line)]
    assert {tuple(cell.strip() for cell in row) for row in rows} == expected


CALLS = {  # medians over the calls of spans of 64 pages
    "`reserve`, 64 pages": ("reserve", 64),
    "`create`": ("create", 64),
    "`map`": ("map", 64),
    "`set_access`, a new page (found, zeroed, entered)": ("set_access, new page", 64),
    "`set_access`, a page mapped before": ("set_access, page", 64),
    "`set_access`, 64 pages mapped before, one call": ("set_access, all", 64),
    "`unmap`, a page": ("unmap, touched page", 64),
    "`unmap`, 64 pages, one call": ("unmap, all", 64),
    "`release` (memory back to the system)": ("release", 64),
    "`free`, 64 pages": ("free", 64),
}


@pytest.mark.parametrize("label", CALLS)
def test_the_table_of_driver_calls(label: str) -> None:
    call, span = CALLS[label]
    found = results("vmm_cpu.json")

    def us(rows: list[Any], page: int) -> str:
        [value] = [
            row["median_us"]
            for row in rows
            if (row["call"], row["span"], row["page_bytes"]) == (call, span, page)
        ]
        return f"{value:.1f}" if value < 10 else f"{value:,.0f}"

    expected = [us(found["calls"], 64 << 10), us(found["calls"], 2 << 20), us(found["books"], 64 << 10)]
    assert cells("docs/memory.md", label) == expected
