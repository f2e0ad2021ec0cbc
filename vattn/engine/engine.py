"""The engine: one step after another, from requests to tokens.

step ─┬ Scheduler.schedule()  -> Batch           whose tokens, within budget and memory
      ├ Executor.launch()                        the model, or what stands in for it
      ├ Executor.collect()    -> tokens          with overlap those of the step before
      └ enter the tokens      -> RequestDeltas   append, stop, free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from vattn.config import SchedulerConfig
from vattn.engine.blueprint import create_scheduler
from vattn.engine.deadlines import Deadlines
from vattn.engine.deltas import RequestDelta
from vattn.engine.events import EventLog
from vattn.engine.executor import Executor, Handle
from vattn.engine.groups import BeamGroup, Group, ParallelGroup
from vattn.engine.intake import Intake
from vattn.engine.listener import StepListener
from vattn.engine.live_requests import LiveRequests, leader_of, runs
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


class NewToken(NamedTuple):
    """What one request got from a step."""

    request: Request
    token: int
    """Negative: none; see `sampling_failure`."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class InFlight:
    """A launched step whose tokens are not known yet."""

    handle: Handle
    sampling: list[Request]
    """Requests that get a token, in the order of the result."""
    started: float
    """Seconds, on the executor's clock."""
    decodes: int
    prompt_tokens: int

    @property
    def must_settle_first(self) -> bool:
        """True when what is scheduled next depends on this step's tokens, not only on its KV."""
        return any(r.sampling.edited or isinstance(r.group, BeamGroup) for r in self.sampling)


