"""The engine: one step after another, from requests to tokens.

step ─┬ Scheduler.schedule()   -> Batch            whose tokens, within budget and memory
      ├ Pipeline.launch ─┬ KVCache.begin_step()  -> AttentionInputs
      │                  ├ Runner.run()          -> logits
      │                  └ Sampler.sample()      -> tokens, on the device
      └ Pipeline.settle, update -> RequestOutputs  append, stop, free
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vattn.attention.factory import create_attention
from vattn.config import SchedulerConfig
from vattn.engine.blueprint import create_scheduler
from vattn.engine.deadlines import Deadlines
from vattn.engine.events import EventLog
from vattn.engine.graphs import create_graphs
from vattn.engine.groups import BeamGroup, Group, ParallelGroup
from vattn.engine.intake import Intake
from vattn.engine.pipeline import InFlight, Pipeline
from vattn.engine.preemption import COPY_ERRORS
from vattn.engine.request import Request
from vattn.engine.runner import Runner
from vattn.engine.scheduler import Batch
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.engine.watch import Watch
from vattn.errors import CapacityError, ConfigError, QueueFull, RequestError
from vattn.interrupts import interrupts_held
from vattn.kv.base import KVCache
from vattn.metrics import EngineMetrics
from vattn.models.lease import Loan
from vattn.models.loader import LoadedModel
from vattn.outputs import FinishReason, RequestOutput, TokenLogprobs
from vattn.params import BeamSearchParams, SamplingParams
from vattn.sampling.beam import Candidate
from vattn.sampling.detokenize import Finish, TokenText
from vattn.sampling.sampler import Sampler, sampling_failure
from vattn.vmm.driver import DriverError


class Engine:
    """Requests in, outputs out. One thread drives it.

    `overlap`: launch each step before the last one's tokens are known; None: on CUDA.
    `enforce_eager`: no captured graphs; None: graphs on CUDA, with attention that allows it.
    `trace`: where decisions are logged; it stays the caller's.
    `loan`: this engine's use of the model; it stays the caller's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVCache,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        attention: str = "auto",
        overlap: bool | None = None,
        enforce_eager: bool | None = None,
        seed: int = 0,
        trace: EventLog | None = None,
        loan: Loan | None = None,
    ) -> None:
        self.loaded = loaded
        self.kv = kv
        self.max_model_len = max_model_len
        self.scheduler = create_scheduler(kv, config)
        self.max_waiting = config.max_waiting
        self.trace = trace or EventLog()
        device = next(loaded.model.parameters()).device
        kernel = create_attention(attention, kv, device)
        self._max_batch = config.max_num_seqs
        self._captures = device.type == "cuda" if enforce_eager is None else not enforce_eager
        runner = Runner(loaded.model, kernel, device, loan=loan)
        self.sampler = Sampler(seed=seed, eos_token_ids=loaded.eos_token_ids)
        self.metrics = EngineMetrics()
        self.pipeline = Pipeline(self.scheduler, kv, runner, self.sampler, self.metrics)
        self.watch = Watch(self.metrics, self.scheduler, kv)
        self._capture()
        self.overlap = device.type == "cuda" if overlap is None else overlap
        self.asleep = False
        self.awake_budget = kv.budget_bytes
        """Bytes that `wake_up` will take; while awake, what the last `sleep` or `resize_kv` said."""
        self._flight: InFlight | None = None
        self._ready: list[RequestOutput] = []
        """Outputs not handed out yet: what a step settled before it failed is reported by the next."""
        self._ending: dict[Request, Finish | str] = {}
        """Requests that are to end: how, or what failed."""
        self._requests: dict[str, Request] = {}
        """By the user's id; of a group, its leader."""
        self._deadlines = Deadlines()
        self._intake = Intake(loaded, self.sampler, max_model_len, shares_prefixes=kv.shares_prefixes)

    # ------------------------------------------------------------------ requests come and go
    def validate(self, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams) -> None:
        """Raise RequestError or CapacityError if the engine can't serve this; nothing is changed."""
        self._intake.validate(prompt_token_ids, params)

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
        prompt: str | None = None,
        stream: bool = False,
        service: Service = DEFAULT_SERVICE,
        cache_salt: str = "",
    ) -> str:
        """Queue a request; returns its id. `stream`: `step` reports it after each token, not only at the end.

        `cache_salt`: it shares cached prefixes with requests of the same salt only.
        Raises RequestError or CapacityError (QueueFull: too many wait), and changes nothing, if it is
        refused.
        """
        if self.knows(request_id):
            raise RequestError(f"request id {request_id!r} is in use")
        self.validate(prompt_token_ids, params)
        self.make_room([service])
        asked: dict[str, Any] = {"prompt": prompt, "service": service, "cache_salt": cache_salt}
        if isinstance(params, BeamSearchParams):
            group: Group = self._intake.beams(request_id, prompt_token_ids, params, **asked)
            members = [group.leader]
        elif params.branches > 1:
            group = self._intake.parallel(request_id, prompt_token_ids, params, stream=stream, **asked)
            members = group.branches
        else:
            members = [self._intake.request(request_id, prompt_token_ids, params, stream=stream, **asked)]
        self._requests[request_id] = members[0]
        self.scheduler.add(members[0])
        for member in members[1:]:
            member.rank = (members[0].rank[0], member.arrival)
        if service.timeout_s is not None:
            for member in members:
                self._deadlines.add(member, members[0].metrics.arrival_time + service.timeout_s)
        self.trace.arrive(members[0])
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its last output, or None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, "abort")

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def knows(self, request_id: str) -> bool:
        """True until the request's last output is handed out."""
        return request_id in self._requests or any(o.request_id == request_id for o in self._ready)

    def requests(self) -> list[Request]:
        """All that have not ended: branches and beams one by one, those that wait for others included."""
        found: list[Request] = []
        for leader in self._requests.values():
            found += [leader] if leader.group is None else leader.group.members
        return found

    @property
    def has_work(self) -> bool:
        awaited = self._flight is not None and any(not r.finished for r in self._flight.sampling)
        return self.scheduler.has_work or awaited or bool(self._ready)

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
        self.awake_budget = budget_bytes
        if not self.asleep:
            self._resize(budget_bytes)

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
        with interrupts_held():
            flight, self._flight = self._flight, None
            if flight is not None:
                self._settle(flight)
            generation = self.kv.generation
            try:
                self.trace.resize(budget_bytes, self.scheduler.resize(budget_bytes))
            except DriverError:
                raise
            except COPY_ERRORS as error:  # torch has not the memory
                raise CapacityError(
                    f"the KV cache can't become {budget_bytes:,} bytes and stays at "
                    f"{self.kv.budget_bytes:,}: {error}; free memory on the device, or ask for less"
                ) from error
            if self.kv.generation != generation and budget_bytes:
                self._capture()

    def _capture(self) -> None:
        """Have decodes run from captured graphs, if that is asked for: they know the cache's addresses."""
        runner, heads = self.pipeline.runner, self.loaded.spec.num_heads
        runner.graphs = None  # should the capture fail: those of before may know addresses that are gone
        if self._captures:
            runner.graphs = create_graphs(
                runner.model, runner.attention, self.kv, num_heads=heads, max_batch=self._max_batch
            )

    # ------------------------------------------------------------------ one step
    def step(self) -> list[RequestOutput]:
        """Run one batch; outputs of requests that finished, and of streaming ones that got a token.

        An error of the model or the driver leaves every request where it was before the step.
        """
        with interrupts_held(), self.watch:
            self._conclude()
            self._expire()
            if self.asleep:
                outputs, self._ready = self._ready, []
                return outputs
            flight = self._flight
            if flight is not None and flight.must_settle_first:
                self._flight = None
                self._settle(flight)
                flight = None
            batch = self._schedule()
            for request in batch.starved:
                self._fail(request, _out_of_memory(request))
            launched = self._launch(batch, flight) if batch.items else None
            self._flight = launched if self.overlap else None
            for settled in (flight, None if self.overlap else launched):
                if settled is not None:
                    self._settle(settled)
            if launched is not None and launched.failure is not None:
                raise launched.failure
            outputs, self._ready = self._ready, []
            return outputs

    def _expire(self) -> None:
        """End the requests whose time is up."""
        for request in self._deadlines.expired(time.perf_counter()):
            if request.finished:
                continue  # with another one of its group
            self.metrics.timed_out_requests += 1
            self._ready.append(self._end(request, "timeout"))

    def _schedule(self) -> Batch:
        try:
            batch = self.scheduler.schedule()
        except BaseException as error:
            self.trace.step_failed(error)
            raise
        self.trace.step(batch)
        return batch

    def _launch(self, batch: Batch, flight: InFlight | None) -> InFlight:
        try:
            return self.pipeline.launch(batch, flight)
        except BaseException as error:
            self.trace.step_failed(error)
            raise

    def _settle(self, flight: InFlight) -> None:
        """Enter a step's tokens: append, stop, report."""
        news = self.pipeline.settle(flight)
        now = time.perf_counter()  # the tokens are here
        self.trace.tokens(news)
        for request, token, logprobs in news:
            if request.finished:
                continue  # with another one of its group
            end: Finish | str | None = sampling_failure(token)
            if end is None:
                try:
                    end = self._enter(request, token, logprobs, flight.beams.get(request), now)
                except Exception as error:  # the other tokens of the step must not be lost
                    end = _broken(error)
            if end is not None:
                self._ending[request] = end
        self._conclude()

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
        if isinstance(request.group, BeamGroup):
            self._deliver(request, request.group, candidates or [])
            return None
        if request.group is not None:
            request.group.prompt_computed(request, self)
        finish = request.append(token, logprobs)
        if finish is None and request.stream:
            self._ready.append(self._report(request))
        return finish

    def _conclude(self) -> None:
        """End the requests that are to end; should that fail, the next step tries again before it goes on."""
        while self._ending:
            request, end = next(iter(self._ending.items()))
            if isinstance(end, str):
                self._fail(request, end)
            else:
                self._finish(request, end)
            del self._ending[request]

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

    def heir(self, parent: Request, place: int, token: int) -> Request:
        """A new beam of its parent's group, with its parent's text and one token more."""
        assert parent.group is not None
        return self._intake.heir(parent, parent.group.leader, place, token)

    def _deliver(self, beam: Request, group: BeamGroup, candidates: list[Candidate]) -> None:
        group.deliver(beam, candidates, self)
        if group.search.done:
            self._ready.append(self._end(group.leader, "length"))

    # ------------------------------------------------------------------ the end
    def _report(self, request: Request) -> RequestOutput:
        """A request, with the others of its group, as it stands."""
        try:
            return self._output(request, self._intake.vocabulary)
        except Exception as error:
            leader = request if request.group is None else request.group.leader
            if leader.request_id in self._requests:
                raise
            # Its last output must come, so it comes without texts.
            if isinstance(request.group, BeamGroup):
                request.group.failed = request.group.failed or _broken(error)
            else:
                request.error, request.finish = request.error or _broken(error), Finish("error")
            return self._output(request, None)

    @staticmethod
    def _output(request: Request, vocabulary: TokenText | None) -> RequestOutput:
        group = request.group
        if isinstance(group, BeamGroup):
            return group.output(_no_text if vocabulary is None else vocabulary.text)
        return (group or request).output(None if vocabulary is None else vocabulary.annotate)

    def _fail(self, request: Request, error: str) -> None:
        """A request can't go on; of a beam search, no beam can."""
        if isinstance(request.group, BeamGroup):
            leader = request.group.leader
            if leader.request_id in self._requests:
                request.group.failed = error
                self._ready.append(self._end(leader, "error"))
            return
        if request.finished:
            return
        request.error = error
        with suppress(Exception):  # the detokenizer may be what is broken
            request.stop.abort()
        self._finish(request, Finish("error"))

    def _finish(self, request: Request, finish: Finish) -> None:
        """A request, or a branch of one, has ended; report it if no other branch runs."""
        self._close(request, finish)
        group = request.group
        if isinstance(group, ParallelGroup):
            if request is group.leader and group.held:
                for branch in group.held:  # it ended before they could begin
                    branch.error = request.error
                    self._close(branch, finish)
            if not group.finished:
                if request.stream:
                    self._ready.append(self._report(request))
                return
            request = group.leader
        self._ready.append(self._over(request))

    def _end(self, request: Request, reason: FinishReason) -> RequestOutput:
        """End a request and all of its group now; its last output."""
        group = request.group
        for member in [request] if group is None else group.members:
            with suppress(Exception):
                member.stop.abort()
            self._close(member, Finish(reason))
        leader = request if group is None else group.leader
        leader.metrics.finished_time = time.perf_counter()
        return self._over(leader)

    def _close(self, request: Request, finish: Finish) -> None:
        self.scheduler.finish(request)
        request.finish = finish
        request.metrics.finished_time = time.perf_counter()
        self.trace.finish(request, finish.reason)
        if finish.reason in ("stop", "length"):
            self.watch.finished(request)

    def _over(self, leader: Request) -> RequestOutput:
        del self._requests[leader.request_id]
        self.metrics.finished_requests += 1
        return self._report(leader)


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


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
