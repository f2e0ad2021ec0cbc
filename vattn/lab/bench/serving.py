"""Serving metrics with the definitions and the JSON keys of vLLM's benchmark (`vllm bench serve`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vattn.lab.bench.slo import Slo
from vattn.lab.bench.timeline import Timeline

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)


def serving_metrics(
    timelines: Sequence[Timeline], duration_s: float, slo: Slo | None = None
) -> dict[str, float | int | None]:
    """Throughputs per second of `duration_s`, latencies in milliseconds.

    Only requests that succeeded count, as in vLLM. `std` is the population's. A latency of nothing (the TPOT
    of one-token outputs) is None, since JSON has no NaN. `request_goodput` is there with an `slo` only.
    """
    done = [t for t in timelines if t.success]
    inputs, outputs = sum(t.prompt_len for t in done), sum(t.output_len for t in done)

    def rate(count: int) -> float | None:
        return count / duration_s if duration_s > 0 else None

    metrics: dict[str, float | int | None] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(done)),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
    }
    if slo is not None:
        metrics["request_goodput"] = rate(sum(map(slo.good, timelines)))
    latencies: dict[str, list[float]] = {
        "ttft": [t.ttft for t in done if t.ttft is not None],
        "tpot": [tpot for t in done for tpot in t.tpots],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.e2el for t in done if t.e2el is not None],
    }
    for name, seconds in latencies.items():
        metrics |= {f"{key}_{name}_ms": value for key, value in summary(seconds).items()}
    return metrics


def summary(seconds: Iterable[float]) -> dict[str, float | None]:
    """Mean, median, std and percentiles (linear between ranks) in milliseconds; None of nothing."""
    ms = np.array(list(seconds), np.float64) * 1e3
    keys = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))
    if not ms.size:
        return dict.fromkeys(keys)
    percentiles = np.percentile(ms, PERCENTILES)
    values = [ms.mean(), percentiles[0], ms.std(), *percentiles]
    return dict(zip(keys, map(float, values), strict=True))
