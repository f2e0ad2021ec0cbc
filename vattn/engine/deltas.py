"""The engine's reports. A report holds what is new for one request since its last report.

    step        1      2      3            a streamed request is reported in every step that gave it a token;
    streamed    t0     t1     t2, end      any other request is reported once, at its end
    other                     t0 t1 t2, end

A report holds tokens. The client turns them into text (`OutputCollector`), outside the step. Only requests
with stop strings are detokenized inside the step, because their text decides when the output ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vattn.outputs import RequestMetrics, TokenLogprobs
from vattn.sampling.detokenize import Finish


class BranchDelta(NamedTuple):
    """What is new in one output of a request."""

    branch: int
    """Index of the output among the `n` (or `best_of`) outputs."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One entry per new token; empty unless requested. The entries do not hold the tokens' text."""
    finish: Finish | None
    """Why the output ended; None if it has not ended."""
    text: str | None
    """New text. The engine makes it only for requests with stop strings."""


class Beam(NamedTuple):
    """One finished output of a beam search."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish: Finish


@dataclass(slots=True)
class RequestDelta:
    """What is new for one request."""

    request_id: str
    branches: Sequence[BranchDelta]
    finished: bool
    metrics: RequestMetrics
    """A copy of the metrics at the time of the report."""
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """New log-probability entries of the prompt."""
    beams: list[Beam] = field(default_factory=list)
    """The outputs of a beam search, best first. Set only when the search has ended."""
    error: str | None = None
    """Why the request failed."""
    failure: Exception | None = None
    """The exception of the failed step that computed this request. `error` then holds its message."""
