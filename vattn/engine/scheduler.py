"""Continuous batching: the scheduler chooses which tokens of which requests run in the next step.

Each step has a token budget. Decodes (one token each) come first, so a long prompt never stalls requests
that are already decoding. The rest of the budget goes to prompts, as chunked prefill. Tenants take fair turns
(`turns`), and within a tenant the rank decides (`policy`).

    waiting (by rank) --admit--> running --finish--> done
            ^                       |
            +------- preempt -------+        its KV is dropped and recomputed, or swapped out and in

`levels` decides which request yields when memory runs short, and when a new request may preempt a running
one. With a single tenant the least urgent request yields, and a new request never preempts a running one.

No deadlock: the most urgent running request is never preempted for another one, so it finishes, and
then the next is the most urgent. No starvation: a request that found no memory is tried first in the next
step. Until it runs, only tenants that hold less than its own tenant get memory.
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
"""Maximum number of steps in a tenant's turn. A shorter prompt is prefilled in one turn."""


class Scheduled(NamedTuple):
    """The next `length` tokens of `request`, starting at `request.num_computed`."""

    request: Request
    length: int

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.request.request_id, self.request.num_computed, self.length)

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the request's last token, whose logits give the next token."""
        return self.length == self.request.num_remaining


class Admitted(NamedTuple):
    """A request that began to run."""

    request: Request
    cached: int
    """Tokens that need no computing, because their K and V are in the cache."""


class Preempted(NamedTuple):
    """A request that gave up its memory and its slot."""

    request: Request
    reason: PreemptReason
    """`memory`: a running request had to grow. `share`: another tenant was entitled to the memory or slot.
    `resize`: the cache became smaller."""
    by: Request
    """The request that it yielded to. It is the request itself if that could not grow and was the first to
    yield, or if no other request got its memory."""
    how: How
    """Whether its K and V were dropped or swapped out."""


