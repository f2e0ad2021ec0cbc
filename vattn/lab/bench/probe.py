"""Watch an engine from inside: a pipeline that writes down every step and every token."""

from __future__ import annotations

from time import perf_counter

from vattn.engine.engine import Engine
from vattn.engine.pipeline import InFlight, NewToken, Pipeline
from vattn.engine.scheduler import Batch
from vattn.lab.bench.kernel_time import TimedAttention
from vattn.lab.bench.steps import StepLog
from vattn.outputs import RequestOutput


class Probe(Pipeline):
    """Stands in for an engine's pipeline, does the same, and keeps the books.

    `start` is the moment, on `perf_counter`'s clock, that the log's times count from.
    """

    def __init__(self, engine: Engine, start: float) -> None:
        inner = engine.pipeline
        super().__init__(inner.scheduler, inner.kv, inner.runner, inner.sampler, inner.metrics)
        self.start = start
        self.log = StepLog()
        self.token_times: dict[str, list[float]] = {}
        """By request, when each of its tokens was known to the host, on `perf_counter`'s clock."""
        self.recomputed_tokens = 0
        """Tokens computed although they had been before: the price of preemption."""
        self._furthest: dict[str, int] = {}
        self._preemptions = inner.scheduler.num_preemptions
        self._stall = inner.kv.stats().map_stall_seconds
        self._attention = TimedAttention(self.runner.attention, self.runner.device)
        self.runner.attention = self._attention
        engine.pipeline = self

    def launch(self, batch: Batch, previous: InFlight | None) -> InFlight:
        begun = perf_counter()
        chunks = [(item.request.request_id, item.request.num_computed, item.length) for item in batch.items]
        decodes = sum(item.length == 1 and item.samples for item in batch.items)
        self._attention.step = len(self.log)
        flight = super().launch(batch, previous)
        for request_id, first, length in chunks:
            furthest = self._furthest.get(request_id, 0)
            self.recomputed_tokens += max(0, min(first + length, furthest) - first)
            self._furthest[request_id] = max(furthest, first + length)
        stall, preemptions = self.kv.stats().map_stall_seconds, self.scheduler.num_preemptions
        self.log.add(
            time_s=begun - self.start,
            tokens=batch.num_tokens,
            decodes=decodes,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            usage=self.kv.usage(),
            preemptions=preemptions - self._preemptions,
            map_stall_s=stall - self._stall,
        )
        self._stall, self._preemptions = stall, preemptions
        return flight

    def settle(self, flight: InFlight) -> list[NewToken]:
        news = super().settle(flight)
        now = perf_counter()
        for new in news:
            if new.token >= 0:
                self.token_times.setdefault(new.request.request_id, []).append(now)
        return news

    def times_of(self, output: RequestOutput) -> list[list[float]]:
        """When the tokens of each of a finished request's outputs came. Branch k of request r is `r#k`."""
        first, count = output.request_id, len(output.outputs)
        return [self.token_times.pop(f"{first}#{k}" if k else first, []) for k in range(count)]

    def finish(self) -> StepLog:
        """The complete log, kernel times included."""
        self._attention.report(self.log.attended)
        return self.log
