"""Beam search over one prompt. It decides which beams go on and which ended outputs are best.

    running     score                     candidates of a step
    "the cat"   -1.2   ──┬─ sat  -0.3  →  -1.5   1st: goes on
                         └─ ran  -0.9  →  -2.1   3rd: dropped (width 2)
    "a dog"     -1.4   ───── barks -0.4 → -1.8   2nd: goes on

The rules are those of transformers' `generate(num_beams=…)`. A step considers `(1 + EOS tokens)` x width
candidates, at least twice the width. Those among the best `width` that end are kept as finished, sorted by
score / length ** length_penalty. The best ones that do not end go on. Scores are float32, as there.
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
    """A beam of the next step: the beam it continues, and the token it got."""

    parent: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """An ended output."""

    token_ids: tuple[int, ...]
    """Output tokens, including the EOS that ended it."""
    cumulative_logprob: float
    score: float
    """cumulative_logprob / length ** length_penalty."""
    ended: bool
    """True if EOS ended it; False if the length did."""


class BeamSearch:
    """The beams of one prompt. `max_tokens` limits the output tokens. The tokens in `eos` end an output."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int]) -> None:
        self.params = params
        self.max_tokens = max_tokens
        self.eos = frozenset() if params.ignore_eos else eos
        self.running: list[tuple[int, ...]] = [()]
        """Output tokens of the running beams, best first."""
        self.finished: list[Hypothesis] = []
        """Ended outputs, best first, at most `beam_width`."""
        self.done = False
        self._scores = np.zeros(1, np.float32)

    @property
    def keep(self) -> int:
        """Number of candidates that a step considers, over all beams."""
        return max(2, 1 + len(self.eos)) * self.params.beam_width

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Step]:
        """Add one token to every beam. `candidates[i]` holds the `keep` best candidates of running beam i.

        Returns the beams that go on, best first. The list is empty if the search is over.
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
        """True if a running beam could still beat the worst finished output."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        best = float(self._scores[0]) / float(length**params.length_penalty)
        return best > self.finished[-1].score
