"""What the engine reports: of each request, what is new since its last report.

    step        1      2      3            a streamed request is reported in every step that gave it a token,
    streamed    t0     t1     t2, end      any other once, at its end
    other                     t0 t1 t2, end

A report holds tokens. Text is made from them by whoever wants it (`OutputCollector`), outside the step. Only
the text of a request with stop strings is made inside: there it decides when the output ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vattn.outputs import RequestMetrics, TokenLogprobs
from vattn.sampling.detokenize import Finish


class BranchDelta(NamedTuple):
    """What is new of one output of a request."""

    branch: int
    """Which of the `n` (or `best_of`) outputs."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One entry per new token; empty unless asked for. Without the tokens' texts."""
    finish: Finish | None
    """Why the output ended; None: it goes on."""
    text: str | None
    """New text, if the engine made it: of requests with stop strings."""


class Beam(NamedTuple):
    """One ended text of a beam search."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish: Finish


@dataclass(slots=True)
class RequestDelta:
    """What is new of one request."""

    request_id: str
    branches: Sequence[BranchDelta]
    finished: bool
    metrics: RequestMetrics
    """As they stand; a copy."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """Entries of the prompt that are new."""
    beams: list[Beam] = field(default_factory=list)
    """Of a beam search, at its end: best first."""
    error: str | None = None
    """Why the request failed."""
    failure: Exception | None = None
    """What was raised, when a step that computed this request failed; then `error` says so."""
