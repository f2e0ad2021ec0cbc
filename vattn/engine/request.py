"""The state of one request, from its arrival to its last token."""

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
"""The smaller rank goes first. No two requests have the same rank (see `vattn.engine.policy`)."""


class RequestStatus(StrEnum):
    """WAITING -> RUNNING -> FINISHED, and back to WAITING on preemption.

    HELD: the request must wait for others of its group. It is a branch whose prompt another branch
    computes, or a beam that gave up its memory while it waited for the other beams.
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
    """The list that `sampling` reads; `append` adds to it."""
    params: SamplingParams
    sampling: SamplingState
    stop: StopChecker
    arrival: int
    """Order of arrival; smaller is older."""
    max_tokens: int
    """Maximum number of output tokens. The model's maximum length is already taken into account."""
    metrics: RequestMetrics
    stream: bool = False
    """Report the request after each token and not only at the end."""
    service: Service = DEFAULT_SERVICE
    rank: Rank = (0, 0)
    """The scheduler sets it when the request arrives."""
    salt: str | None = None
    """The request shares cached prefixes with requests of the same salt; with none if this is None."""
    group: Group | None = None
    """The group of requests that answer the same prompt, if there are several."""
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    pending_row: int | None = None
    """Row of the newest token in the step in flight. That token is sampled, but the host does not know it
    yet."""
    status: RequestStatus = RequestStatus.WAITING
    finish: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of output tokens that have not been reported yet."""
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    _reported: int = 0
    """Number of output tokens that have been reported."""
    _finish_reported: bool = False
    _prompt_logprobs_reported: int = 0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including a pending one."""
        return len(self.token_ids) + self.sampling.pending

    @property
    def num_remaining(self) -> int:
        """Number of tokens whose K and V must still be computed."""
        return len(self.token_ids) + self.sampling.pending - self.num_computed

    @property
    def idle(self) -> bool:
        """True if all tokens are computed. The request is then a beam that waits for the other beams."""
        return not self.num_remaining

    @property
    def ends_with_pending(self) -> bool:
        """True if the pending token reaches the maximum length, so nothing more needs computing."""
        return len(self.output_token_ids) + self.sampling.pending >= self.max_tokens

    def add_pending(self, row: int) -> None:
        """Record that the step just launched samples a token at `row`."""
        self.pending_row = row
        self.sampling.pending += 1

    def settle_pending(self) -> None:
        """Record that the host now knows the oldest pending token."""
        self.sampling.pending -= 1
        if not self.sampling.pending:
            self.pending_row = None

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token: int, logprobs: TokenLogprobs | None) -> Finish | None:
        """Append a sampled token. Returns why the output ends with it, or None if it goes on."""
        self.token_ids.append(token)
        self.output_token_ids.append(token)
        self.metrics.num_output_tokens += 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        return self.stop.push(token)

    def take_delta(self, index: int) -> BranchDelta | None:
        """What is new since the last call, as output `index` of the group; None if nothing is new."""
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
        """The prompt's log-probability entries that are new since the last call."""
        new = self.prompt_logprobs[self._prompt_logprobs_reported :]
        self._prompt_logprobs_reported += len(new)
        return new
