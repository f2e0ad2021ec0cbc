"""The engine turns requests into tokens, one step at a time.

step ─┬ Scheduler.schedule()  -> Batch           choose tokens that fit the token budget and the memory
      ├ Executor.launch()                        run the model, or its stand-in
      ├ Executor.collect()    -> tokens          with overlap: the tokens of the step before
      └ enter the tokens      -> RequestDeltas   append, stop, free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vattn.config import SchedulerConfig
from vattn.engine.blueprint import create_scheduler
from vattn.engine.deadlines import Deadlines
from vattn.engine.deltas import RequestDelta
from vattn.engine.events import EventLog
from vattn.engine.executor import Executor
from vattn.engine.groups import BeamGroup, Group, ParallelGroup
from vattn.engine.in_flight import InFlight, NewToken, broken, out_of_memory
from vattn.engine.intake import Intake
from vattn.engine.listener import StepListener
from vattn.engine.live_requests import LiveRequests, leader_of, runs, tell
from vattn.engine.preemption import COPY_ERRORS
from vattn.engine.request import Request
from vattn.engine.scheduler import Batch
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.engine.watch import Watch
from vattn.errors import CapacityError, ConfigError, QueueFull, RequestError, StepError
from vattn.kv.base import KVCache
from vattn.metrics import EngineMetrics
from vattn.outputs import FinishReason, TokenLogprobs
from vattn.params import BeamSearchParams, SamplingParams
from vattn.sampling.beam import Candidate
from vattn.sampling.detokenize import Finish
from vattn.sampling.failures import sampling_failure
from vattn.vmm.driver import DriverError


class Engine:
    """Takes requests and returns deltas. One thread drives it.

    With `overlap` the engine launches each step before it knows the tokens of the step before. None means:
    only if the executor gains from it. `trace` is the log of decisions; the caller owns it and closes it.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVCache,
        intake: Intake,
        config: SchedulerConfig,
        *,
        overlap: bool | None = None,
        trace: EventLog | None = None,
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.intake = intake
        self.max_model_len = intake.max_model_len
        self.scheduler = create_scheduler(kv, config)
        self.max_waiting = config.max_waiting
        self.trace = trace or EventLog()
        self.metrics = EngineMetrics()
        self.watch = Watch(self.metrics, self.scheduler, kv, executor.clock)
        self.listeners: list[StepListener] = [self.watch]
        executor.cache_moved()
        self.overlap = executor.overlaps if overlap is None else overlap
        self.asleep = False
        self.awake_budget = kv.budget_bytes
        """Bytes that `wake_up` will allocate. While the engine is awake, this is the size that the last
        `sleep` or `resize_kv` recorded."""
        self._flight: InFlight | None = None
        self._settled = 0.0
        """Time at which the last step ended."""
        self._live = LiveRequests()
        self._refused: set[Request] = set()
        """Requests that could not get memory in the last step."""
        self._deadlines = Deadlines()
        self.trace.begin(self.overlap)

    # ------------------------------------------------------------------ requests come and go
    def validate(self, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams) -> None:
        """Raise RequestError or CapacityError if the engine can't serve this request. Changes nothing."""
        self.intake.validate(prompt_token_ids, params)

    def make_room(self, services: Sequence[Service]) -> None:
        """Raise QueueFull unless the queue has room for requests with all of these terms. Changes nothing."""
        if self.max_waiting is None:
            return
        arrivals = Counter(service.tenant for service in services)
        for tenant, waiting in self.scheduler.would_wait(arrivals).items():
            if waiting > self.max_waiting:
                self.metrics.refused_requests += len(services)
                self.trace.refuse(tenant, waiting, self.max_waiting)
                raise QueueFull.of(tenant, waiting, arrivals[tenant], self.max_waiting)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        stream: bool = False,
        service: Service = DEFAULT_SERVICE,
        cache_salt: str = "",
    ) -> None:
        """Queue a request. With `stream` it is reported after each token and not only at the end.

        A request shares cached prefixes only with requests that have the same `cache_salt`.
        Raises RequestError or CapacityError if the request is refused; QueueFull, a CapacityError, means
        that too many requests are waiting. A refused request changes nothing.
        """
        self._require_new(request_id)
        self.validate(prompt_token_ids, params)
        self.make_room([service])
        asked: dict[str, Any] = {
            "service": service,
            "cache_salt": cache_salt,
            "arrival_time": self.executor.clock(),
        }
        if isinstance(params, BeamSearchParams):
            group: Group = self.intake.beams(request_id, prompt_token_ids, params, **asked)
            members = [group.leader]
        elif params.branches > 1:
            group = self.intake.parallel(request_id, prompt_token_ids, params, stream=stream, **asked)
            members = group.branches
        else:
            members = [self.intake.request(request_id, prompt_token_ids, params, stream=stream, **asked)]
        self.enqueue(members)

    def _require_new(self, request_id: str) -> None:
        if self.knows(request_id):
            raise RequestError(f"request id {request_id!r} is in use")

    def enqueue(self, members: Sequence[Request]) -> None:
        """Queue requests that already exist. If several answer one prompt, the leader comes first."""
        leader = members[0]
        self._live.add(leader)
        self.scheduler.add(leader)
        for member in members[1:]:
            member.rank = (leader.rank[0], member.arrival)
        if leader.service.timeout_s is not None:
            for member in members:
                self._deadlines.add(member, leader.metrics.arrival_time + leader.service.timeout_s)
        self.trace.arrive(leader)

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> bool:
        """End a request now. Returns False if the engine does not have it, or no longer has it.

        The request's last report arrives as usual.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        if error is not None:
            tell(request, error)
        self._end(request, reason)
        return True

    def abort_all(self) -> None:
        for request_id in self._live.ids():
            self.abort(request_id)

    def knows(self, request_id: str) -> bool:
        """True until the request's last report has been taken and its memory has been freed."""
        return request_id in self._live or request_id in self.scheduler.unfreed

    def requests(self) -> list[Request]:
        """All requests that have not ended. Each branch and each beam is listed, held ones included."""
        return self._live.members()

    @property
    def has_work(self) -> bool:
        awaited = self._flight is not None and any(not r.finished for r in self._flight.sampling)
        return self.scheduler.has_work or awaited or self._live.has_news

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline, in seconds on the executor's clock; None if no request has one."""
        return self._deadlines.next

    # ------------------------------------------------------------------ memory comes and goes
    def resize_kv(self, budget_bytes: int) -> None:
        """Give the cache another budget while requests run. Requests that no longer fit are preempted.

        Raises ConfigError, and changes nothing, if a request of `max_model_len` tokens would not fit.
        """
        tokens = self.kv.tokens_in(budget_bytes)
        if tokens < self.max_model_len:
            raise ConfigError(
                f"{budget_bytes:,} bytes of KV hold {tokens:,} tokens of one request; it may have "
                f"max_model_len={self.max_model_len:,}"
            )
        if not self.asleep:
            self._resize(budget_bytes)
        self.awake_budget = budget_bytes

    def sleep(self) -> None:
        """Give all KV memory back. Running requests are preempted, and nothing runs until `wake_up`."""
        if self.asleep:
            return
        budget = self.kv.budget_bytes
        self.reset_prefix_cache()
        self._resize(0)
        self.awake_budget, self.asleep = budget, True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. The requests that run now will not add theirs to the cache."""
        self.kv.reset_prefix_cache()
        self.trace.reset()

    def wake_up(self) -> None:
        """Allocate the memory again and go on. If it is no longer available, this raises and the engine
        stays asleep."""
        if self.asleep:
            self._resize(self.awake_budget)
            self.asleep = False

    def _resize(self, budget_bytes: int) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._settle(flight)
        generation = self.kv.generation
        try:
            preempted = self.scheduler.resize(budget_bytes)
        except BaseException as error:
            self.trace.resize_failed(budget_bytes, error)
            if isinstance(error, DriverError) or not isinstance(error, COPY_ERRORS):
                raise
            raise CapacityError(  # torch could not allocate the memory
                f"the KV cache can't become {budget_bytes:,} bytes and stays at "
                f"{self.kv.budget_bytes:,}: {error}; free memory on the device, or ask for less"
            ) from error
        self.trace.resize(budget_bytes, preempted)
        if self.kv.generation != generation and budget_bytes:
            self.executor.cache_moved()

    # ------------------------------------------------------------------ one step
    def step(self) -> list[RequestDelta]:
        """Run one batch. Returns what is new for requests that ended and for streamed ones that got a token.

        Raises StepError if the model or the driver fails. Every request is then in the state it had before
        the step. Reports from before the failure can still be taken with `take_deltas`.
        """
        for listener in tuple(self.listeners):
            listener.step_begins()
        failed = True
        try:
            self._expire()
            if not self.asleep:
                self._run_step()
            failed = False
        finally:
            for listener in tuple(self.listeners):
                listener.step_ended(failed)
        return self.take_deltas()

    def _run_step(self) -> None:
        flight = self._flight
        if flight is not None and flight.must_settle_first:
            self._flight = None
            self._settle(flight)
            flight = None
        batch = self._schedule()
        for request in batch.starved:
            self._fail(request, out_of_memory(request))
        self._give_up(batch)
        launched = self._launch(batch, flight) if batch.items else None
        self._flight = launched if self.overlap else None
        if flight is not None:
            self._settle(flight)
        if launched is not None and not self.overlap:
            self._settle(launched)

    def _give_up(self, batch: Batch) -> None:
        """Leave requests that got no memory out of this step. A request that is left out twice in a row
        fails."""
        patient, self._refused = self._refused, set()
        for request, error in batch.failed:
            if request in patient:
                self._fail(request, f"it could not get memory ({type(error).__name__}: {error}): try again")
            else:
                self._refused.add(request)

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        for request in self._deadlines.expired(self.executor.clock()):
            if not request.finished:  # it may have ended together with another request of its group
                self.metrics.timed_out_requests += 1
                self._end(request, "timeout")

    def _schedule(self) -> Batch:
        try:
            batch = self.scheduler.schedule()
        except BaseException as error:
            self.trace.step_failed(error)
            raise
        self.trace.step(batch)
        return batch

    def _launch(self, batch: Batch, flight: InFlight | None) -> InFlight:
        """Launch a batch after `flight` and advance its requests."""
        started = self.executor.clock()
        for listener in tuple(self.listeners):
            listener.scheduled(batch)
        try:
            handle = self.executor.launch(batch.items, None if flight is None else flight.handle)
        except BaseException as error:
            self.trace.step_failed(error)
            if not isinstance(error, Exception):
                raise
            raise StepError([leader_of(item.request).request_id for item in batch.items], error) from error
        sampling = [item.request for item in batch.items if item.samples]
        decodes = 0
        for request, length in batch.items:
            decodes += length == 1
            request.num_computed += length
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = started
        for row, request in enumerate(sampling):
            request.add_pending(row)
        self._tell_computed(batch)
        self._count(batch)
        for listener in tuple(self.listeners):
            listener.launched(batch)
        return InFlight(handle, sampling, started, decodes, batch.num_tokens - decodes)

    def _tell_computed(self, batch: Batch) -> None:
        """Tell the cache which tokens are written. Where that fails, the next step tells it again."""
        computed = self.kv.computed
        for request, _ in batch.items:
            try:
                computed(request.request_id, request.token_ids, request.num_computed)
            except COPY_ERRORS:
                continue

    def _count(self, batch: Batch) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        metrics.observe_step(batch.num_tokens, len(scheduler.running), self.kv.usage())
        metrics.preemptions = scheduler.num_preemptions
        metrics.swapped_requests = scheduler.preemption.swaps
        metrics.recomputed_tokens = scheduler.preemption.recomputed_tokens

    def _settle(self, flight: InFlight) -> None:
        """Enter a step's tokens: append, stop, report. Tokens of requests that have ended are dropped."""
        try:
            result = self.executor.collect(flight.handle)
        except Exception as error:  # without these tokens the requests can't go on
            for request in flight.sampling:
                self._fail(request, f"its token was lost ({type(error).__name__}: {error})")
            raise StepError([], error) from error
        for request, entries in result.prompt_logprobs:
            request.prompt_logprobs += entries
        now = self.executor.clock()
        self._time(flight, now)
        logprobs = result.logprobs or [None] * len(result.token_ids)
        news = [
            NewToken(request, token, entry)
            for request, token, entry in zip(flight.sampling, result.token_ids, logprobs, strict=True)
            if not request.finished
        ]
        for request, _, _ in news:
            request.settle_pending()
        self.trace.tokens(news)
        for listener in tuple(self.listeners):
            listener.settled(news)
        ends: list[tuple[Request, Finish | str]] = []
        for request, token, entry in news:
            if request.finished:
                continue  # it ended together with another request of its group
            end: Finish | str | None = sampling_failure(token)
            if end is None:
                try:
                    end = self._enter(request, token, entry, result.beams.get(request), now)
                except Exception as error:  # the other tokens of the step must not be lost
                    end = broken(error)
            if end is not None:
                ends.append((request, end))
        for request, end in ends:
            if isinstance(end, str):
                self._fail(request, end)
            elif not request.finished:
                self._finish(request, end)

    def _time(self, flight: InFlight, now: float) -> None:
        """Record how long a finished step took. A step that was queued behind another one began when that
        one ended."""
        seconds = now - max(flight.started, self._settled)
        self._settled = now
        if flight.sampling or not self.executor.overlaps:  # else the host did not wait for it
            self.scheduler.preemption.speed.observe(flight.decodes, flight.prompt_tokens, seconds)

    def _enter(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        candidates: list[Candidate] | None,
        now: float,
    ) -> Finish | None:
        """Enter one token. Returns why the output ends with it, if it does.

        For a beam, `candidates` holds the tokens that may follow.
        """
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        self.metrics.output_tokens += 1
        group = request.group
        if isinstance(group, BeamGroup):
            group.deliver(request, candidates or [], self)
            if group.search.done:
                self._end(group.leader, "length")
            return None
        if group is not None:
            group.prompt_computed(request, self)
        finish = request.append(token, logprobs)
        if finish is None and request.stream:
            self._live.touch(request)
        return finish

    # ------------------------------------------------------------------ groups
    def fork(self, parent: Request, child: Request, tokens: int) -> None:
        """Let a child begin with the first `tokens` tokens of its parent. Without room, the child waits."""
        try:
            placed = self.scheduler.fork(parent, child, tokens)
        except COPY_ERRORS:  # the child waits, and computes its tokens itself
            placed = False
        self.trace.fork(parent, child, tokens, tokens if placed else 0)

    def drop(self, request: Request) -> None:
        """Forget a beam and free its memory."""
        self.scheduler.finish(request)
        self.trace.drop(request)

    def extend(self, request: Request, token: int) -> None:
        """Give a beam its next token. If the beam is not queued, queue it."""
        request.append(token, None)
        self.scheduler.resume(request)
        self.trace.extend(request, token)

    def heir(self, parent: Request, place: int, token: int, number: int) -> Request:
        """Make a new beam in its parent's group. It has its parent's tokens and one more."""
        return self.intake.heir(parent, leader_of(parent), place, token, number)

    # ------------------------------------------------------------------ the end
    def _fail(self, request: Request, error: str) -> None:
        """Fail a request that can't go on. In a beam search, this ends all beams."""
        if not runs(leader_of(request)):
            return
        if isinstance(request.group, BeamGroup):
            tell(request, error)
            self._end(request.group.leader, "error")
            return
        if request.finished:
            return
        tell(request, error)
        with suppress(Exception):  # the detokenizer itself may be broken
            request.stop.abort()
        self._finish(request, Finish("error"))

    def _finish(self, request: Request, finish: Finish) -> None:
        """End a request, or one branch of it."""
        self._close(request, finish)
        group = request.group
        if isinstance(group, ParallelGroup) and request is group.leader:
            for branch in group.held:  # the leader ended before these branches could begin
                branch.error = request.error
                self._close(branch, finish)
        self._report_end(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request and its whole group now."""
        for member in [request] if request.group is None else request.group.members:
            with suppress(Exception):
                member.stop.abort()
            self._close(member, Finish(reason))
        leader_of(request).metrics.finished_time = self.executor.clock()
        self._report_end(request)

    def _close(self, request: Request, finish: Finish) -> None:
        self.scheduler.finish(request)
        request.finish = finish
        request.metrics.finished_time = self.executor.clock()
        self.trace.finish(request, finish.reason)
        if finish.reason in ("stop", "length"):
            self.watch.finished(request)

    def _report_end(self, request: Request) -> None:
        ended = not runs(leader_of(request))
        self.metrics.finished_requests += ended
        if ended or request.stream:
            self._live.touch(request)

    def take_deltas(self) -> list[RequestDelta]:
        """What is new since the last call, for every request with something to report."""
        return self._live.take_deltas()
