"""Samples of durations, and their summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that threads waiting for a processor don't distort the figures."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Latency(NamedTuple):
    """Latency of one kind of call on pages of `page_bytes`, `span` of them mapped side by side."""

    page_bytes: int
    span: int
    call: str
    median_us: float
    p99_us: float
    n: int


class Stopwatch:
    """Times calls by label; not thread-safe."""

    def __init__(self) -> None:
        self.samples: dict[str, list[int]] = {}

    def time(self, label: str, call: Callable[..., Value], *args: object) -> Value:
        """Make a call, record its duration and return its value."""
        start = perf_counter_ns()
        value = call(*args)
        self.add(label, perf_counter_ns() - start)
        return value

    def add(self, label: str, nanoseconds: int) -> None:
        """Record a duration that was measured elsewhere."""
        self.samples.setdefault(label, []).append(nanoseconds)

    def latencies(self, page_bytes: int, span: int) -> list[Latency]:
        """Summary of every label, in order of first use."""
        return [
            Latency(page_bytes, span, label, median(times) / 1e3, percentile(times, 99) / 1e3, len(times))
            for label, times in self.samples.items()
        ]


def percentile(samples: list[int], percent: int) -> int:
    """The smallest sample that at least `percent` % of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
