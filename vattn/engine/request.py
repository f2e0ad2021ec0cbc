"""One request from arrival to its last token: what the scheduler knows about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from vattn.engine.deltas import BranchDelta
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.outputs import RequestMetrics, TokenLogprobs
from vattn.params import SamplingParams
from vattn.sampling.detokenize import Finish, StopChecker
from vattn.sampling.sampling_state import SamplingState

if TYPE_CHECKING:
    from vattn.engine.groups import Group

Rank = tuple[int, int]
"""Smaller goes first; of no two requests equal (`vattn.engine.policy`)."""


class RequestStatus(StrEnum):
    """WAITING -> RUNNING -> FINISHED, and back to WAITING on preemption.

    HELD: it can't go on before others of its group have: a branch whose prompt is being computed by
    another, or a beam that gave up its memory while it waited for the rest.
    """

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request's tokens and progress.

        token_ids   | prompt . . . . . | outputs . . . |
                    |------ num_computed ------|            K and V are in the cache
                                               |-- to do --|

    When all tokens are computed, the logits of the last one give the next token.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """The list that `sampling` watches; grows by `append`."""
    params: SamplingParams
    sampling: SamplingState
    stop: StopChecker
    arrival: int
    """Order of arrival: smaller is older."""
    max_tokens: int
    """Output tokens at most, the model's length taken into account."""
    metrics: RequestMetrics
    stream: bool = False
    """Report after each token, not only at the end."""
    service: Service = DEFAULT_SERVICE
    rank: Rank = (0, 0)
    """Given by the scheduler on arrival."""
    salt: str | None = None
    """With whom it shares cached prefixes; None: with nobody."""
    group: Group | None = None
    """The requests that answer the same prompt, if there are others."""
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    pending_row: int | None = None
    """Row of its newest token in the step in flight: it exists, but the host does not know it yet."""
    status: RequestStatus = RequestStatus.WAITING
    finish: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of output tokens that were not reported yet."""
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _reported: int = 0
    """Output tokens that were reported."""
    _finish_reported: bool = False
    _prompt_logprobs_reported: int = 0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Its tokens, a pending one included."""
        return len(self.token_ids) + self.sampling.pending

    @property
    def num_remaining(self) -> int:
        """Tokens whose K and V are still to be computed."""
        return len(self.token_ids) + self.sampling.pending - self.num_computed

    @property
    def idle(self) -> bool:
        """All its tokens are computed: a beam that waits for the others of its group."""
        return not self.num_remaining

    @property
    def ends_with_pending(self) -> bool:
        """The pending token is its last, whatever it is: nothing more needs computing."""
        return len(self.output_token_ids) + self.sampling.pending >= self.max_tokens

    def add_pending(self, row: int) -> None:
        """A token was sampled at `row` of the step just launched."""
        self.pending_row = row
        self.sampling.pending += 1

    def settle_pending(self) -> None:
        """The oldest pending token has arrived."""
        self.sampling.pending -= 1
        if not self.sampling.pending:
            self.pending_row = None

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token: int, logprobs: TokenLogprobs | None) -> Finish | None:
        """Enter a sampled token; says why the output ends with it, if it does."""
        self.token_ids.append(token)
        self.output_token_ids.append(token)
        self.metrics.num_output_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        return self.stop.push(token)

    def take_delta(self, index: int) -> BranchDelta | None:
        """What is new since the last call, as output `index` of its group; None: nothing."""
        tokens = self.output_token_ids[self._reported :]
        finish = None if self._finish_reported else self.finish
        if not tokens and finish is None:
            return None
        self._reported += len(tokens)
        self._finish_reported = self.finish is not None
        logprobs, self.logprobs = self.logprobs, []
        decodes = self.stop.detokenizer.decodes
        return BranchDelta(index, tokens, logprobs, finish, self.stop.detokenizer.take() if decodes else None)

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Entries of the prompt that are new since the last call."""
        new = self.prompt_logprobs[self._prompt_logprobs_reported :]
        self._prompt_logprobs_reported += len(new)
        return new
