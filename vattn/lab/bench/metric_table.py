"""Every metric of a served load, in one place: its key in the JSON, how it is computed, shown and judged.

Keys and definitions of throughputs and latencies are those of `vllm bench serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vattn import units

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Metric:
    """`show` makes a text of a value, unit included; `formula` is for readers."""

    key: str
    group: str
    label: str
    show: Callable[[float], str]
    better: Better
    formula: str

    @property
    def title(self) -> str:
        """The label where no heading names the group."""
        return f"{self.group} {self.label}" if self.group.lower() in LATENCIES else self.label


LATENCIES = {
    "ttft": ("time to first token", "first token - arrival"),
    "tpot": ("mean time per output token after the first", "(last token - first token) / (tokens - 1)"),
    "itl": ("every gap between tokens", "token - token before"),
    "e2el": ("from arrival to the last token", "last token - arrival"),
}
"""By key: what it is, and its formula for one request (of ITL: one gap)."""
PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))
"""Of each latency, in milliseconds; `std` is the population's, `p50` the median under another name."""

_THROUGHPUT = (
    Metric("duration", "Throughput", "duration", units.seconds, "lower", "last token - start"),
    Metric("completed", "Throughput", "requests completed", units.number, "higher", "without an error"),
    Metric("failed", "Throughput", "requests failed", units.number, "lower", "all - completed"),
    Metric("total_input_tokens", "Throughput", "prompt tokens", units.number, "neither", "of completed"),
    Metric("total_output_tokens", "Throughput", "output tokens", units.number, "neither", "of completed"),
    Metric(
        "request_throughput", "Throughput", "requests / s", units.number, "higher", "completed / duration"
    ),
    Metric(
        "request_goodput",
        "Throughput",
        "goodput, requests / s",
        units.number,
        "higher",
        "requests within every limit of --goodput / duration",
    ),
    Metric(
        "output_throughput",
        "Throughput",
        "output tokens / s",
        units.number,
        "higher",
        "output tokens / duration",
    ),
    Metric(
        "total_token_throughput",
        "Throughput",
        "all tokens / s",
        units.number,
        "higher",
        "(prompt + output tokens) / duration",
    ),
)
_LATENCY = tuple(
    Metric(
        f"{statistic}_{name}_ms",
        name.upper(),
        {"std": "standard deviation"}.get(statistic, statistic),
        units.millis,
        "lower",
        f"{statistic} of {formula}, in ms",
    )
    for name, (_, formula) in LATENCIES.items()
    for statistic in STATISTICS
)
_MEMORY = (
    Metric("peak_in_use_bytes", "Memory", "peak in use", units.nbytes, "lower", "most bytes requests need"),
    Metric(
        "peak_kv_bytes",
        "Memory",
        "peak held (in use, parked, cached)",
        units.nbytes,
        "lower",
        "most of in use + parked + cached",
    ),
    Metric("peak_physical_bytes", "Memory", "peak physical", units.nbytes, "lower", "most bytes created"),
    Metric(
        "kv_utilization",
        "Memory",
        "KV utilization",
        units.percent,
        "higher",
        "bytes of tokens / bytes mapped by requests, sums over steps",
    ),
    Metric("tail_waste_share", "Memory", "wasted in tails", units.percent, "lower", "unused tails / mapped"),
    Metric(
        "external_waste_share",
        "Memory",
        "reserved, never used",
        units.percent,
        "lower",
        "reserved beyond the tokens / mapped",
    ),
    Metric("shared_saved_share", "Memory", "saved by sharing", units.percent, "higher", "saved / mapped"),
)
_STEPS = (
    Metric("steps", "Steps", "steps", units.number, "neither", "that ran the model"),
    Metric("mean_running", "Steps", "mean running", units.number, "higher", "mean over steps"),
    Metric("peak_running", "Steps", "peak running", units.number, "higher", "most requests running"),
    Metric("attention_s", "Steps", "time in attention", units.seconds, "lower", "all layers, all steps"),
    Metric(
        "attention_share",
        "Steps",
        "attention's share of the time",
        units.percent,
        "neither",
        "time in attention / time of the steps it was measured in",
    ),
)
METRICS = {m.key: m for m in (*_THROUGHPUT, *_LATENCY, *_MEMORY, *_STEPS)}
"""By key, in the order in which they are shown."""


def metric(key: str) -> Metric:
    """A metric of the table; of a key it does not have, one that shows plain numbers."""
    found = METRICS.get(key)
    return found or Metric(key, "Others", key.replace("_", " "), units.number, "neither", "")
