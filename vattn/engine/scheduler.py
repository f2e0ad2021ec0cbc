"""Continuous batching: which tokens of which requests go into the next step.

Each step has a budget of tokens. Decodes (one token each) come first, so a long prompt never stalls
those who already stream; what is left of the budget goes to prompts, in order of arrival, cut into
chunks. When memory runs short the youngest running request yields: its KV is dropped and recomputed
later. A request is never preempted for a younger one, so the oldest always finishes: no deadlock.

    waiting (oldest first) --admit--> running --finish--> done
            ^                            |
            +-------- preempt -----------+
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from vattn.engine.request import Request, RequestStatus
from vattn.kv.base import Chunk, KVCache


class Scheduled(NamedTuple):
    """`length` tokens of `request`, from `request.num_computed` on."""

    request: Request
    length: int

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.request.request_id, self.request.num_computed, self.length)

    @property
    def samples(self) -> bool:
        """True when the chunk reaches the last token, whose logits give the next one."""
        return self.length == self.request.num_remaining


@dataclass(frozen=True)
class Batch:
    """One step: decodes first, then prompt chunks."""

    items: list[Scheduled]
    preempted: list[Request] = field(default_factory=list)
    """Requests that yielded their memory while this batch was made."""
    starved: list[Request] = field(default_factory=list)
    """Requests that get no memory although nobody else has any: they must fail, or all would wait."""

    @property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)


class Scheduler:
    """First come, first served, over any KV cache."""

    def __init__(self, kv: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0

    # ------------------------------------------------------------------ requests come and go
    def add(self, request: Request) -> None:
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and let its memory go."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request.request_id)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    # ------------------------------------------------------------------ one step
    def schedule(self) -> Batch:
        """Choose the next step's tokens. Memory for all of them is there when this returns."""
        budget = self.max_num_batched_tokens
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        preempted: list[Request] = []
        # Oldest first: an older request takes its memory before a younger one can.
        starved: list[Request] = []
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or request.num_remaining != 1:
                continue
            if request.ends_with_pending:
                continue
            if self._make_room(request, preempted):
                decodes.append(Scheduled(request, 1))
            elif request.status is RequestStatus.RUNNING:
                starved.append(request)
        # A victim was younger than the request that needed room, but may have been scheduled before it.
        decodes = [item for item in decodes if item.request.status is RequestStatus.RUNNING]
        budget -= len(decodes)
        for request in self.running:
            if request.num_remaining > 1 and budget > 0:
                prefills.append(Scheduled(request, min(request.num_remaining, budget)))
                budget -= prefills[-1].length
        while (
            budget > 0
            and self.waiting
            and not (preempted or starved)
            and len(self.running) < self.max_num_seqs
        ):
            admitted = self._admit_next()
            if admitted is None:
                break
            prefills.append(Scheduled(admitted, min(admitted.num_remaining, budget)))
            budget -= prefills[-1].length
        if not self.running and self.waiting and not preempted and self.waiting[0].pending_row is None:
            starved.append(self.waiting[0])  # the whole cache is free, and still it does not fit
        return Batch(decodes + prefills, preempted, starved)

    def _admit_next(self) -> Request | None:
        """Move the oldest waiting request to running, with memory for all its tokens, if there is any."""
        request = self.waiting[0]
        if request.pending_row is not None:
            return None  # preempted with a token still on its way
        # One token more than it has: the one it is about to produce.
        if not self.kv.can_admit(request.num_tokens + 1):
            return None
        cached = self.kv.attach(request.request_id, request.token_ids)
        if cached is None:
            return None
        self.waiting.pop(0)
        request.num_computed = cached
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.arrival)
        return request

    def _make_room(self, request: Request, preempted: list[Request]) -> bool:
        """Grow `request` to all its tokens, preempting younger requests, at last itself.

        False: it was preempted, or it is alone and there is no memory (then it still runs).
        """
        while not self.kv.grow(request.request_id, request.num_tokens):
            victim = self.running[-1]
            if len(self.running) == 1:
                return False
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self.kv.free(victim.request_id)
        self.running.remove(victim)
        victim.num_computed = 0
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(victim)

    def check(self) -> None:
        """Raise AssertionError unless queues, statuses and the cache's books agree."""
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            assert all(r.status is status for r in queue)
            assert [r.arrival for r in queue] == sorted(r.arrival for r in queue), "queues are by age"
        assert len(self.running) <= self.max_num_seqs
        assert all(r.num_computed == 0 for r in self.waiting)
        assert all(0 <= r.num_computed < r.num_tokens for r in self.running)
        assert {r.request_id for r in self.running} == set(self.kv.live()), "running = attached"
        self.kv.check()
