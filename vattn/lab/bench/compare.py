"""The same requests on each KV backend, and what differed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vattn.engine.service import DEFAULT_SERVICE
from vattn.lab.bench.workload import WorkloadRequest
from vattn.llm import LLM
from vattn.metrics import EngineMetrics, RequestSummary
from vattn.outputs import RequestOutput
from vattn.params import BeamSearchParams, SamplingParams
from vattn.prompts import TokenizedPrompt
from vattn.session import Session

Progress = Callable[[int, int], None]
"""Called with (output tokens so far, output tokens in all)."""

PROGRESS_S = 0.2
"""Between two reports of progress."""

SHARING = (
    "rows_adopted",
    "rows_continued",
    "forks",
    "units_shared",
    "tails_copied",
    "bytes_copied",
    "prefix_hit_tokens",
    "resumed_hit_tokens",
    "prefix_tokens_unshared_by_page_size",
    "prefix_evictions",
)
"""Counters of `KVStats` that are reported."""


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
        """Of every output of every request."""
        return [completion.token_ids for output in self.outputs for completion in output.outputs]

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
            "peak_shared_saved_bytes": m.peak_shared_saved_bytes,
            "kv_utilization": m.kv_utilization,
            "peak_running": m.peak_running,
            "preemptions": m.preemptions,
            "steps": m.steps,
            "computed_tokens": m.computed_tokens,
            "cached_tokens": sum(output.metrics.num_cached_tokens for output in self.outputs),
            **{name: getattr(m.kv_stats, name) for name in SHARING},
            "driver_calls": m.kv_stats.driver_calls,
            "map_stall_ms": m.kv_stats.map_stall_seconds * 1e3,
            "kv": self.kv,
        }
        # A latency of nothing (TPOT of one-token outputs) is None: JSON has no NaN.
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in figures.items()}


def run_backend(
    name: str, llm: LLM, requests: Sequence[WorkloadRequest], progress: Progress | None = None
) -> BackendResult:
    """All requests at once on a fresh engine, EOS ignored: greedy, or with seeds where several outputs are
    sampled. A turn of a conversation follows when the one before is answered.
    """
    turns, spoken = _turns(requests), {}
    total = sum(r.output_len * r.n for r in requests)
    started = time.perf_counter()
    finished: dict[int, RequestOutput] = {}
    session, sent = llm.session(), dict[str, int]()
    with session.lease:
        first = [i for i in turns if requests[i].session is None or i == min(turns[i])]
        spoken.update({i: requests[i].prompt_token_ids for i in first})
        sent.update(_send(session, {i: (requests[i], spoken[i]) for i in first}))
        while session.running:
            for output in session.wait(PROGRESS_S):
                index = sent[output.request_id]
                finished[index] = output
                follower = min((i for i in turns[index] if i > index), default=None)
                if follower is not None and output.error is None:
                    said = [*spoken[index], *output.outputs[0].token_ids]
                    spoken[follower] = said + requests[follower].prompt_token_ids
                    sent.update(_send(session, {follower: (requests[follower], spoken[follower])}))
            if progress is not None:
                progress(llm.engine.metrics.output_tokens, total)
        session.leave()
    seconds = time.perf_counter() - started
    outputs = [finished[index] for index in sorted(finished)]
    return BackendResult(name, seconds, outputs, llm.metrics(), llm.describe_kv())


def _turns(requests: Sequence[WorkloadRequest]) -> dict[int, list[int]]:
    """Of each request the indices of its session's turns; of one without a session its own."""
    sessions: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        if request.session is not None:
            sessions.setdefault(request.session, []).append(index)
    return {i: [i] if r.session is None else sessions[r.session] for i, r in enumerate(requests)}


def _send(session: Session, requests: dict[int, tuple[WorkloadRequest, list[int]]]) -> dict[str, int]:
    """Send requests, by index, with these prompts; the indices by the engine's ids."""
    ids = session.add(
        [TokenizedPrompt(None, prompt) for _, prompt in requests.values()],
        [_params(index, request) for index, (request, _) in requests.items()],
        [DEFAULT_SERVICE] * len(requests),
    )
    return dict(zip(ids, requests, strict=True))


def _params(index: int, request: WorkloadRequest) -> SamplingParams | BeamSearchParams:
    if request.beams:
        return BeamSearchParams(beam_width=request.n, max_tokens=request.output_len, ignore_eos=True)
    return SamplingParams(
        n=request.n,
        temperature=0.0 if request.n == 1 else 1.0,
        seed=index,
        max_tokens=request.output_len,
        ignore_eos=True,
        detokenize=False,
    )


def tokens_equal(results: Sequence[BackendResult]) -> bool:
    """True when every backend produced the very same tokens for every request."""
    return all(result.tokens == results[0].tokens for result in results)
