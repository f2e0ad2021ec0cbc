"""Everything that changes single logits before a token is chosen: biases, bans and penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vattn.sampling.penalties import PenalisedRow, PenaltyPlan
from vattn.sampling.sampling_state import SamplingState


class BadWords:
    """The token sequences one request must not write, found by the token before the last."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.always: set[int] = set()
        """Words of one token: banned at every step."""
        self._by_previous: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            *prefix, last = word
            if prefix:
                self._by_previous.setdefault(prefix[-1], []).append((prefix, last))
            else:
                self.always.add(last)

    @property
    def contextual(self) -> bool:
        """True if some bans depend on the output."""
        return bool(self._by_previous)

    def banned_after(self, output_token_ids: Sequence[int]) -> set[int]:
        """Tokens that would complete a word of several tokens."""
        if not output_token_ids:
            return set()
        return {
            last
            for prefix, last in self._by_previous.get(output_token_ids[-1], ())
            if list(output_token_ids[-len(prefix) :]) == prefix
        }


def flat_indices(row: int, tokens: Iterable[int], vocab_size: int) -> list[int]:
    """Indices of a row's tokens in the flattened logits `[B, V]`.

    Tokens without a logit are left out. They can't be sampled, and their index would fall into another row.
    """
    return [row * vocab_size + token for token in tokens if 0 <= token < vocab_size]


class LogitEdits:
    """The edits of one batch of requests. Each step: `prepare()`, and if it says so, `apply(logits)`."""

    def __init__(self, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._bad_words: list[tuple[int, SamplingState, BadWords]] = []
        self._short: list[tuple[int, SamplingState, frozenset[int]]] = []
        bias: dict[int, float] = {}
        bans: list[int] = []
        penalised: list[PenalisedRow] = []
        for row, state in enumerate(states):
            for token, value in (state.params.logit_bias or {}).items():
                bias.update(dict.fromkeys(flat_indices(row, [token], vocab_size), value))
            if state.bad_words:
                words = BadWords(state.bad_words)
                bans += flat_indices(row, words.always, vocab_size)
                if words.contextual:
                    self._bad_words.append((row, state, words))
            if state.params.min_tokens and state.terminal_ids:
                self._short.append((row, state, state.terminal_ids))
            if state.params.penalised:
                counts = state.counts(vocab_size)
                penalised.append(PenalisedRow(row, state.params, counts, state.output_token_ids))
        self._bias_index = self._index(bias) if bias else None
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._always = bans
        self._bans: list[int] = []
        self._ban_index: Tensor | None = None
        self._penalties = PenaltyPlan(penalised, vocab_size, device) if penalised else None

    def _index(self, flat: Iterable[int]) -> Tensor:
        return torch.tensor(list(flat), dtype=torch.int64, device=self._device)

    def prepare(self) -> bool:
        """Update the edits with the requests' outputs. Returns False if no logit changes in this step."""
        bans = list(self._always)
        if self._short:
            self._short = [
                entry for entry in self._short if len(entry[1].output_token_ids) < entry[1].params.min_tokens
            ]
            for row, _, terminal in self._short:
                bans += flat_indices(row, terminal, self._vocab_size)
        for row, state, words in self._bad_words:
            bans += flat_indices(row, words.banned_after(state.output_token_ids), self._vocab_size)
        if bans != self._bans:
            self._bans = bans
            self._ban_index = self._index(bans) if bans else None
        if self._penalties is not None:
            self._penalties.advance()
        return self._ban_index is not None or self._bias_index is not None or self._penalties is not None

    def apply(self, logits: Tensor) -> None:
        """Edit contiguous float32 logits `[B, V]` in place: bias, bans, penalties."""
        flat = logits.view(-1)
        if self._bias_index is not None:
            flat.index_add_(0, self._bias_index, self._bias)
        if self._ban_index is not None:
            flat.index_fill_(0, self._ban_index, float("-inf"))
        if self._penalties is not None:
            self._penalties.apply(logits)
