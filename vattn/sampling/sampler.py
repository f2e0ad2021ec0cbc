"""Chooses the next token of every request in a batch from its logits.

The order is that of vLLM's V1 engine:

    logits of the model ──> log-probabilities, if asked for
      + logit_bias
      bad_words, and EOS and stop tokens before min_tokens: banned
      penalties: repetition (prompt and output), frequency and presence (output)
      greedy: argmax
      random: temperature, min_p, top_k, top_p, draw

Random draws are counter-based (philox.py): output token k of a request depends on its logits, its
parameters and on (seed, branch, k), never on the rest of the batch, its size or a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.outputs import TokenLogprobs
from vattn.sampling.draw import Filters, argmax_rows, draw
from vattn.sampling.failures import NOT_FINITE, NOTHING_ALLOWED, sampling_failure
from vattn.sampling.logit_edits import LogitEdits
from vattn.sampling.logprobs import prompt_logprobs, token_logprobs
from vattn.sampling.philox import uniforms
from vattn.sampling.sampling_state import SamplingState, SamplingStates

__all__ = [
    "NOTHING_ALLOWED",
    "NOT_FINITE",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "SamplingState",
    "prompt_logprobs",
    "sampling_failure",
]

class SampledTokens(NamedTuple):
    """The outcome of one step."""

    token_ids: Tensor
    """int64 `[B]`, on the logits' device. Negative where a request got no token: see `sampling_failure`.
    Fails only that request; clamp before using the ids as indices on the device."""
    logprobs: list[TokenLogprobs | None] | None
    """Per row, None where not asked for or failed; None when no row asked."""


class SamplingBatch:
    """The plan for a batch: parameters as tensors, and row groups. Valid while the requests stay the same."""

    def __init__(self, states: tuple[SamplingState, ...], vocab_size: int, device: torch.device) -> None:
        self.states = states
        self.vocab_size = vocab_size
        self.device = device
        self.plain = all(state.plain for state in states)
        """The whole step is one argmax."""
        random = [row for row, state in enumerate(states) if not state.params.greedy]
        self.random_states = [states[row] for row in random]
        self.all_random = len(random) == len(states)
        self.random_rows = torch.tensor(random, dtype=torch.int64, device=device)
        self.filters = None
        if random:
            self.filters = Filters.of([state.params for state in self.random_states], vocab_size, device)
        self.edits = None
        if any(state.edited for state in states):
            self.edits = LogitEdits(states, vocab_size, device)
        wanted = [(row, state.params.logprobs) for row, state in enumerate(states)]
        self.logprobs = [(row, count) for row, count in wanted if count is not None]
        """(row, number of log-probabilities) where they were asked for."""

    def fits(self, states: tuple[SamplingState, ...], logits: Tensor) -> bool:
        """True when this plan was made for these very requests in this order."""
        return states == self.states and self.vocab_size == logits.shape[1] and self.device == logits.device

    def uniform(self) -> Tensor:
        """The random number of each random row's next token: float64 `[R, 1]`."""
        numbers = uniforms(
            [state.seed for state in self.random_states],
            [state.branch for state in self.random_states],
            [len(state.output_token_ids) + state.pending for state in self.random_states],
        )
        return torch.from_numpy(numbers).to(self.device).unsqueeze(1)


class Sampler(SamplingStates):
    """Samples batches whose composition may change at every step; keeps the last batch's plan.

    `seed` is the root from which requests without a seed get theirs, in order of `new_state`;
    `eos_token_ids` are the model's. Not thread-safe.
    """

    def __init__(self, *, seed: int = 0, eos_token_ids: Iterable[int] = ()) -> None:
        super().__init__(seed=seed, eos_token_ids=eos_token_ids)
        self._batch = SamplingBatch((), 0, torch.device("cpu"))

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[SamplingState]) -> SampledTokens:
        """The next token of each request; `logits[i]`, any float dtype, are those of `rows[i]`.

        Does not change `logits`, and appends nothing to the requests: the engine does that. Waits for the
        device only if log-probabilities or top_p are requested.
        """
        if logits.dim() != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits are {tuple(logits.shape)}, expected ({len(rows)}, vocabulary)")
        states = tuple(rows)
        if not self._batch.fits(states, logits):
            self._batch = SamplingBatch(states, logits.shape[1], logits.device)
        batch = self._batch
        if batch.plain:
            return SampledTokens(_greedy(logits), None)
        edited = self._edited(batch, logits)
        token_ids = self._choose(batch, edited)
        if edited is not logits:
            # Find out whether the model or the parameters made a row impossible.
            broken = ~logits.amax(-1).isfinite()
            token_ids = token_ids.where(token_ids >= 0, torch.where(broken, NOT_FINITE, NOTHING_ALLOWED))
        return SampledTokens(token_ids, self._logprobs(batch, logits, token_ids))

    @staticmethod
    def _edited(batch: SamplingBatch, logits: Tensor) -> Tensor:
        """The logits after bias, bans and penalties: a float32 copy, or `logits` if nothing changes."""
        if batch.edits is None or not batch.edits.prepare():
            return logits
        edited = logits.to(torch.float32, copy=True).contiguous()
        batch.edits.apply(edited)
        return edited

    @staticmethod
    def _choose(batch: SamplingBatch, logits: Tensor) -> Tensor:
        if batch.filters is None:
            return _greedy(logits)
        if batch.all_random:
            return _random(logits, batch.filters, batch.uniform())
        token_ids = _greedy(logits)
        token_ids[batch.random_rows] = _random(logits[batch.random_rows], batch.filters, batch.uniform())
        return token_ids

    @staticmethod
    def _logprobs(
        batch: SamplingBatch, logits: Tensor, token_ids: Tensor
    ) -> list[TokenLogprobs | None] | None:
        if not batch.logprobs:
            return None
        wanted = torch.tensor([row for row, _ in batch.logprobs], dtype=torch.int64, device=logits.device)
        chosen = token_ids[wanted]
        entries = token_logprobs(logits[wanted], chosen.clamp(min=0), [count for _, count in batch.logprobs])
        result: list[TokenLogprobs | None] = [None] * len(batch.states)
        for (row, _), entry, token in zip(batch.logprobs, entries, chosen.tolist(), strict=True):
            result[row] = entry if token >= 0 else None
        return result


def _greedy(logits: Tensor) -> Tensor:
    token_ids = argmax_rows(logits)
    best = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return token_ids.masked_fill_(~best.isfinite(), NOT_FINITE)


def _random(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    logits = logits.float()
    token_ids = draw(logits, filters, uniform)
    return token_ids.masked_fill_(~logits.amax(-1).isfinite(), NOT_FINITE)
