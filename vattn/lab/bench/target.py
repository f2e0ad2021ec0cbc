"""What a load generator asks of an engine, ours or another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vattn.lab.bench.steps import StepLog


@dataclass(frozen=True)
class Finished:
    """A request that ended. Times are on the target's clock."""

    request_id: str
    token_ids: list[int]
    """Of its first output: what a conversation goes on with."""
    token_times: list[list[float]]
    """For each output, when each of its tokens came."""
    finish_reason: str | None = "length"
    error: str | None = None
    first_scheduled: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Inside:
    """What an engine tells about itself after a run; empty where it can't be asked."""

    counters: dict[str, Any] = field(default_factory=dict)
    steps: StepLog | None = None


class Target(ABC):
    """An engine with nothing to do, ready for one run."""

    kv: dict[str, str | int]
    """How its KV memory is laid out; empty if it does not say."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds now; the clock of every time it reports."""

    @abstractmethod
    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        """Start a request that produces exactly `output_len` tokens, `n` times over or by `n` beams."""

    @abstractmethod
    def advance(self, wait_s: float) -> list[Finished]:
        """Work, or wait for work in progress, and return what ended meanwhile, maybe nothing.

        With nothing to do it sleeps `wait_s` seconds, which are infinite only while requests run.
        """

    def start(self) -> float:
        """The run starts now: counters count from here. Returns the time on its clock."""
        return self.clock()

    def inside(self) -> Inside:
        """Called once, when the run is over."""
        return Inside()


class System(ABC):
    """One column of a comparison: an engine with its options, opened afresh for every run."""

    name: str
    options: dict[str, Any]
    peer: ClassVar[bool] = False
    """True for somebody else's engine."""
    barrier: bool = False
    """Static batching: no request is sent before all of the batch before it have ended."""

    @abstractmethod
    def open(self) -> AbstractContextManager[Target]:
        """A fresh engine; what takes time before requests can be served happens here."""
