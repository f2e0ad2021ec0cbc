"""A report of real runs, and a parser that looks at a page as a reader without scripts would."""

from __future__ import annotations

from functools import lru_cache
from html.parser import HTMLParser
from typing import Any

from vattn import LLM, SamplingParams
from vattn.lab.bench import bench_report as reports
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.bench_record import as_bench
from vattn.lab.bench.engines import vattn_systems
from vattn.lab.bench.interleaved_run import HEADLINES, Limits, Plan, run
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.synthetic import SharedPrefixWorkload
from vattn.lab.bench.tiny import load_tiny
from vattn.lab.page_maps.recorder import PageMapRecorder, Recording
from vattn.lab.report.page import report_html
from vattn.models.describe import describe_model


@lru_cache(maxsize=1)
def bench_record() -> dict[str, Any]:
    """All backends under a load with shared prefixes that is too large for their memory, twice."""
    loaded = load_tiny("cpu")
    workload = SharedPrefixWorkload(12, 2, 32, Lengths("uniform", 8, 40), Lengths("uniform", 8, 24))
    limits = Limits(8, 128, 128, 160 << 10)
    common = {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_memory_bytes": limits.kv_memory_bytes,
    }
    systems = vattn_systems(
        loaded, ["static", "paged", "virtual"], common, block_sizes=[8, 16], page_bytes=[4096],
        layouts=["interleaved"],
    )  # fmt: skip
    slo = Slo.parse(["ttft:50", "tpot:20"])
    found = run(Plan("serve", workload, Arrivals("poisson", 200.0), limits, 2, None, slo), systems, 256)
    found["model"] = describe_model(loaded, limits.max_model_len)
    record = reports.finish(found, HEADLINES["serve"])
    record["conclusions"].append("A sentence with <b>marks</b> & signs.")
    return record


@lru_cache(maxsize=1)
def recording() -> Recording:
    """The page map of a short run."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
    with (
        LLM(load_tiny("cpu"), kv_backend="paged", kv_cache_memory_bytes=64 << 10, max_model_len=64) as llm,
        PageMapRecorder(llm.engine) as recorder,
    ):
        llm.generate([[3 + i] * 20 for i in range(4)], params, use_tqdm=False)
    return recorder.recording


@lru_cache(maxsize=1)
def page() -> str:
    return report_html(as_bench(bench_record()), [recording()])


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what a page has."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th") and self.cells:
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if {"script", "style"} & set(self._open):
            return
        self.words.append(data)
        if self._open and self.cells and {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data

    def count(self, tag: str, css: str | None = None) -> int:
        """Elements of a kind, and a class."""
        return sum(t == tag and (css is None or css in (a.get("class") or "").split()) for t, a in self.tags)
