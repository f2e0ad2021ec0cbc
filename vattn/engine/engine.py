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

from vattn.attention.factory import create_attention
from vattn.config import SchedulerConfig
from vattn.engine.blueprint import create_scheduler
from vattn.engine.deadlines import Deadlines
from vattn.engine.detokenize import Finish, IncrementalDetokenizer, StopChecker, TokenText
from vattn.engine.events import EventLog
from vattn.engine.graphs import create_graphs
from vattn.engine.pipeline import InFlight, Pipeline
from vattn.engine.request import Request
from vattn.engine.runner import Runner
from vattn.engine.sampler import Sampler, sampling_failure
from vattn.engine.scheduler import Batch
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.errors import CapacityError, QueueFull, RequestError
from vattn.interrupts import interrupts_held
from vattn.kv.base import KVCache
from vattn.metrics import EngineMetrics
from vattn.models.loader import LoadedModel
from vattn.outputs import RequestMetrics, RequestOutput
from vattn.params import SamplingParams


class Engine:
    """Requests in, outputs out. One thread drives it.

    `overlap`: launch each step before the last one's tokens are known; None: on CUDA.
    `enforce_eager`: no captured graphs; None: graphs on CUDA, with attention that allows it.
    `trace`: where decisions are logged; it stays the caller's.
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
    ) -> None:
        self.loaded = loaded
        self.kv = kv
        self.max_model_len = max_model_len
        self.scheduler = create_scheduler(kv, config)
        self.max_waiting = config.max_waiting
        self.trace = trace or EventLog()
        device = next(loaded.model.parameters()).device
        kernel = create_attention(attention, kv, device)
        graphs = None
        if device.type == "cuda" if enforce_eager is None else not enforce_eager:
            heads = loaded.spec.num_heads
            graphs = create_graphs(loaded.model, kernel, kv, num_heads=heads, max_batch=config.max_num_seqs)
        runner = Runner(loaded.model, kernel, device, graphs)
        self.sampler = Sampler(seed=seed, eos_token_ids=loaded.eos_token_ids)
        self.metrics = EngineMetrics()
        self.pipeline = Pipeline(self.scheduler, kv, runner, self.sampler, self.metrics)
        self.overlap = device.type == "cuda" if overlap is None else overlap
        self._flight: InFlight | None = None
        self._ready: list[RequestOutput] = []
        """Outputs not handed out yet: what a step settled before it failed is reported by the next."""
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._vocabulary = None if loaded.tokenizer is None else TokenText(loaded.tokenizer)

    # ------------------------------------------------------------------ requests come and go
    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError or CapacityError if the engine can't serve this; nothing is changed."""
        length = len(prompt_token_ids)
        if not length:
            raise RequestError("the prompt is empty: it needs at least one token")
        vocab_size = self.loaded.spec.vocab_size
        for position, token in enumerate(prompt_token_ids):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"prompt token {position} is {token}: the model's vocabulary is 0 to {vocab_size - 1}"
                )
        if self._vocabulary is None and (params.stop_strings or params.bad_words):
            raise RequestError("stop strings and bad_words need a tokenizer; the model came without one")
        params.verify(vocab_size, self._bad_words(params))
        if params.n != 1:
            raise RequestError(f"n={params.n}: this engine returns one output per request")
        if length >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {length:,} tokens; with at least one output token it must fit "
                f"max_model_len={self.max_model_len:,}"
            )

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
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
        service: Service = DEFAULT_SERVICE,
    ) -> str:
        """Queue a request; returns its id. `stream`: `step` reports it after each token, not only at the end.

        Raises RequestError or CapacityError (QueueFull: too many wait), and changes nothing, if it is
        refused.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        self.validate(prompt_token_ids, params)
        self.make_room([service])
        room = self.max_model_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        outputs: list[int] = []
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            output_token_ids=outputs,
            params=params,
            sampling=self.sampler.new_state(
                params, prompt_token_ids, outputs, bad_words=self._bad_words(params)
            ),
            stop=StopChecker(
                params,
                IncrementalDetokenizer(self._vocabulary, params, prompt_token_ids),
                max_tokens=max_tokens,
                eos_token_ids=self.loaded.eos_token_ids,
            ),
            arrival=self._arrivals,
            max_tokens=max_tokens,
            metrics=RequestMetrics(time.perf_counter(), num_prompt_tokens=len(prompt_token_ids)),
            stream=stream,
            service=service,
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self.scheduler.add(request)
        if service.timeout_s is not None:
            self._deadlines.add(request, request.metrics.arrival_time + service.timeout_s)
        self.trace.arrive(request)
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its last output, or None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, request.stop.abort())

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def knows(self, request_id: str) -> bool:
        """True until the request's last output is handed out."""
        return request_id in self._requests or any(o.request_id == request_id for o in self._ready)

    @property
    def has_work(self) -> bool:
        awaited = self._flight is not None and any(not r.finished for r in self._flight.sampling)
        return self.scheduler.has_work or awaited or bool(self._ready)

    # ------------------------------------------------------------------ one step
    def step(self) -> list[RequestOutput]:
        """Run one batch; outputs of requests that finished, and of streaming ones that got a token.

        An error of the model or the driver leaves every request where it was before the step.
        """
        with interrupts_held():
            self._expire()
            flight = self._flight
            if flight is not None and flight.must_settle_first:
                self._flight = None
                self._settle(flight)
                flight = None
            batch = self._schedule()
            for request in batch.starved:
                self._ready.append(self._fail(request, _out_of_memory(request)))
            launched = self._launch(batch, flight) if batch.items else None
            self._flight = launched if self.overlap else None
            for settled in (flight, None if self.overlap else launched):
                if settled is not None:
                    self._settle(settled)
            outputs, self._ready = self._ready, []
            return outputs

    def _expire(self) -> None:
        """End the requests whose time is up."""
        for request in self._deadlines.expired(time.perf_counter()):
            request.stop.abort()
            self.metrics.timed_out_requests += 1
            self._ready.append(self._finish(request, Finish("timeout")))

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
        now = time.perf_counter()
        news = self.pipeline.settle(flight)
        self.trace.tokens(news)
        for request, token, logprobs in news:
            failure = sampling_failure(token)
            if failure is not None:
                self._ready.append(self._fail(request, failure))
                continue
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            self.metrics.output_tokens += 1
            finish = request.append(token, logprobs)
            if finish is not None:
                self._ready.append(self._finish(request, finish))
            elif request.stream:
                self._ready.append(self._report(request))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        return self._vocabulary.bad_words(params.bad_words or ()) if self._vocabulary else []

    def _report(self, request: Request) -> RequestOutput:
        return request.output(self._vocabulary.annotate if self._vocabulary is not None else None)

    def _fail(self, request: Request, error: str) -> RequestOutput:
        request.error = error
        request.stop.abort()
        return self._finish(request, Finish("error"))

    def _finish(self, request: Request, finish: Finish) -> RequestOutput:
        request.finish = finish
        request.metrics.finished_time = time.perf_counter()
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        self.metrics.finished_requests += 1
        self.trace.finish(request, finish.reason)
        return self._report(request)


def _out_of_memory(request: Request) -> str:
    return (
        f"no memory for token {request.num_tokens:,} although nothing else runs: the machine, not the "
        "budget, is short of it; lower kv_cache_memory_bytes or free memory"
    )
