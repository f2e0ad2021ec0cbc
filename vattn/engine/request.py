"""One request from arrival to its last token: what the scheduler knows about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vattn.engine.detokenize import IncrementalDetokenizer
from vattn.engine.sampler import SamplingState
from vattn.outputs import RequestMetrics
from vattn.params import SamplingParams


class RequestStatus(StrEnum):
    """WAITING -> RUNNING -> FINISHED, and back to WAITING on preemption."""

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
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer
    arrival: int
    """Order of arrival: smaller is older. Age decides who yields memory."""
    max_tokens: int
    """Output tokens at most, the model's length already taken into account."""
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose K and V are still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
