"""The engine's loop on a virtual clock: the real scheduler, the real cache, a priced forward pass.

arrivals due -> Scheduler.schedule() -> Batch -> CostModel.step() -> clock
                      |                    |
                   KVCache            requests advance, finish
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vattn.engine.request import RequestStatus
from vattn.engine.scheduler import Batch, Scheduler
from vattn.kv.base import KVCache
from vattn.lab.simulator.cost import CostModel
from vattn.lab.simulator.record import StepColumns
from vattn.lab.simulator.request import SimulatedRequest
from vattn.lab.simulator.skip import DecodeRun
from vattn.lab.simulator.source import Source
from vattn.lab.simulator.work import StepWork, chunk_pairs


@dataclass(frozen=True)
class Outcome:
    """A finished simulation."""

    requests: list[SimulatedRequest]
    """In the order in which they were sent."""
    steps: StepColumns
    seconds: float
    """Virtual time from the start to the last token."""
    skipped_steps: int
    """Steps advanced without asking the scheduler, which could not have chosen otherwise."""


class Simulator:
    """Runs the requests of `source` to their ends.

    `overlap`: as in the engine, a step is launched before the last one's tokens are known. `skip`: advance
    runs of equal decode steps at once; the outcome is the same. `calls`: seconds of driver calls since it
    was last asked; None: the cache makes none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCache,
        cost: CostModel,
        source: Source,
        *,
        overlap: bool = False,
        skip: bool = True,
        calls: Callable[[], float] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.cost = cost
        self.source = source
        self.overlap = overlap
        self.skip = skip
        self.steps = StepColumns()
        self.clock = 0.0
        """When the device is done with all that was launched."""
        self.skipped_steps = 0
        self._calls = calls or (lambda: 0.0)
        self._free_at = 0.0
        """When the host may schedule again: with overlap one step before the device is done."""
        self._flight: list[SimulatedRequest] = []
        self._flight_ends = 0.0

    # ------------------------------------------------------------------ the loop
    def run(self, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run to the end; `progress` is told the number of requests sent now and then."""
        source, scheduler = self.source, self.scheduler
        while source.next_due < math.inf or scheduler.has_work or self._flight:
            if not scheduler.has_work and not self._flight:
                self.clock = self._free_at = max(self._free_at, source.next_due)
            while source.next_due <= self._free_at:
                scheduler.add(source.send())
            batch = scheduler.schedule()
            self._step(batch)
            if self.skip and self._steady(batch):
                self._run_ahead()
            if progress is not None and not len(self.steps) & 255:
                progress(len(source.sent))
        return Outcome(source.sent, self.steps, self.clock, self.skipped_steps)

    def _step(self, batch: Batch) -> None:
        for request in batch.starved:
            request.error = "no memory although nothing else runs"
            self._finish(request, self._free_at)  # type: ignore[arg-type]
        previous, ends = self._flight, self._flight_ends
        self._flight = []
        if batch.items:
            self._launch(batch)
        if not self.overlap:
            previous, self._flight, ends = self._flight, [], self.clock
        self._settle(previous, ends)
        self._free_at = ends if self.overlap and previous else self.clock
        if self.overlap and self._flight and not previous:
            self._free_at = self.steps.time_s[-1]  # nothing to wait for: the next step may be prepared

    def _launch(self, batch: Batch) -> None:
        """Price a batch, write its row, and let its requests have computed it."""
        start = max(self.clock, self._free_at)
        usage = self.kv.usage()
        step, overlap = len(self.steps), self.overlap
        tokens = chunks = decode_kv = prefill_kv = pairs = 0
        sampling, shares = self._flight, self.kv.shares_prefixes
        for request, length in batch.items:
            end = request.num_computed + length
            tokens += length
            if length == 1:
                decode_kv += end
            else:
                chunks += 1
                prefill_kv += end
                pairs += chunk_pairs(end - length, length)
            request.num_computed = end
            if shares:
                self.kv.computed(request.request_id, request.token_ids, end)
            if end == request.known + request.pending:  # type: ignore[attr-defined]
                sampling.append(request)  # type: ignore[arg-type]
                request.pending += 1  # type: ignore[attr-defined]
                if overlap:
                    request.pending_row = 0
                if request.last_step != step - 1:  # type: ignore[attr-defined]
                    request.emitted(step)  # type: ignore[attr-defined]
                else:
                    request.last_step = step  # type: ignore[attr-defined]
        for request, _ in batch.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = start
        work = StepWork(
            tokens,
            len(batch.items) - chunks,
            len(sampling),
            decode_kv,
            prefill_kv,
            pairs,
            len(batch.items),
            self._calls(),
        )
        cost = self.cost.step(work)
        scheduler = self.scheduler
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        self.steps.add(start, cost.duration, cost.stall, work, usage, running, waiting, len(batch.preempted))
        self.clock = self._flight_ends = start + cost.duration

    def _settle(self, requests: Sequence[SimulatedRequest], now: float) -> None:
        """The tokens of a step are known at `now`."""
        finished = RequestStatus.FINISHED
        for request in requests:
            if request.status is finished:
                continue
            request.settle()
            if request.known == request.prompt_len + 1:
                request.metrics.first_token_time = now
            if request.known == request.total:
                self._finish(request, now)

    def _finish(self, request: SimulatedRequest, now: float) -> None:
        request.metrics.finished_time = now
        request.metrics.num_output_tokens = request.known - request.prompt_len
        self.scheduler.finish(request)
        self.source.ended(request, now)
        request.release_tokens()

    # ------------------------------------------------------------------ runs of equal steps
    def _steady(self, batch: Batch) -> bool:
        """True when the next step can only decode the same requests again, until something happens.

        All of them decode; nobody gave way; and who waits can't be let in before somebody leaves: the
        queue is empty, or every place is taken. Where prefixes are shared each step may enter some.
        """
        scheduler = self.scheduler
        return (
            not self.kv.shares_prefixes
            and not batch.preempted
            and not batch.starved
            and len(batch.items) == len(scheduler.running) > 0
            and (not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_seqs)
            and all(length == 1 for _, length in batch.items)
        )

    def _run_ahead(self) -> None:
        """Make steps like the last one for as long as nothing else can happen."""
        columns, scheduler = self.steps, self.scheduler
        run = DecodeRun(self.kv, scheduler.running)  # type: ignore[arg-type]
        if not run.worthwhile:
            return
        count, waiting = len(run.requests), len(scheduler.waiting)
        decode_kv = sum(r.num_tokens for r in run.requests)
        arrival = self.source.next_due
        while arrival > self._free_at:
            usage = run.step()
            if usage is None:
                break
            start, ends = max(self.clock, self._free_at), self._flight_ends
            work = StepWork(count, count, count, decode_kv, 0, 0, count, self._calls())
            cost = self.cost.step(work)
            columns.add(start, cost.duration, cost.stall, work, usage, count, waiting, 0)
            self.clock = self._flight_ends = start + cost.duration
            self._free_at = ends if self.overlap else self.clock
            decode_kv += count
        run.finish()
        scheduler.clock += run.done * count
        self.skipped_steps += run.done
