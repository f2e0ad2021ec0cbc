"""Steps that take no time but know how long they would take: the simulator's executor.

launch    StepWork of the batch -> CostModel -> the device is busy for so long
collect   the clock moves on to the end of that step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vattn.engine.executor import Executor, StepResult
from vattn.engine.scheduler import Scheduled
from vattn.lab.simulator.cost import CostModel, StepCost
from vattn.lab.simulator.work import StepWork, chunk_pairs


@dataclass(slots=True)
class PricedStep:
    """A launched step. Seconds of the virtual clock."""

    start: float
    work: StepWork
    cost: StepCost

    @property
    def end(self) -> float:
        return self.start + self.cost.duration


class PricedExecutor(Executor):
    """Prices steps instead of running them.

    `calls`: seconds of driver calls since it was last asked; None: the cache makes none.
    """

    def __init__(self, cost: CostModel, calls: Callable[[], float] | None = None) -> None:
        self.now = 0.0
        """What the host's clock shows: with overlap it is one step ahead of the device."""
        self.busy_until = 0.0
        """When the device is done with all that was launched."""
        self.last = PricedStep(0.0, StepWork(0, 0, 0, 0, 0, 0, 0, 0.0), StepCost(0.0, 0.0))
        """The step launched last."""
        self._cost = cost
        self._calls = calls or (lambda: 0.0)

    def clock(self) -> float:
        return self.now

    def wait(self, until: float) -> None:
        """Nothing is to be done before `until`."""
        self.now = max(self.now, until)

    def launch(self, items: Sequence[Scheduled], behind: PricedStep | None) -> PricedStep:
        tokens = chunks = sampled = decode_kv = prefill_kv = pairs = 0
        for request, length in items:
            remaining, start = request.num_remaining, request.num_computed
            tokens += length
            sampled += length == remaining
            if length == 1:
                decode_kv += start + 1
            else:
                chunks += 1
                prefill_kv += start + length
                pairs += chunk_pairs(start, length)
        decodes, requests = len(items) - chunks, len(items)
        work = StepWork(tokens, decodes, sampled, decode_kv, prefill_kv, pairs, requests, self._calls())
        step = self.run(work)
        if not sampled and (behind is None or not behind.work.sampled):
            self.now = step.end  # nobody waits for such a step: the host must not run away from the device
        return step

    def run(self, work: StepWork) -> PricedStep:
        """Let the device begin a step as soon as it is free."""
        start = max(self.busy_until, self.now)
        self.last = step = PricedStep(start, work, self._cost.step(work))
        self.busy_until = step.end
        return step

    def decode(self, requests: int, kv_tokens: int, *, overlap: bool) -> PricedStep:
        """Launch and collect another step that decodes the same `requests`, which read `kv_tokens`."""
        before = self.busy_until
        work = StepWork(requests, requests, requests, kv_tokens, 0, 0, requests, self._calls())
        step = self.run(work)
        self.now = before if overlap else step.end
        return step

    def collect(self, handle: PricedStep) -> StepResult:
        self.wait(handle.end)
        return StepResult([0] * handle.work.sampled)
