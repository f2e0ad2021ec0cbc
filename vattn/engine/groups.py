"""Groups of requests that answer one prompt: parallel samples, and the beams of a beam search.

    parallel   prompt ──── leader ─┬─ output 0            the leader computes the prompt; at its first token
                                   ├─ output 1 (fork)     the other branches fork from it
                                   └─ output 2 (fork)

    beams      prompt ─┬─ beam ─┬─ beam                   every beam gets its candidates; then a beam with
                       │        └─ beam (fork)            several heirs is forked, and a beam with none is
                       └─ (dropped)                       dropped

A fork shares the parent's KV by reference (`KVCache.fork`). If there is no room for a fork, the branch waits
like any request. It then computes its tokens itself, or finds them in the prefix cache.
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
    """The part of the engine that a group uses."""

    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let a child begin with the first `tokens` tokens of its parent. Without room, the child waits."""

    def drop(self, request: Request) -> None:
        """Forget a beam and free its memory."""

    def extend(self, request: Request, token: int) -> None:
        """Give a beam its next token. If the beam is not queued, queue it."""

    def heir(self, parent: Request, place: int, token: int, number: int) -> Request:
        """Make a new beam with the parent's tokens and one more, as heir `number` of the search.

        It takes the group's place `place`.
        """


class ParallelGroup:
    """The `n` (or `best_of`) samples of one prompt. The first of `branches` is the leader."""

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
        """The requests of the group that have not ended."""
        return [branch for branch in self.branches if not branch.finished]

    @property
    def held(self) -> list[Request]:
        """Branches that wait until the leader has computed the prompt."""
        return [branch for branch in self.branches if branch.status is RequestStatus.HELD]

    @property
    def finished(self) -> bool:
        return not self.members

    def prompt_computed(self, request: Request, engine: Branching) -> None:
        """Called before a branch gets a token. The first time, the branch is the leader and its KV holds the
        prompt."""
        if self._forked:
            return
        self._forked = True
        for branch in self.branches[1:]:
            if not branch.finished:
                # The child computes the prompt's last token again, because it needs its logits.
                engine.fork(self.leader, branch, len(self.leader.prompt_token_ids) - 1)

    @property
    def metrics(self) -> RequestMetrics:
        """The metrics of all branches together, as a copy."""
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
    """The beams of one prompt. Request `beams[i]` computes beam i of the search."""

    def __init__(self, search: BeamSearch, leader: Request) -> None:
        self.search = search
        self.leader = leader
        self.beams: list[Request] = [leader]
        self._delivered: dict[Request, Sequence[Candidate]] = {}
        self._free = list(range(search.params.beam_width - 1, 0, -1))
        """Places of the group that no beam occupies."""
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
        """Take the candidates of one beam. Once all beams have theirs, the search advances by one token.

        The search may end then.
        """
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
                if not heirs[parent]:  # drop these first, to make room
                    engine.drop(parent)
                    self._free.append(self._place.pop(parent))
            for parent, positions in heirs.items():
                for position in positions[1:]:  # the first heir keeps the parent's request
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
        finally:  # after a failure, the code that ends the search must find all beams
            self.beams = [*filter(None, beams), *(b for b in parents if b not in beams and not b.finished)]

    @property
    def metrics(self) -> RequestMetrics:
        """The metrics of the search, as a copy."""
        tokens = sum(len(text.token_ids) for text in self._ended)
        width = self.search.params.beam_width
        return replace(self.leader.metrics, num_output_tokens=tokens, num_branches=width)

    @property
    def _ended(self) -> list[Hypothesis]:
        return self.search.finished if self.search.done else []

    def results(self) -> list[Beam]:
        """The finished outputs, best first; empty if the search was cut short."""
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
