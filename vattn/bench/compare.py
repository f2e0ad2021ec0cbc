"""The same requests on each KV backend, and what differed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vattn.bench.workload import WorkloadRequest
from vattn.llm import LLM
from vattn.metrics import EngineMetrics, RequestSummary
from vattn.outputs import RequestOutput
from vattn.params import SamplingParams

Progress = Callable[[int, int], None]
"""Called with (output tokens so far, output tokens in all)."""


@dataclass(frozen=True)
class BackendResult:
    """One backend's run of a workload."""

    name: str
    seconds: float
    outputs: list[RequestOutput]
    metrics: EngineMetrics
    kv: dict[str, str | int]
    """`KVCache.describe`."""

    @property
    def tokens(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def summary(self) -> RequestSummary:
        return RequestSummary.of(output.metrics for output in self.outputs)

    @property
    def output_throughput(self) -> float:
        """Output tokens per second over the whole run."""
        return sum(map(len, self.tokens)) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        summary, m = self.summary, self.metrics
        figures = {
            "output_throughput": self.output_throughput,
            "duration_s": self.seconds,
            "mean_ttft_ms": summary.ttft.mean,
            "median_ttft_ms": summary.ttft.median,
            "p99_ttft_ms": summary.ttft.p99,
            "mean_tpot_ms": summary.tpot.mean,
            "median_tpot_ms": summary.tpot.median,
            "p99_tpot_ms": summary.tpot.p99,
            "peak_kv_bytes": m.peak_kv_bytes,
            "peak_in_use_bytes": m.peak_in_use_bytes,
            "kv_utilization": m.kv_utilization,
            "peak_running": m.peak_running,
            "preemptions": m.preemptions,
            "steps": m.steps,
            "computed_tokens": m.computed_tokens,
            "rows_adopted": m.kv_stats.rows_adopted,
            "driver_calls": m.kv_stats.driver_calls,
            "map_stall_ms": m.kv_stats.map_stall_seconds * 1e3,
            "kv": self.kv,
        }
        # A latency of nothing (TPOT of one-token outputs) is None: JSON has no NaN.
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in figures.items()}


def run_backend(
    name: str, llm: LLM, requests: Sequence[WorkloadRequest], progress: Progress | None = None
) -> BackendResult:
    """All requests at once, greedy, EOS ignored, on a fresh engine."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True, detokenize=False)
        for r in requests
    ]
    total = sum(r.output_len for r in requests)
    started = time.perf_counter()
    ids = [
        llm.engine.add_request(f"w{i}", r.prompt_token_ids, p)
        for i, (r, p) in enumerate(zip(requests, params, strict=True))
    ]
    finished: dict[str, RequestOutput] = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            finished[output.request_id] = output
        if progress is not None:
            progress(llm.engine.metrics.output_tokens, total)
    seconds = time.perf_counter() - started
    outputs = [finished[request_id] for request_id in ids]
    return BackendResult(name, seconds, outputs, llm.metrics(), llm.describe_kv())


def tokens_equal(results: Sequence[BackendResult]) -> bool:
    """True when every backend produced the very same tokens for every request."""
    return all(result.tokens == results[0].tokens for result in results)
