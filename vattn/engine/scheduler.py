"""Continuous batching: which tokens of which requests go into the next step.

Each step has a budget of tokens. Decodes (one token each) come first, so a long prompt never stalls
those who already stream; what is left of the budget goes to prompts, cut into chunks, tenant by tenant
in fair turns (`turns`), and within a tenant by rank (`policy`).

    waiting (by rank) --admit--> running --finish--> done
            ^                       |
            +------- preempt -------+        its KV is dropped and recomputed later

Who yields when memory runs short, and who may push another out, is decided by `levels`. With one tenant
that is: the least urgent yields, and nobody is pushed out.

No deadlock: the most urgent running request is never preempted for another one, so it finishes, and
then the next is the most urgent. No starvation: a request that memory was short for is tried first in
the next step, and meanwhile memory goes only to tenants that hold less than its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from vattn.engine.levels import entitled, first_to_yield, level, levels, others_run
from vattn.engine.policy import FirstComeFirstServed, Policy
from vattn.engine.preemption import COPY_ERRORS, How, Preemption
from vattn.engine.request import Request, RequestStatus
from vattn.engine.turns import FairTurns
from vattn.engine.waiting import WaitingRequests
from vattn.errors import CapacityError
from vattn.kv.base import Chunk, KVCache

PreemptReason = Literal["memory", "share", "resize"]

QUANTUM_STEPS = 4
"""A tenant's turn lasts so many steps at most: a prompt no longer than that is served in one go."""


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


class Admitted(NamedTuple):
    """A request began to run."""

    request: Request
    cached: int
    """Tokens that need not be computed."""


class Preempted(NamedTuple):
    """A request yielded what it held."""

    request: Request
    reason: PreemptReason
    """`memory`: a running request had to grow. `share`: another tenant was entitled to the place.
    `resize`: the cache became smaller."""
    by: Request
    """Who got it; itself, when it could not grow and was the first to yield, or nobody did."""
    how: How
    """What became of its K and V."""


