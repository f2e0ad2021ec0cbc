"""When things happened to one request, as its sender saw it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Timeline:
    """One request. Times in seconds after the start of the run.

        arrival ──queue──> first_scheduled ──> token 0 ──ITL──> token 1 ──ITL──> … token n-1 = finished
           |<──────────── TTFT ──────────────────>|<──── TPOT x (n-1) ─────────────>|
           |<──────────────────────────── E2EL ────────────────────────────────────>|

    With several outputs each has its own tokens; the first token of any of them ends the TTFT.
    """

    request_id: str
    arrival_s: float
    """When it was sent; under a limit of concurrency, not before there was room for it."""
    prompt_len: int
    token_times: list[list[float]] = field(default_factory=list)
    """For each output, when each of its tokens came."""
    token_ids: list[int] = field(default_factory=list)
    """Of its first output; not part of a report."""
    first_scheduled_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def success(self) -> bool:
        return self.finished_s is not None and self.error is None

    @property
    def output_len(self) -> int:
        """Tokens of all its outputs."""
        return sum(map(len, self.token_times))

    @property
    def first_token_s(self) -> float | None:
        return min((times[0] for times in self.token_times if times), default=None)

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: until the last token."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def tpots(self) -> list[float]:
        """Time per output token after the first, of each output that has more than one."""
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.token_times if len(times) > 1]

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between tokens, output after output."""
        return [after - before for times in self.token_times for before, after in pairwise(times)]

    def to_dict(self) -> dict[str, Any]:
        """One entry of `requests` in a report; microseconds are kept."""
        return {
            "id": self.request_id,
            "arrival_s": _rounded(self.arrival_s),
            "first_scheduled_s": _rounded(self.first_scheduled_s),
            "first_token_s": _rounded(self.first_token_s),
            "finished_s": _rounded(self.finished_s),
            "itl_s": [round(gap, 6) for gap in self.itl],
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "outputs": len(self.token_times),
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "finish_reason": self.finish_reason,
            **({"error": self.error} if self.error is not None else {}),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def digest(timelines: Sequence[Timeline]) -> str:
    """Equal for runs that produced the same tokens for every request."""
    tokens = [timeline.token_ids for timeline in timelines]
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def duration(timelines: Sequence[Timeline]) -> float:
    """Seconds from the start of the run to the last token of all."""
    return max((t.finished_s for t in timelines if t.finished_s is not None), default=0.0)
