"""The serving metrics of a run (`metric_table`), whether it was measured or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vattn.lab.bench.metric_table import LATENCIES, PERCENTILES, STATISTICS
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.timeline import Timeline

Array = npt.NDArray[np.float64]


class Samples(NamedTuple):
    """Seconds, and how often each occurs; None: once."""

    seconds: Array
    counts: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Served:
    """What metrics are computed from. Only requests that succeeded count, as in vLLM."""

    duration_s: float
    requests: int
    """In all, failures included."""
    completed: int
    input_tokens: int
    output_tokens: int
    latencies: Mapping[str, Samples]
    """By key of `LATENCIES`."""
    good: int | None = None
    """Requests within every limit; None where there were none."""

    def metrics(self) -> dict[str, float | int | None]:
        """Throughputs per second, latencies in milliseconds.

        A latency of nothing (the TPOT of one-token outputs) is None, since JSON has no NaN. `request_goodput`
        is there with limits only.
        """

        def rate(count: int) -> float | None:
            return count / self.duration_s if self.duration_s > 0 else None

        found: dict[str, float | int | None] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.requests - self.completed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": rate(self.completed),
            "output_throughput": rate(self.output_tokens),
            "total_token_throughput": rate(self.input_tokens + self.output_tokens),
        }
        if self.good is not None:
            found["request_goodput"] = rate(self.good)
        for name in LATENCIES:
            found |= {f"{key}_{name}_ms": value for key, value in summary(self.latencies[name]).items()}
        return found


def serving_metrics(
    timelines: Sequence[Timeline], duration_s: float, slo: Slo | None = None
) -> dict[str, float | int | None]:
    """Of requests whose every token was timed."""
    done = [t for t in timelines if t.success]
    latencies: dict[str, list[float]] = {
        "ttft": [t.ttft for t in done if t.ttft is not None],
        "tpot": [tpot for t in done for tpot in t.tpots],
        "itl": [gap for t in done for gap in t.itl],
        "e2el": [t.e2el for t in done if t.e2el is not None],
    }
    return Served(
        duration_s,
        len(timelines),
        len(done),
        sum(t.prompt_len for t in done),
        sum(t.output_len for t in done),
        {name: Samples(np.array(seconds, np.float64)) for name, seconds in latencies.items()},
        None if slo is None else sum(map(slo.good, timelines)),
    ).metrics()


def summary(samples: Samples) -> dict[str, float | None]:
    """`STATISTICS` in milliseconds, percentiles linear between ranks; None of nothing."""
    values, counts = samples.seconds * 1e3, samples.counts
    if not values.size:
        return dict.fromkeys(STATISTICS)
    mean = float(np.average(values, weights=counts))
    std = float(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
    percentiles = [weighted_percentile(values, counts, p) for p in PERCENTILES]
    return dict(zip(STATISTICS, (mean, percentiles[0], std, *percentiles), strict=True))


def weighted_percentile(values: Array, counts: npt.NDArray[np.int64] | None, percent: float) -> float:
    """`np.percentile` of each value repeated `counts` times, without repeating it."""
    if counts is None:
        return float(np.percentile(values, percent))
    order = np.argsort(values)
    values, last = values[order], np.cumsum(counts[order])
    position = percent / 100 * (int(last[-1]) - 1)
    low, high = (
        float(values[np.searchsorted(last, np.floor(p), side="right")])
        for p in (position, min(np.floor(position) + 1, float(last[-1] - 1)))
    )
    return float(low + (high - low) * (position - np.floor(position)))
