"""The real engine on a virtual clock: real scheduler, real cache, a priced forward pass.

Source ── requests that are due ──> Engine.step ──> PricedExecutor   moves the clock
  ^                                   │    └──────> StepRows         writes the step's row
  └─────── requests that ended ───────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vattn.engine.engine import Engine
from vattn.engine.listener import StepListener
from vattn.engine.scheduler import Batch
from vattn.lab.simulator.executor import PricedExecutor
from vattn.lab.simulator.record import StepColumns
from vattn.lab.simulator.request import SimulatedRequest
from vattn.lab.simulator.skip import DecodeRun
from vattn.lab.simulator.source import Source


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


class StepRows(StepListener):
    """Writes one row for each step, and tells requests which steps gave them a token."""

    def __init__(self, engine: Engine, executor: PricedExecutor) -> None:
        self.columns = StepColumns()
        self.batch: Batch | None = None
        """Of the last step; None: it had nothing to launch."""
        self._engine = engine
        self._executor = executor

    def step_begins(self) -> None:
        self.batch = None

    def launched(self, batch: Batch) -> None:
        self.batch = batch
        number, before = len(self.columns), len(self.columns) - 1
        for request, _ in batch.items:
            if request.num_remaining != 1 or request.pending_row is None:
                continue  # it has more of its prompt to compute
            assert isinstance(request, SimulatedRequest)
            if request.last_step == before:
                request.last_step = number
            else:
                request.emitted(number)
        step, scheduler = self._executor.last, self._engine.scheduler
        self.columns.add(
            step.start,
            step.cost.duration,
            step.cost.stall,
            step.work,
            self._engine.kv.usage(),
            len(scheduler.running),
            len(scheduler.waiting),
            len(batch.preempted),
        )


class Simulator:
    """Runs the requests of `source` to their ends.

    `skip`: advance runs of equal decode steps at once; the outcome is the same.
    """

    def __init__(
        self, engine: Engine, executor: PricedExecutor, source: Source, *, skip: bool = True
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.source = source
        self.skip = skip
        self.skipped_steps = 0
        self.rows = StepRows(engine, executor)
        engine.listeners.append(self.rows)

    def run(self, progress: Callable[[int], None] | None = None) -> Outcome:
        """Run to the end; `progress` is told the number of requests sent now and then."""
        engine, executor, source, columns = self.engine, self.executor, self.source, self.rows.columns
        while source.next_due < math.inf or engine.has_work:
            if not engine.has_work:
                executor.wait(source.next_due)
            while source.next_due <= executor.now:
                engine.enqueue([source.send()])
            for delta in engine.step():
                if delta.finished:
                    self._ended(source.request(delta.request_id))
            if self.skip and self.rows.batch is not None and self._steady(self.rows.batch):
                self._run_ahead()
            if progress is not None and not len(columns) & 255:
                progress(len(source.sent))
        return Outcome(source.sent, columns, executor.busy_until, self.skipped_steps)

    def _ended(self, request: SimulatedRequest) -> None:
        request.metrics.num_output_tokens = request.known - request.prompt_len
        self.source.ended(request, request.metrics.finished_time or 0.0)
        request.release_tokens()

    # ------------------------------------------------------------------ runs of equal steps
    def _steady(self, batch: Batch) -> bool:
        """True when the next step can only decode the same requests again, until something happens.

        All of them decode; nobody gave way; and who waits can't be let in before somebody leaves: the
        queue is empty, or every place is taken. Where prefixes are shared each step may enter some.
        """
        scheduler = self.engine.scheduler
        return (
            not self.engine.kv.shares_prefixes
            and not batch.preempted
            and not batch.starved
            and len(batch.items) == len(scheduler.running) > 0
            and (not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_seqs)
            and all(length == 1 for _, length in batch.items)
        )

    def _run_ahead(self) -> None:
        """Make steps like the last one for as long as nothing else can happen."""
        executor, scheduler, overlap = self.executor, self.engine.scheduler, self.engine.overlap
        run = DecodeRun(self.engine.kv, scheduler.running)  # type: ignore[arg-type]
        if not run.worthwhile:
            return
        count, waiting = len(run.requests), len(scheduler.waiting)
        decode_kv = sum(r.num_tokens for r in run.requests)
        arrival, flight = self.source.next_due, executor.last
        while arrival > executor.now:
            usage = run.step()
            if usage is None:
                break
            step = executor.decode(count, decode_kv, overlap=overlap)
            self.rows.columns.add(
                step.start, step.cost.duration, step.cost.stall, step.work, usage, count, waiting, 0
            )
            decode_kv += count
        run.finish()
        # With overlap the engine has the last step in flight: it now is the last one of the run.
        flight.start, flight.work, flight.cost = executor.last.start, executor.last.work, executor.last.cost
        executor.last = flight
        scheduler.clock += run.done * count
        self.skipped_steps += run.done