@dataclass(frozen=True)
class Batch:
    """The work of one step: decodes first, then prompt chunks."""

    items: list[Scheduled]
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    starved: list[Request] = field(default_factory=list)
    """Requests that get no memory although no other request holds any. They must fail, or all requests
    would wait forever."""
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    """Requests that got no memory, with the error that the driver or a copy raised."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(item.length for item in self.items)


@dataclass
class _Plan:
    """The state of a step while it is being scheduled."""

    budget: int
    """Tokens left in the budget."""
    lengths: dict[Request, int] = field(default_factory=dict)
    prompts: dict[str, list[Request]] = field(default_factory=dict)
    """Running requests with more than one token to compute, by tenant, sorted by rank."""
    admitted: list[Admitted] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    starved: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    """Tenants whose waiting requests are no longer admitted in this step."""
    short: dict[str, float] = field(default_factory=dict)
    """Levels of the tenants whose next request found no memory."""

    def add_prompt(self, request: Request) -> None:
        bisect.insort(self.prompts.setdefault(request.service.tenant, []), request, key=lambda r: r.rank)


class Scheduler:
    """Schedules requests over any KV cache. It knows nothing about models.

    `policy` ranks requests; None means first come, first served. `weights` are the fair shares of tenants.
    `preemption` takes memory from requests and gives it back; None means that dropped KV is recomputed.
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
        """Running requests, sorted by rank."""
        self.clock = 0
        """Number of tokens scheduled so far."""
        self.num_preemptions = 0
        self.unfreed: list[str] = []
        """Ids of requests that have ended but whose memory could not be freed yet."""
        self._short: list[str] = []
        """Tenants whose most urgent waiting request found no memory in the last step, in order of refusal."""

    # ------------------------------------------------------------------ requests come and go
    def add(self, request: Request) -> None:
        request.rank = self.policy.rank(request, self.clock)
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Remove a request, in whatever state it is, and free its memory. If freeing fails, the next step
        tries again."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.unfreed.append(request.request_id)
            self._free()
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        self.preemption.forget(request)
        request.status = RequestStatus.FINISHED

    def _free(self) -> None:
        """Free the memory of requests that have ended. What the driver refuses is tried again later."""
        for request_id in list(self.unfreed):
            if request_id in self.kv.live():
                try:
                    self.kv.free(request_id)
                except COPY_ERRORS:
                    continue
            self.unfreed.remove(request_id)

    def fork(self, parent: Request, child: Request, tokens: int) -> bool:
        """Let a child begin with the first `tokens` computed tokens of a parent. The child must have a rank.

        Returns False if there is no slot or no memory for the child, or if the parent holds no memory. The
        child then waits like any request.
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
        """Let a held request go on."""
        if request.status is RequestStatus.HELD:
            self._enqueue(request)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def would_wait(self, arrivals: Mapping[str, int]) -> dict[str, int]:
        """For each tenant, how many requests would wait, beyond the free slots, after these arrivals."""
        beyond = len(self.waiting) + sum(arrivals.values()) - (self.max_num_seqs - len(self.running))
        return {t: max(0, min(beyond, self.waiting.count(t) + n)) for t, n in arrivals.items()}

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    # ------------------------------------------------------------------ one step
    def schedule(self) -> Batch:
        """Choose the next step's tokens. All of them have memory when this returns."""
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
            # The whole cache is free, and the first request still does not fit.
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
        """Schedule one token for each running request that has exactly one to compute."""
        given: dict[str, int] = {}
        # Most urgent first, so that it takes memory before the others can.
        for request in list(self.running):
            if request.num_remaining != 1 or request.status is not RequestStatus.RUNNING:
                continue
            if request.ends_with_pending:
                continue
            # There is nearly always room. Other requests matter only when there is none.
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
        """Charge tenants for the tokens in `given`, and empty `given`."""
        for tenant, tokens in given.items():
            plan.budget -= tokens
            self.turns.charge(tenant, tokens)
        given.clear()

    def _prompts(self, plan: _Plan) -> None:
        """Give the rest of the budget to running and new prompts, with fair turns between tenants."""
        for request in self.running:
            if request.num_remaining > 1:
                plan.add_prompt(request)
        for tenant in self._short:  # before others take the memory that is kept for them
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
        """Each tenant's most urgent request with prompt tokens to compute, whether running or waiting."""
        ready = {tenant: requests[0] for tenant, requests in plan.prompts.items() if requests}
        for tenant in self.waiting.tenants:
            head = self.waiting.head(tenant)
            if head is None or tenant in plan.closed:
                continue
            if tenant not in ready or head.rank < ready[tenant].rank:
                ready[tenant] = head
        return ready

    def _in_order(self, ready: Mapping[str, Request]) -> list[str]:
        """The tenants, lowest level first, so that a light tenant need not wait for a heavy one's turn."""
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
        """Start the tenant's most urgent waiting request, with memory for all its tokens.

        Returns False if there is no room that it may use. The tenant then gets no more admissions in this
        step.
        """
        request = self.waiting.head(tenant)
        if request is None or tenant in plan.closed or plan.starved:
            plan.closed.add(tenant)
            return False
        plan.closed.add(tenant)
        weights = self.turns.weights
        if request.pending_row is not None:  # preempted while its token is still in flight
            plan.short[tenant] = level(self.running, tenant, weights)
            return False
        if len(self.running) >= self.max_num_seqs and not others_run(self.running, tenant):
            return False  # the request that would yield belongs to the same tenant
        own, weight = level(self.running, tenant, weights), self.turns.weight(tenant)
        need = request.num_tokens + 1  # its tokens and the one it will produce
        if not all(entitled(own, need / weight, other) for other in plan.short.values()):
            return False
        if self.kv.awaits(request.token_ids, salt=request.salt, request_id=request.request_id):
            return False  # another request computes the same prefix now: wait a few steps and share it
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
        """Give a request memory for all its tokens. Returns how many need no computing; None if memory is
        short."""
        resumed = request.metrics.num_preemptions > 0
        cached = self.preemption.take_back(request, resumed=resumed)
        if cached and not resumed:
            request.metrics.num_cached_tokens = min(cached, len(request.prompt_token_ids))
        return cached

    def _unblock(self, plan: _Plan) -> None:
        """If all running requests wait for group members that find no slot, preempt the least urgent one."""
        victim = self.running[-1]
        if all(request.idle for request in self.running):
            self._preempt(victim, "memory", next(iter(self.waiting)), plan)

    def _make_room(self, request: Request, plan: _Plan) -> bool:
        """Give `request` memory for all its tokens. Preempts requests that yield before it, or else itself.

        Returns False if it was preempted, or if it is alone and there is no memory; it then still runs.
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
        """Take a running request's memory and slot. It then waits; with nothing to compute it is held."""
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
        """Change the cache's budget in one call. Preempts as few requests as needed, in the usual order.

        No step may be in flight. Returns the preempted requests.
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
