"""A step on its way, what comes out of it, and what a request is told if nothing does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vattn.engine.executor import Handle
from vattn.engine.groups import BeamGroup
from vattn.engine.request import Request
from vattn.outputs import TokenLogprobs


class NewToken(NamedTuple):
    """The token that one step produced for one request."""

    request: Request
    token: int
    """A negative number means that sampling failed; see `sampling_failure`."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class InFlight:
    """A step that was launched and whose tokens are not known yet."""

    handle: Handle
    sampling: list[Request]
    """The requests that get a token, in the order of the executor's result."""
    started: float
    """Time of the launch, in seconds on the executor's clock."""
    decodes: int
    prompt_tokens: int

    @property
    def must_settle_first(self) -> bool:
        """True if the next batch depends on this step's tokens and not only on its KV."""
        return any(r.sampling.edited or isinstance(r.group, BeamGroup) for r in self.sampling)


def broken(error: Exception) -> str:
    """What a request is told whose token could not be entered."""
    return (
        f"its next token could not be entered ({type(error).__name__}: {error}): try again; if the tokenizer "
        "is at fault, detokenize=False does without it"
    )


def out_of_memory(request: Request) -> str:
    """What a request is told that gets no memory although nothing else runs."""
    return (
        f"no memory for token {request.num_tokens:,} although nothing else runs: the machine, not the "
        "budget, is short of it; lower kv_cache_memory_bytes or free memory"
    )
