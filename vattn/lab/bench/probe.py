"""Look into an engine while it works: a listener that writes down every step."""

from __future__ import annotations

from time import perf_counter

from vattn.engine.listener import StepListener
from vattn.engine.scheduler import Batch
from vattn.lab.bench.kernel_time import AttentionTimer
from vattn.lab.bench.steps import StepLog
from vattn.llm import LLM


class Probe(StepListener):
    """Listens to an engine from `start`, a moment on `perf_counter`'s clock, until `finish`."""

    def __init__(self, llm: LLM, start: float) -> None:
        engine = llm.engine
        self.start = start
        self.log = StepLog()
        self.recomputed_tokens = 0
        """Tokens computed although they had been before: the price of preemption."""
        self._scheduler, self._kv = engine.scheduler, engine.kv
        self._furthest: dict[str, int] = {}
        self._preemptions = engine.scheduler.num_preemptions
        self._stall = engine.kv.stats().map_stall_seconds
        self._runner = llm.runner
        self._timer = AttentionTimer(self._runner.device)
        self._runner.timer = self._timer
        self._begun = self._entered = 0.0
        self._stop = llm.listen(self)

    def step_begins(self) -> None:
        self._entered = perf_counter()

    def scheduled(self, batch: Batch) -> None:
        self._begun = perf_counter()
        self._timer.step = len(self.log)
        for request, length in batch.items:
            first = request.num_computed
            furthest = self._furthest.get(request.request_id, 0)
            self.recomputed_tokens += max(0, min(first + length, furthest) - first)
            self._furthest[request.request_id] = max(furthest, first + length)
        self._decodes = sum(item.length == 1 and item.samples for item in batch.items)

    def launched(self, batch: Batch) -> None:
        stall, preemptions = self._kv.stats().map_stall_seconds, self._scheduler.num_preemptions
        self.log.add(
            time_s=self._begun - self.start,
            tokens=batch.num_tokens,
            decodes=self._decodes,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            usage=self._kv.usage(),
            preemptions=preemptions - self._preemptions,
            map_stall_s=stall - self._stall,
        )
        self._stall, self._preemptions = stall, preemptions

    def step_ended(self, failed: bool) -> None:
        self.log.took(perf_counter() - self._entered)

    def finish(self) -> StepLog:
        """The complete log, kernel times included."""
        self._stop()
        self._runner.timer = None
        self._timer.report(self.log.attended)
        return self.log
