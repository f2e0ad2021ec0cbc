"""The sampling state of one request, from its first token to its last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vattn.params import SamplingParams
from vattn.sampling.philox import derive_seed
from vattn.sampling.token_counts import TokenCounts


@dataclass(eq=False, slots=True)
class SamplingState:
    """A request's sampling state; made by `SamplingStates.new_state`. It outlives preemption.

    The engine appends every accepted token to `output_token_ids`, the list object given here. No other update
    is needed. Two states are equal only if they are the same object.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    """In [0, 2**64): the request's own, or one drawn for it."""
    branch: int = 0
    """Which of several continuations of one prompt; branches with one seed draw independent numbers."""
    eos_token_ids: frozenset[int] = frozenset()
    pending: int = 0
    """Tokens sampled but not yet in `output_token_ids`; kept by the engine."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never to be completed."""
    terminal_ids: frozenset[int] = field(init=False)
    """EOS and stop tokens: not to be sampled before `min_tokens`."""
    edited: bool = field(init=False)
    """True when some logits may be changed before the choice."""
    plain: bool = field(init=False)
    """True when the next token is the argmax of the model's logits and nothing else is asked for."""
    _counts: TokenCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.params
        self.terminal_ids = self.eos_token_ids | frozenset(params.stop_ids)
        self.edited = bool(
            params.penalised
            or params.logit_bias
            or self.bad_words
            or (params.min_tokens and self.terminal_ids)
        )
        self.plain = params.greedy and not self.edited and params.logprobs is None

    def counts(self, vocab_size: int) -> TokenCounts:
        """Token counts for the penalties, made when first needed; of tokens that have a logit."""
        if self._counts is None:
            prompt = self.prompt_token_ids if self.params.repetition_penalty != 1.0 else ()
            self._counts = TokenCounts([token for token in prompt if 0 <= token < vocab_size])
        return self._counts


class SamplingStates:
    """Makes the states of an engine's requests.

    `seed` is the root from which requests without a seed get theirs, in order of `new_state`;
    `eos_token_ids` are the model's. Not thread-safe.
    """

    def __init__(self, *, seed: int = 0, eos_token_ids: Iterable[int] = ()) -> None:
        self._root = seed % 2**64
        self._drawn = 0
        self._eos_token_ids = frozenset(eos_token_ids)

    def new_state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        *,
        bad_words: Iterable[Sequence[int]] = (),
        branch: int = 0,
    ) -> SamplingState:
        """State of a new request. `bad_words` are the token sequences of `params.bad_words`."""
        if params.seed is not None:
            seed = params.seed % 2**64
        else:
            seed = derive_seed(self._root, self._drawn)
            self._drawn += 1
        return SamplingState(
            params=params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            seed=seed,
            branch=branch,
            eos_token_ids=self._eos_token_ids,
            bad_words=tuple(tuple(word) for word in bad_words),
        )