class Engine:
    """Requests in, deltas out. One thread drives it.

    `overlap`: launch each step before the last one's tokens are known; None: where the executor gains by it.
    `trace`: where decisions are logged; it stays the caller's.
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
        """Bytes that `wake_up` will take; while awake, what the last `sleep` or `resize_kv` said."""
        self._flight: InFlight | None = None
        self._settled = 0.0
        """When the last step was over."""
        self._live = LiveRequests()
        self._refused: set[Request] = set()
        """Requests whose memory could not be had in the last step."""
        self._deadlines = Deadlines()
        self.trace.begin(self.overlap)

    # ------------------------------------------------------------------ requests come and go
    def validate(self, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams) -> None:
        """Raise RequestError or CapacityError if the engine can't serve this; nothing is changed."""
        self.intake.validate(prompt_token_ids, params)

    def make_room(self, services: Sequence[Service]) -> None:
        """Raise QueueFull unless requests on these terms may all be added; nothing is changed."""
        if self.max_waiting is None:
            return
        arrivals = Counter(service.tenant for service in services)
        for tenant, waiting in self.scheduler.would_wait(arrivals).items():
            if waiting > self.max_waiting:
                self.metrics.refused_requests += len(services)
                self.trace.refuse(tenant, waiting, self.max_waiting)
                raise QueueFull(
                    f"{waiting:,} requests of tenant {tenant!r} would have to wait, {arrivals[tenant]:,} of "
                    f"them new; max_waiting={self.max_waiting:,} allows no more: try again later"
                )

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
        """Queue a request. `stream`: report it after each token, not only at the end.

        `cache_salt`: it shares cached prefixes with requests of the same salt only.
        Raises RequestError or CapacityError (QueueFull: too many wait), and changes nothing, if it is
        refused.
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
        """Queue a request that is made already; of several that answer one prompt, the leader first."""
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
        """End a request now; False if it is not (or no longer) here. Its last report comes as any other."""
        request = self._live.get(request_id)
        if request is None:
            return False
        if error is not None:
            self._tell(request, error)
        self._end(request, reason)
        return True

    def abort_all(self) -> None:
        for request_id in self._live.ids():
            self.abort(request_id)

    def knows(self, request_id: str) -> bool:
        """True until the request's last report is taken and its memory is let go."""
        return request_id in self._live or request_id in self.scheduler.unfreed

    def requests(self) -> list[Request]:
        """All that have not ended: branches and beams one by one, those that wait for others included."""
        return self._live.members()

    @property
    def has_work(self) -> bool:
        awaited = self._flight is not None and any(not r.finished for r in self._flight.sampling)
        return self.scheduler.has_work or awaited or self._live.has_news

    @property
    def next_deadline(self) -> float | None:
        """When a request's time is up next, on the executor's clock; None: never."""
        return self._deadlines.next

    # ------------------------------------------------------------------ memory comes and goes
    def resize_kv(self, budget_bytes: int) -> None:
        """Give the cache another budget while requests run; who has no place in it any more yields.

        Raises ConfigError, and changes nothing, where one request of `max_model_len` would not fit.
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
        """Give all KV memory back. Running requests yield; nothing runs until `wake_up`."""
        if self.asleep:
            return
        budget = self.kv.budget_bytes
        self.reset_prefix_cache()
        self._resize(0)
        self.awake_budget, self.asleep = budget, True

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; what runs leaves none behind."""
        self.kv.reset_prefix_cache()
        self.trace.reset()

    def wake_up(self) -> None:
        """Take the memory again and go on; sleeps on, with an error, if it is not there any more."""
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
            raise CapacityError(  # torch has not the memory
                f"the KV cache can't become {budget_bytes:,} bytes and stays at "
                f"{self.kv.budget_bytes:,}: {error}; free memory on the device, or ask for less"
            ) from error
        self.trace.resize(budget_bytes, preempted)
        if self.kv.generation != generation and budget_bytes:
            self.executor.cache_moved()

    # ------------------------------------------------------------------ one step
    def step(self) -> list[RequestDelta]:
        """Run one batch; what is new of requests that ended, and of streamed ones that got a token.

        Raises StepError when the model or the driver failed: every request is where it was before the step,
        and what had come before can be taken with `take_deltas`.
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
            self._fail(request, _out_of_memory(request))
        self._give_up(batch)
        launched = self._launch(batch, flight) if batch.items else None
        self._flight = launched if self.overlap else None
        if flight is not None:
            self._settle(flight)
        if launched is not None and not self.overlap:
            self._settle(launched)

    def _give_up(self, batch: Batch) -> None:
        """Requests whose memory could not be had sit this step out; those that do so twice running fail."""
        patient, self._refused = self._refused, set()
        for request, error in batch.failed:
            if request in patient:
                self._fail(request, f"it could not get memory ({type(error).__name__}: {error}): try again")
            else:
                self._refused.add(request)

    def _expire(self) -> None:
        """End the requests whose time is up."""
        for request in self._deadlines.expired(self.executor.clock()):
            if not request.finished:  # else with another one of its group
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
        """Start a batch behind `flight`; its requests move on."""
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
        """Tell the cache what is written. What it can't enter now it is told with the next tokens."""
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
        """Enter a step's tokens: append, stop, report. Those of requests that ended meanwhile are dropped."""
        try:
            result = self.executor.collect(flight.handle)
        except Exception as error:  # the tokens are lost, and with them what comes next
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
                continue  # with another one of its group
            end: Finish | str | None = sampling_failure(token)
            if end is None:
                try:
                    end = self._enter(request, token, entry, result.beams.get(request), now)
                except Exception as error:  # the other tokens of the step must not be lost
                    end = _broken(error)
            if end is not None:
                ends.append((request, end))
        for request, end in ends:
            if isinstance(end, str):
                self._fail(request, end)
            elif not request.finished:
                self._finish(request, end)

    def _time(self, flight: InFlight, now: float) -> None:
        """Learn from a step that is over; behind another one it began when that ended."""
        seconds = now - max(flight.started, self._settled)
        self._settled = now
        if flight.sampling or not self.executor.overlaps:  # else nobody waited for it
            self.scheduler.preemption.speed.observe(flight.decodes, flight.prompt_tokens, seconds)

    def _enter(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        candidates: list[Candidate] | None,
        now: float,
    ) -> Finish | None:
        """Enter one token; says why the output ends with it. `candidates`: what may follow, of a beam."""
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
        """Let a child begin with the first `tokens` tokens of its parent, or wait."""
        try:
            placed = self.scheduler.fork(parent, child, tokens)
        except COPY_ERRORS:  # it waits, and computes its text by itself
            placed = False
        self.trace.fork(parent, child, tokens, tokens if placed else 0)

    def drop(self, request: Request) -> None:
        """Forget a beam and its memory."""
        self.scheduler.finish(request)
        self.trace.drop(request)

    def extend(self, request: Request, token: int) -> None:
        """Give a beam its next token, and a place in the queue if it has none."""
        request.append(token, None)
        self.scheduler.resume(request)
        self.trace.extend(request, token)

    def heir(self, parent: Request, place: int, token: int, number: int) -> Request:
        """A new beam of its parent's group, with its parent's text and one token more."""
        return self.intake.heir(parent, leader_of(parent), place, token, number)

    # ------------------------------------------------------------------ the end
    def _fail(self, request: Request, error: str) -> None:
        """A request can't go on; of a beam search, no beam can."""
        if not runs(leader_of(request)):
            return
        if isinstance(request.group, BeamGroup):
            self._tell(request, error)
            self._end(request.group.leader, "error")
            return
        if request.finished:
            return
        self._tell(request, error)
        with suppress(Exception):  # the detokenizer may be what is broken
            request.stop.abort()
        self._finish(request, Finish("error"))

    @staticmethod
    def _tell(request: Request, error: str) -> None:
        if isinstance(request.group, BeamGroup):
            request.group.failed = request.group.failed or error
        else:
            request.error = request.error or error

    def _finish(self, request: Request, finish: Finish) -> None:
        """A request, or a branch of one, has ended."""
        self._close(request, finish)
        group = request.group
        if isinstance(group, ParallelGroup) and request is group.leader:
            for branch in group.held:  # it ended before they could begin
                branch.error = request.error
                self._close(branch, finish)
        self._report_end(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request and all of its group now."""
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
        """What is new since the last call, of every request that has something to report."""
        return self._live.take_deltas()


def _broken(error: Exception) -> str:
    return (
        f"its next token could not be entered ({type(error).__name__}: {error}): try again; if the tokenizer "
        "is at fault, detokenize=False does without it"
    )


def _out_of_memory(request: Request) -> str:
    return (
        f"no memory for token {request.num_tokens:,} although nothing else runs: the machine, not the "
        "budget, is short of it; lower kv_cache_memory_bytes or free memory"
    )
