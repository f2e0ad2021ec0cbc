"""Counters of an engine since its start, and latency summaries over many requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vattn.kv.base import KVStats
from vattn.kv.usage import MemoryUsage
from vattn.outputs import RequestMetrics


@dataclass
class EngineMetrics:
    """Counters of one engine. Times in seconds, memory in bytes."""

    steps: int = 0
    computed_tokens: int = 0
    """Tokens run through the model: prompts, outputs, and recomputed ones after preemption."""
    output_tokens: int = 0
    finished_requests: int = 0
    """Requests that ended, including aborted and failed ones."""
    timed_out_requests: int = 0
    """Requests that ended because their `timeout_s` had passed."""
    refused_requests: int = 0
    """Requests that were not accepted because too many waited."""
    preemptions: int = 0
    swapped_requests: int = 0
    """Preemptions in which K and V were copied to host memory."""
    recomputed_tokens: int = 0
    """Tokens that were recomputed because a preemption had dropped their K and V."""
    peak_running: int = 0
    peak_kv_bytes: int = 0
    """Peak physical KV memory held: in use, parked or cached (`MemoryUsage.held`)."""
    peak_in_use_bytes: int = 0
    """Peak physical KV memory that live requests needed."""
    peak_shared_saved_bytes: int = 0
    """Peak KV memory that live requests saved by sharing (`shared_saved`)."""
    kv_stats: KVStats = field(default_factory=KVStats)
    _logical_sum: float = 0.0
    _mapped_sum: float = 0.0

    def observe_step(self, tokens: int, running: int, usage: MemoryUsage) -> None:
        self.steps += 1
        self.computed_tokens += tokens
        self.peak_running = max(self.peak_running, running)
        self.peak_kv_bytes = max(self.peak_kv_bytes, usage.held)
        self.peak_in_use_bytes = max(self.peak_in_use_bytes, usage.in_use)
        self.peak_shared_saved_bytes = max(self.peak_shared_saved_bytes, usage.shared_saved)
        self._logical_sum += usage.logical
        self._mapped_sum += usage.in_use + usage.shared_saved

    @property
    def kv_utilization(self) -> float:
        """Share of the memory mapped by requests that held tokens. Averaged over steps, weighted by bytes."""
        return self._logical_sum / self._mapped_sum if self._mapped_sum else 1.0

    def to_dict(self) -> dict[str, Any]:
        out = {k: v for k, v in asdict(self).items() if not k.startswith("_") and k != "kv_stats"}
        return {**out, "kv_utilization": self.kv_utilization, **asdict(self.kv_stats)}


@dataclass(frozen=True)
class LatencySummary:
    """Mean, median, standard deviation and percentiles of a latency, in milliseconds.

    Without any values, every field is NaN.
    """

    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float | None]) -> LatencySummary:
        ms = np.array([s for s in seconds if s is not None], np.float64) * 1e3
        if not ms.size:
            return LatencySummary(*[float("nan")] * 7)
        p50, p90, p95, p99 = (float(p) for p in np.percentile(ms, [50, 90, 95, 99]))
        return LatencySummary(float(ms.mean()), p50, float(ms.std()), p50, p90, p95, p99)


@dataclass(frozen=True)
class RequestSummary:
    """Latencies over many requests, with vLLM's definitions (`RequestMetrics`)."""

    ttft: LatencySummary
    tpot: LatencySummary
    e2e: LatencySummary
    queue: LatencySummary

    @staticmethod
    def of(metrics: Iterable[RequestMetrics]) -> RequestSummary:
        all_metrics = list(metrics)
        return RequestSummary(
            ttft=LatencySummary.of(m.ttft for m in all_metrics),
            tpot=LatencySummary.of(m.tpot for m in all_metrics),
            e2e=LatencySummary.of(m.e2e_latency for m in all_metrics),
            queue=LatencySummary.of(m.queue_time for m in all_metrics),
        )
