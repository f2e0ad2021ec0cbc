"""A request as the scheduler sees it, without text, sampling or a list entry per token."""

from __future__ import annotations

from collections.abc import Sequence

from vattn.engine.deltas import BranchDelta
from vattn.engine.request import Request, RequestStatus
from vattn.engine.service import DEFAULT_SERVICE
from vattn.outputs import RequestMetrics, TokenLogprobs
from vattn.params import SamplingParams
from vattn.sampling.detokenize import Finish
from vattn.sampling.sampling_state import SamplingState

_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
_SAMPLING = SamplingState(_PARAMS, (), (), seed=0)
_LENGTH = Finish("length")
_ID_SPACE = 1 << 24  # more tokens than any request has


class SimulatedRequest(Request):
    """Stands in for `Request`: same queueing, same progress; its tokens are counted, not kept.

        | prompt_len | outputs known | pending |
        |---- num_computed ----|- num_remaining |

    `prompt`: ids; None: ids that no other request has. `shares`: it may share prefixes with others; its
    tokens then are a real list as soon as somebody looks at them. If not, all that can be seen of them is a
    `range`, which takes no memory. Times are seconds of the virtual clock.
    """

    def __init__(
        self,
        index: int,
        prompt_len: int,
        output_len: int,
        arrival_s: float,
        prompt: Sequence[int] | None = None,
        *,
        shares: bool = False,
    ) -> None:
        self.request_id = f"r{index}"
        self.index = index
        self.arrival = index
        self.plan = index
        """Which request of the workload it is."""
        self.prompt_len = prompt_len
        self.max_tokens = output_len
        self.service = DEFAULT_SERVICE
        self.rank = (0, index)
        self.stream = False
        self.params = _PARAMS
        self.sampling = _SAMPLING
        self.metrics = RequestMetrics(arrival_s, num_prompt_tokens=prompt_len)
        self.num_computed = 0
        self.known = prompt_len
        """Tokens the host knows: prompt and settled outputs."""
        self.total = prompt_len + output_len
        """Tokens it will have."""
        self.pending = 0
        self.pending_row = None
        self.status = RequestStatus.WAITING
        self.finish = None
        self.error = None
        self.spans: list[int] = []
        """Steps in which it got a token: first, last, first, last … (the last one is `last_step`)."""
        self.last_step = -2
        self.salt = "" if shares else None
        self.group = None
        self.prompt_logprobs = []
        self._prompt_logprobs_reported = 0
        self._tokens: list[int] | None = None
        self._base = (index + 1) * _ID_SPACE
        self._own = prompt is None
        ids = range(self._base, self._base + prompt_len) if prompt is None else prompt
        self.prompt_token_ids = ids  # type: ignore[assignment]

    @property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        """Prompt and known outputs; where prefixes are shared one growing list, known by its identity."""
        if self._tokens is not None:
            return self._tokens
        ids = range(self._base, self._base + self.known)
        if self.salt is None and self._own:
            return ids  # type: ignore[return-value]
        self._tokens = [*self.prompt_token_ids, *ids[self.prompt_len :]]
        return self._tokens

    @property
    def output_token_ids(self) -> list[int]:  # type: ignore[override]
        """As many as there are."""
        return range(self.known - self.prompt_len)  # type: ignore[return-value]

    def add_pending(self, row: int) -> None:
        self.pending_row = row
        self.pending += 1

    def settle_pending(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.pending_row = None

    def append(self, token: int, logprobs: TokenLogprobs | None) -> Finish | None:
        """Its next token is known; which one is all the same."""
        if self._tokens is not None:
            self._tokens.append(self._base + self.known)
        self.known += 1
        return _LENGTH if self.known == self.total else None

    def take_delta(self, index: int) -> BranchDelta | None:
        """Nobody reads its tokens."""
        return None

    @property
    def num_tokens(self) -> int:
        return self.known + self.pending

    @property
    def num_remaining(self) -> int:
        return self.known + self.pending - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Output tokens, the pending one included."""
        return self.known + self.pending - self.prompt_len

    @property
    def ends_with_pending(self) -> bool:
        return self.known + self.pending >= self.total

    def emitted(self, step: int) -> None:
        """Its next token came out of `step`."""
        if self.last_step != step - 1:
            if self.spans:
                self.spans.append(self.last_step)
            self.spans.append(step)
        self.last_step = step

    def release_tokens(self) -> None:
        """It is over: its ids are not needed any more."""
        self.prompt_token_ids = self._tokens = []

    def token_steps(self) -> list[range]:
        """The steps that gave it a token, in runs."""
        marks = [*self.spans, self.last_step] if self.spans else []
        return [range(first, last + 1) for first, last in zip(marks[::2], marks[1::2], strict=True)]
