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
    """torch computes on one thread meanwhile: threads that wait for a processor would be in the figures."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Latency(NamedTuple):
    """Microseconds of one kind of call on pages of `page_bytes`; `span`: pages mapped side by side."""

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
        """The value of a call, whose duration is kept."""
        start = perf_counter_ns()
        value = call(*args)
        self.add(label, perf_counter_ns() - start)
        return value

    def add(self, label: str, nanoseconds: int) -> None:
        """Keep a duration that was measured otherwise."""
        self.samples.setdefault(label, []).append(nanoseconds)

    def latencies(self, page_bytes: int, span: int) -> list[Latency]:
        """Summary of every label, in the order in which they came first."""
        return [
            Latency(page_bytes, span, label, median(times) / 1e3, percentile(times, 99) / 1e3, len(times))
            for label, times in self.samples.items()
        ]


def percentile(samples: list[int], percent: int) -> int:
    """The smallest sample that at least `percent` % of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
