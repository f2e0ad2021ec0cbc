"""Requests that answer one prompt together: parallel samples, and the beams of a search.

    parallel   prompt ──── leader ─┬─ output 0            the leader computes the prompt; at its first token
                                   ├─ output 1 (fork)     the other branches fork from it and go their ways
                                   └─ output 2 (fork)

    beams      prompt ─┬─ beam ─┬─ beam                   all beams get a token; then those with several
                       │        └─ beam (fork)            heirs are forked, those with none are dropped
                       └─ (dropped)

A fork shares the parent's KV by reference (`KVCache.fork`). Where there is no room for one, the branch
waits like any request and computes its text itself, or finds it in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from vattn.engine.deltas import Beam
from vattn.engine.request import Request, RequestStatus
from vattn.outputs import RequestMetrics
from vattn.sampling.beam import BeamSearch, Candidate, Hypothesis
from vattn.sampling.detokenize import Finish


class Branching(Protocol):
    """What a group asks of the engine."""

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let a child begin with the first `tokens` tokens of its parent, or wait."""

    def drop(self, request: Request) -> None:
        """Forget a beam and its memory."""

    def extend(self, request: Request, token: int) -> None:
        """Give a beam its next token, and a place in the queue if it has none."""

    def heir(self, parent: Request, place: int, token: int, number: int) -> Request:
        """A new beam: the parent's text and one token, at the group's place `place`; its `number`-th heir."""


class ParallelGroup:
    """Samples of one prompt: `n`, or `best_of`. The first of `branches` is the leader."""

    def __init__(self, branches: Sequence[Request]) -> None:
        self.branches = list(branches)
        self._forked = False
        for branch in self.branches[1:]:
            branch.status = RequestStatus.HELD

    @property
    def leader(self) -> Request:
        return self.branches[0]

    @property
    def members(self) -> list[Request]:
        """Requests that have not ended."""
        return [branch for branch in self.branches if not branch.finished]

    @property
    def held(self) -> list[Request]:
        """Branches that wait for the prompt."""
        return [branch for branch in self.branches if branch.status is RequestStatus.HELD]

    @property
    def finished(self) -> bool:
        return not self.members

    def prompt_computed(self, request: Request, engine: Branching) -> None:
        """A branch is about to get a token; the first time that is the leader, with the prompt in its KV."""
        if self._forked:
            return
        self._forked = True
        for branch in self.branches[1:]:
            if not branch.finished:
                # The prompt's last token is computed again, for the logits.
                engine.fork(self.leader, branch, len(self.leader.prompt_token_ids) - 1)

    @property
    def metrics(self) -> RequestMetrics:
        """Of all branches together; a copy."""
        every = [branch.metrics for branch in self.branches]
        firsts = [m.first_token_time for m in every if m.first_token_time is not None]
        ends = [m.finished_time for m in every if m.finished_time is not None]
        return replace(
            self.leader.metrics,
            first_token_time=min(firsts, default=None),
            finished_time=max(ends, default=None) if self.finished else None,
            num_output_tokens=sum(m.num_output_tokens for m in every),
            num_preemptions=sum(m.num_preemptions for m in every),
            num_branches=len(every),
        )


class BeamGroup:
    """The beams of one prompt. Beam i of the search is request `beams[i]`."""

    def __init__(self, search: BeamSearch, leader: Request) -> None:
        self.search = search
        self.leader = leader
        self.beams: list[Request] = [leader]
        self._delivered: dict[Request, Sequence[Candidate]] = {}
        self._free = list(range(search.params.beam_width - 1, 0, -1))
        """Places of the group that no beam has."""
        self._place = {leader: 0}
        self.failed: str | None = None
        self._heirs = 0

    @property
    def members(self) -> list[Request]:
        return [beam for beam in self.beams if not beam.finished]

    @property
    def finished(self) -> bool:
        return not self.members

    def deliver(self, beam: Request, candidates: Sequence[Candidate], engine: Branching) -> None:
        """What may follow a beam. With the last one's, all get their token; the search may end with it."""
        self._delivered[beam] = candidates
        if any(b not in self._delivered for b in self.beams):
            return
        steps = self.search.advance([self._delivered[b] for b in self.beams])
        self._delivered.clear()
        parents = self.beams
        if self.search.done:
            return
        heirs: dict[Request, list[int]] = {beam: [] for beam in parents}
        for position, step in enumerate(steps):
            heirs[parents[step.parent]].append(position)
        beams: list[Request | None] = [None] * len(steps)
        try:
            for parent in parents:
                if not heirs[parent]:  # first, to make room
                    engine.drop(parent)
                    self._free.append(self._place.pop(parent))
            for parent, positions in heirs.items():
                for position in positions[1:]:  # the first one inherits the request itself
                    place = self._free.pop()
                    self._heirs += 1
                    child = engine.heir(parent, place, steps[position].token, self._heirs)
                    child.group = self
                    self._place[child] = place
                    beams[position] = child
                    engine.fork(parent, child, len(parent.token_ids))
            for parent, positions in heirs.items():
                if positions:
                    beams[positions[0]] = parent
                    engine.extend(parent, steps[positions[0]].token)
        finally:  # whoever ends the search after a failure must find all of them
            self.beams = [*filter(None, beams), *(b for b in parents if b not in beams and not b.finished)]

    @property
    def metrics(self) -> RequestMetrics:
        """Of the search; a copy."""
        tokens = sum(len(text.token_ids) for text in self._ended)
        width = self.search.params.beam_width
        return replace(self.leader.metrics, num_output_tokens=tokens, num_branches=width)

    @property
    def _ended(self) -> list[Hypothesis]:
        return self.search.finished if self.search.done else []

    def results(self) -> list[Beam]:
        """The ended texts, best first; none if the search was cut short."""
        return [
            Beam(
                list(text.token_ids),
                text.cumulative_logprob,
                text.score,
                Finish("stop" if text.ended else "length"),
            )
            for text in self._ended
        ]


Group = ParallelGroup | BeamGroup
