"""The results of a request: text, tokens, log-probabilities and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class Logprob(NamedTuple):
    """One token's log-probability at one position, from the model's own distribution."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 for the most likely token of the vocabulary; equally likely tokens share the best rank."""
    decoded_token: str | None = None
    """The token's text by itself; None without a tokenizer."""


TokenLogprobs = dict[int, Logprob]
"""The entries of one position, by token id. The token at that position is first; the others follow, most
likely first."""


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's events, in seconds on one monotonic clock. None means not yet."""

    arrival_time: float
    """When the engine accepted the request."""
    first_scheduled_time: float | None = None
    """When its first token was put into a batch."""
    first_token_time: float | None = None
    """When its first output token was known."""
    finished_time: float | None = None
    """When its last output token was known, or it was aborted."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose K and V were found in the prefix cache, counted once, at admission."""
    num_preemptions: int = 0
    """How many times the request was preempted."""
    num_branches: int = 1
    """Number of outputs generated side by side, for `n`, `best_of` or a beam search."""

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first batch."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token: seconds per token after the first. None with fewer than two tokens.

        With several branches it is the time per token of one branch, because they run side by side.
        For an aborted request it includes the time until the abort."""
        decode = _between(self.first_token_time, self.finished_time)
        length = self.num_output_tokens / self.num_branches
        if decode is None or length < 2:
            return None
        return decode / (length - 1)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return _between(self.arrival_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's outputs, finished or still growing."""

    index: int
    """Index of the output among the request's `n` outputs."""
    text: str
    """Text so far. While the request runs, an end that may begin a stop string or an incomplete character is
    held back."""
    token_ids: list[int]
    """Every sampled token, including EOS and stop tokens."""
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' log-probabilities; None unless `logprobs` was requested."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token; None unless requested."""
    finish_reason: FinishReason | None = None
    """`stop` (EOS, stop token or stop string), `length`, `abort`, `timeout`, `error`; None
    while running."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None for EOS and the other reasons."""
    score: float | None = None
    """In a beam search: cumulative log-probability / length ** length_penalty. Outputs are sorted by it."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its outputs: the result of `generate`, or one item of a stream."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token; None for the first token, which nothing predicts. None unless requested."""
    error: str | None = None
    """Why the request failed, if its `finish_reason` is `error`. Other requests in its batch go on."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that needed no computing, because they were in the prefix cache."""
        return self.metrics.num_cached_tokens
