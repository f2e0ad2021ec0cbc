"""Timing of short device work: captured in a graph, the L2 cache flushed, several contestants in turns.

    round 1   flush A | flush B | flush C |      each letter: one replay of a graph of `calls` launches,
    round 2   flush B | flush C | flush A |      over buffers that rotate, between two events
    ...

The figure of a contestant is the median over rounds of (time between its events) / calls.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[int], object]
"""Launches the work once; the argument counts launches, to rotate over buffers."""

SAMPLE_SECONDS = 1e-3
"""A sample lasts about this long, so that the resolution of events does not matter."""
MOST_CALLS = 48
LONG_SECONDS = 5e-3
"""Work longer than this gets fewer rounds."""


class Deadline:
    """How much of a time budget is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch over `samples` samples of `calls` launches each."""

    median_us: float
    min_us: float
    max_us: float
    samples: int
    calls: int
    graph: bool
    """Replayed from a CUDA graph: without the host's launch overhead."""


class Prepared(ABC):
    """Work that can be run again, `calls` launches at a time."""

    calls: int
    graph: bool

    @abstractmethod
    def sample(self) -> None:
        """Run and time it once."""

    @abstractmethod
    def seconds(self) -> list[float]:
        """Of every sample so far; waits for the device."""

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Samples worth taking."""

    def timing(self) -> Timing:
        us = [s / self.calls * 1e6 for s in self.seconds()]
        return Timing(statistics.median(us), min(us), max(us), len(us), self.calls, self.graph)


class Clock(ABC):
    @abstractmethod
    def prepare(self, call: Call) -> Prepared:
        """Warm up and get ready to time."""


class _HostPrepared(Prepared):
    calls = 1
    graph = False
    rounds = 2

    def __init__(self, call: Call) -> None:
        self._call = call
        self._seconds: list[float] = []

    def sample(self) -> None:
        start = time.perf_counter()
        self._call(len(self._seconds))
        self._seconds.append(time.perf_counter() - start)

    def seconds(self) -> list[float]:
        return self._seconds


class HostClock(Clock):
    """For dry runs: the host's clock around each call, two samples."""

    def prepare(self, call: Call) -> Prepared:
        return _HostPrepared(call)


class _CudaPrepared(Prepared):
    def __init__(self, call: Call, flush: torch.Tensor) -> None:
        self._flush = flush
        for i in range(2):  # compiles, allocates
            call(i)
        torch.cuda.synchronize()
        first, last = _event(), _event()
        first.record()
        call(2)
        last.record()
        last.synchronize()
        estimate = max(first.elapsed_time(last) / 1e3, 1e-6)
        self.calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / estimate)))
        self._rounds = 5 if estimate * self.calls > LONG_SECONDS else 11
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._run, self.graph = self._captured(call)

    @property
    def rounds(self) -> int:
        return self._rounds

    def _captured(self, call: Call) -> tuple[Callable[[], None], bool]:
        def run() -> None:
            for i in range(self.calls):
                call(i)

        try:
            graph = torch.cuda.CUDAGraph()
            # The outer context restores the stream even when ending a broken capture raises.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                run()
        except Exception as error:
            torch.cuda.synchronize()  # raises if more is wrong than that this cannot be captured
            print(f"    not captured, timed with launch overhead: {str(error).splitlines()[0]}")
            return run, False
        graph.replay()
        return graph.replay, True

    def sample(self) -> None:
        self._flush.zero_()
        first, last = _event(), _event()
        first.record()
        self._run()
        last.record()
        self._events.append((first, last))

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1e3 for first, last in self._events]


class CudaClock(Clock):
    """CUDA events around graph replays."""

    def __init__(self, device: str = "cuda") -> None:
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._flush = torch.empty(4 * l2, dtype=torch.uint8, device=device)

    def prepare(self, call: Call) -> Prepared:
        return _CudaPrepared(call, self._flush)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def take_turns(contestants: Mapping[str, Prepared]) -> dict[str, Timing]:
    """Sample all of them in rounds whose order rotates; the timing of each."""
    names = list(contestants)
    for i in range(max((p.rounds for p in contestants.values()), default=0)):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            if i < contestants[name].rounds:
                contestants[name].sample()
    return {name: prepared.timing() for name, prepared in contestants.items()}