@dataclass(frozen=True)
class Batch:
    """One step: decodes first, then prompt chunks."""

    items: list[Scheduled]
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    starved: list[Request] = field(default_factory=list)
    """Requests that get no memory although nobody else has any: they must fail, or all would wait."""
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    """Requests whose memory could not be had, and what the driver or a copy raised."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)


@dataclass
class _Plan:
    """A step in the making."""

    budget: int
    """Tokens left."""
    lengths: dict[Request, int] = field(default_factory=dict)
    prompts: dict[str, list[Request]] = field(default_factory=dict)
    """By tenant and rank: running requests with more than a token to compute."""
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    starved: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    """Tenants of which no more is admitted in this step."""
    short: dict[str, float] = field(default_factory=dict)
    """Tenants that memory is short for, and their levels."""

    def add_prompt(self, request: Request) -> None:
        bisect.insort(self.prompts.setdefault(request.service.tenant, []), request, key=lambda r: r.rank)


class Scheduler:
    """Over any KV cache; knows nothing of models.

    `policy`: ranks requests; None: first come, first served. `weights`: fair shares of tenants.
    `preemption`: takes memory from requests and gives it back; None: what is dropped is computed again.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        weights: Mapping[str, float] | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.kv = kv
        self.preemption = preemption or Preemption(kv)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy or FirstComeFirstServed()
        self.turns = FairTurns(weights or {}, QUANTUM_STEPS * max_num_batched_tokens)
        self.waiting = WaitingRequests()
        self.running: list[Request] = []
        """By rank."""
        self.clock = 0
        """Tokens scheduled so far."""
        self.num_preemptions = 0
        self.unfreed: list[str] = []
        """Ids of requests that have ended but whose memory could not be let go yet."""
        self._short: list[str] = []
        """Tenants whose head found no memory in the last step, in the order they were refused."""

    # ------------------------------------------------------------------ requests come and go
    def add(self, request: Request) -> None:
        request.rank = self.policy.rank(request, self.clock)
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and let its memory go; if that fails, at the next step."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.unfreed.append(request.request_id)
            self._free()
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self.preemption.forget(request)
        request.status = RequestStatus.FINISHED

    def _free(self) -> None:
        """Let go the memory of those that have ended. What the driver refuses is tried again later."""
        for request_id in list(self.unfreed):
            if request_id in self.kv.live():
                try:
                    self.kv.free(request_id)
                except COPY_ERRORS:
                    continue
            self.unfreed.remove(request_id)

    def fork(self, parent: Request, child: Request, tokens: int) -> bool:
        """Let a child, ranked by whoever made it, begin with the first `tokens` computed tokens of a parent.

        False: there is no place or no memory for it, or the parent has none; it waits as any request.
        """
        child.num_computed = 0
        try:
            running = (
                tokens > 0
                and parent.status is RequestStatus.RUNNING
                and len(self.running) < self.max_num_seqs
                and self.kv.fork(parent.request_id, child.request_id, tokens)
            )
        except BaseException:
            self._enqueue(child)
            raise
        if not running:
            self._enqueue(child)
            return False
        child.num_computed = tokens
        child.status = RequestStatus.RUNNING
        bisect.insort(self.running, child, key=lambda r: r.rank)
        return True

    def resume(self, request: Request) -> None:
        """A held request can go on."""
        if request.status is RequestStatus.HELD:
            self._enqueue(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def would_wait(self, arrivals: Mapping[str, int]) -> dict[str, int]:
        """Of each tenant, how many requests would wait if so many more arrived: those beyond free slots."""
        beyond = len(self.waiting) + sum(arrivals.values()) - (self.max_num_seqs - len(self.running))
        return {t: max(0, min(beyond, self.waiting.count(t) + n)) for t, n in arrivals.items()}

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    # ------------------------------------------------------------------ one step
    def schedule(self) -> Batch:
        """Choose the next step's tokens. Memory for all of them is there when this returns."""
        plan = _Plan(self.max_num_batched_tokens)
        if self.unfreed:
            self._free()
        self._decodes(plan)
        self._prompts(plan)
        decided = plan.lengths or plan.preempted or plan.starved or plan.failed
        if not decided and self.waiting and self.running:
            self._unblock(plan)
        if not self.running and not (plan.preempted or plan.failed):
            heads = [self.waiting.head(tenant) for tenant in plan.short]
            # The whole cache is free, and still the first one does not fit.
            plan.starved += [r for r in heads if r is not None and r.pending_row is None][:1]
        self._short = list(plan.short)
        batch = Batch(
            [Scheduled(*item) for item in plan.lengths.items()],
            plan.admitted,
            plan.preempted,
            plan.starved,
            plan.failed,
        )
        self.clock += batch.num_tokens
        return batch

    def _decodes(self, plan: _Plan) -> None:
        """A token for everybody who has just one to compute."""
        given: dict[str, int] = {}
        # Most urgent first: it takes its memory before the others can.
        for request in list(self.running):
            if request.num_remaining != 1 or request.status is not RequestStatus.RUNNING:
                continue
            if request.ends_with_pending:
                continue
            # Nearly always there is room; only where there is none, others have to be looked at.
            try:
                grown = self.kv.grow(request.request_id, request.num_tokens)
                if not grown:
                    self._charge(given, plan)
                    grown = self._make_room(request, plan)
            except COPY_ERRORS as error:
                plan.failed.append((request, error))
                continue
            if not grown:
                if request.status is RequestStatus.RUNNING:
                    plan.starved.append(request)
                continue
            plan.lengths[request] = 1
            given[request.service.tenant] = given.get(request.service.tenant, 0) + 1
        self._charge(given, plan)

    def _charge(self, given: dict[str, int], plan: _Plan) -> None:
        """Enter tokens that were given to tenants into the books; `given` is empty afterwards."""
        for tenant, tokens in given.items():
            plan.budget -= tokens
            self.turns.charge(tenant, tokens)
        given.clear()

    def _prompts(self, plan: _Plan) -> None:
        """What is left of the budget, in fair turns, to prompts that run and to new ones."""
        for request in self.running:
            if request.num_remaining > 1:
                plan.add_prompt(request)
        for tenant in self._short:  # before anybody takes the memory that is being saved for them
            if plan.budget > 0:
                self._admit(tenant, plan)
            else:
                plan.short[tenant] = level(self.running, tenant, self.turns.weights)
        while plan.budget > 0:
            ready = self._ready(plan)
            if not ready:
                return
            tenant = self.turns.turn(self._in_order(ready))
            request = ready[tenant]
            if request.status is RequestStatus.WAITING and not self._admit(tenant, plan):
                continue
            missing = request.num_remaining - plan.lengths.get(request, 0)
            self._give(request, min(missing, plan.budget, self.turns.credit(tenant)), plan)
            if plan.lengths[request] == request.num_remaining:
                plan.prompts[tenant].remove(request)

    def _ready(self, plan: _Plan) -> dict[str, Request]:
        """Each tenant's most urgent request with prompt tokens to compute, running or to be admitted."""
        ready = {tenant: requests[0] for tenant, requests in plan.prompts.items() if requests}
        for tenant in self.waiting.tenants:
            head = self.waiting.head(tenant)
            if head is None or tenant in plan.closed:
                continue
            if tenant not in ready or head.rank < ready[tenant].rank:
                ready[tenant] = head
        return ready

    def _in_order(self, ready: Mapping[str, Request]) -> list[str]:
        """Who holds least goes first in a round: a light tenant does not wait for a heavy one's turn."""
        if len(ready) == 1:
            return list(ready)
        held = levels(self.running, self.turns.weights)
        return sorted(ready, key=lambda tenant: (held.get(tenant, 0.0), ready[tenant].rank))

    def _give(self, request: Request, tokens: int, plan: _Plan) -> None:
        plan.lengths[request] = plan.lengths.get(request, 0) + tokens
        plan.budget -= tokens
        self.turns.charge(request.service.tenant, tokens)

    # ------------------------------------------------------------------ memory and slots
    def _admit(self, tenant: str, plan: _Plan) -> bool:
        """Move the tenant's head to running, with memory for all its tokens.

        False: there is no room that it may have; no more of this tenant in this step.
        """
        request = self.waiting.head(tenant)
        if request is None or tenant in plan.closed or plan.starved:
            plan.closed.add(tenant)
            return False
        plan.closed.add(tenant)
        weights = self.turns.weights
        if request.pending_row is not None:  # preempted with a token still on its way
            plan.short[tenant] = level(self.running, tenant, weights)
            return False
        if len(self.running) >= self.max_num_seqs and not others_run(self.running, tenant):
            return False  # who would yield is one of its own
        own, weight = level(self.running, tenant, weights), self.turns.weight(tenant)
        need = request.num_tokens + 1  # one more than it has: the one it is about to produce
        if not all(entitled(own, need / weight, other) for other in plan.short.values()):
            return False
        if self.kv.awaits(request.token_ids, salt=request.salt, request_id=request.request_id):
            return False  # what it would compute is being computed: it is shared in one of the next steps
        while len(self.running) >= self.max_num_seqs or not self._fits(request, need):
            slots_full = len(self.running) >= self.max_num_seqs
            victim = first_to_yield(self.running, weights) if self.running else None
            if victim is None or not entitled(own, need / weight, victim.level):
                if not slots_full:
                    plan.short[tenant] = own
                return False
            self._preempt(victim.request, "share", request, plan)
        try:
            cached = self._attach(request)
        except COPY_ERRORS as error:
            plan.failed.append((request, error))
            return False
        if cached is None:
            plan.short[tenant] = own
            return False
        plan.closed.discard(tenant)
        self.waiting.remove(request)
        request.num_computed = cached
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=lambda r: r.rank)
        plan.add_prompt(request)
        plan.admitted.append(Admitted(request, cached))
        return True

    def _fits(self, request: Request, tokens: int) -> bool:
        return self.kv.can_admit(
            tokens, request.token_ids, salt=request.salt, request_id=request.request_id
        )

    def _attach(self, request: Request) -> int | None:
        """Give a request memory for all its tokens; how many need not be computed. None: memory is short."""
        resumed = request.metrics.num_preemptions > 0
        cached = self.preemption.take_back(request, resumed=resumed)
        if cached and not resumed:
            request.metrics.num_cached_tokens = min(cached, len(request.prompt_token_ids))
        return cached

    def _unblock(self, plan: _Plan) -> None:
        """All that run wait for members of their groups that find no place: the least urgent gives up its."""
        victim = self.running[-1]
        if all(request.idle for request in self.running):
            self._preempt(victim, "memory", next(iter(self.waiting)), plan)

    def _make_room(self, request: Request, plan: _Plan) -> bool:
        """Grow `request` to all its tokens, preempting others that yield before it, at last itself.

        False: it was preempted, or it is alone and there is no memory (then it still runs).
        """
        while not self.kv.grow(request.request_id, request.num_tokens):
            victim = first_to_yield(self.running, self.turns.weights).request
            if len(self.running) == 1:
                return False
            self._preempt(victim, "memory", request, plan)
            plan.short[victim.service.tenant] = level(self.running, victim.service.tenant, self.turns.weights)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, reason: PreemptReason, by: Request, plan: _Plan) -> None:
        tenant = victim.service.tenant
        plan.preempted.append(Preempted(victim, reason, by, self._take_from(victim)))
        given = plan.lengths.pop(victim, 0)
        plan.budget += given
        self.turns.charge(tenant, -given)
        if victim in plan.prompts.get(tenant, ()):
            plan.prompts[tenant].remove(victim)
        plan.closed.add(tenant)

    def _take_from(self, victim: Request) -> How:
        """Take a running request's memory and place; it waits, or is held if it has nothing to compute."""
        how = self.preemption.give_up(victim)
        self.running.remove(victim)
        idle, victim.num_computed = victim.idle, 0
        victim.metrics.num_preemptions += 1
        self.num_preemptions += 1
        if idle:
            victim.status = RequestStatus.HELD
        else:
            self._enqueue(victim)
        return how

    def resize(self, budget_bytes: int) -> list[Preempted]:
        """Change the cache's budget, in one go: as many requests as need be yield, the first to yield first.

        Nothing may be in flight. Returns who did.
        """
        gone: list[Preempted] = []
        self._free()
        while not self.kv.resize(budget_bytes):
            if not self.running:
                raise CapacityError(
                    f"the KV cache can't become {budget_bytes:,} bytes: the driver has not taken back the "
                    f"memory of {len(self.unfreed)} requests that have ended; try again"
                )
            victim = first_to_yield(self.running, self.turns.weights).request
            gone.append(Preempted(victim, "resize", victim, self._take_from(victim)))
        return gone

    def check(self) -> None:
        """Raise AssertionError unless queues, statuses and the cache's books agree."""
        self.waiting.check()
        self.turns.check()
        for queue, status in ((self.waiting, RequestStatus.WAITING), (self.running, RequestStatus.RUNNING)):
            assert all(r.status is status for r in queue)
        assert [r.rank for r in self.running] == sorted(r.rank for r in self.running), "running is by rank"
        assert len(self.running) <= self.max_num_seqs
        assert all(r.num_computed == 0 for r in self.waiting)
        for r in self.running:
            assert 0 <= r.num_computed <= r.num_tokens and (r.group is not None or not r.idle)
        attached = {r.request_id for r in self.running} | set(self.unfreed)
        assert attached == set(self.kv.live()), "running = attached"
        self.kv.check()
