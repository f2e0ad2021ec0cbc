"""Beam search over one prompt: which continuations live on, and which ended texts are best.

    running     score                     candidates of a step
    "the cat"   -1.2   ──┬─ sat  -0.3  →  -1.5   1st: lives on
                         └─ ran  -0.9  →  -2.1   3rd: dropped (width 2)
    "a dog"     -1.4   ───── barks -0.4 → -1.8   2nd: lives on

The rules are those of transformers' `generate(num_beams=…)`: `(1 + EOS tokens)` x width candidates are
looked at, at least twice the width; those among the best `width` that end are kept as finished, by score /
length ** length_penalty; the best that do not end live on. Scores are float32, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vattn.params import BeamSearchParams


class Candidate(NamedTuple):
    """A token that may follow a beam."""

    token: int
    logprob: float


class Step(NamedTuple):
    """A beam that lives on: which one it was, and the token it got."""

    parent: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """An ended text."""

    token_ids: tuple[int, ...]
    """Output tokens, the EOS that ended it included."""
    cumulative_logprob: float
    score: float
    """cumulative_logprob / length ** length_penalty."""
    ended: bool
    """By EOS; else by length."""


class BeamSearch:
    """The beams of one prompt. `max_tokens`: output tokens at most; `eos`: tokens that end a text."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int]) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.eos = frozenset() if params.ignore_eos else eos
        self.running: list[tuple[int, ...]] = [()]
        """Output tokens of the beams that live, best first."""
        self.finished: list[Hypothesis] = []
        """Ended texts, best first, at most `beam_width`."""
        self.done = False
        self._scores = np.zeros(1, np.float32)

    @property
    def keep(self) -> int:
        """Candidates of a step, over all beams."""
        return max(2, 1 + len(self.eos)) * self.params.beam_width

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Step]:
        """One token more for every beam. `candidates[i]`: the `keep` best of running beam i.

        Returns the beams that live on, best first; none when the search is over.
        """
        width, length = self.params.beam_width, len(self.running[0]) + 1
        scored = [
            (np.float32(c.logprob) + self._scores[beam], beam, c.token)
            for beam, row in enumerate(candidates)
            for c in row
        ]
        scored.sort(key=lambda item: -item[0])
        scored = scored[: self.keep]
        last = length >= self.max_tokens
        for score, beam, token in scored[:width]:
            if token in self.eos or last:
                self._finish((*self.running[beam], token), score, length)
        alive = [] if last else [item for item in scored if item[2] not in self.eos][:width]
        parents, self.running = self.running, []
        for _, beam, token in alive:
            self.running.append((*parents[beam], token))
        self._scores = np.array([score for score, _, _ in alive], np.float32)
        self.done = not alive or not self._can_improve(length)
        return [] if self.done else [Step(beam, token) for _, beam, token in alive]

    def _finish(self, tokens: tuple[int, ...], score: np.float32, length: int) -> None:
        normal = score / np.float32(length**self.params.length_penalty)
        ended = tokens[-1] in self.eos
        self.finished.append(Hypothesis(tokens, float(score), float(normal), ended))
        self.finished.sort(key=lambda h: -h.score)  # stable: earlier ones first among equals
        del self.finished[self.params.beam_width :]

    def _can_improve(self, length: int) -> bool:
        """Could a running beam still beat the worst finished text?"""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        best = float(self._scores[0]) / float(length**params.length_penalty)
        return best > self.finished[-1].score
