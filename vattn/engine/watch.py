"""Samples a few of an engine's counters four times a second, to compute recent rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vattn.engine.length_histogram import LengthHistogram
from vattn.engine.listener import StepListener

if TYPE_CHECKING:
    from vattn.engine.request import Request
    from vattn.engine.scheduler import Scheduler
    from vattn.kv.base import KVCache
    from vattn.metrics import EngineMetrics

PERIOD_S = 0.25
WINDOW_S = 10.0
"""Rates cover this many seconds, or the time since the start if that is shorter."""


class Counters(NamedTuple):
    """Totals at one moment. Times are in seconds on one monotonic clock."""

    time: float
    busy_seconds: float = 0.0
    """Seconds spent in steps."""
    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    map_stall_seconds: float = 0.0
    swap_bytes: int = 0


class Watch(StepListener):
    """Samples an engine's counters while it steps."""

    def __init__(
        self,
        metrics: EngineMetrics,
        scheduler: Scheduler,
        kv: KVCache,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._kv = kv
        self._clock = clock
        self._busy = 0.0
        self._entered = 0.0
        self._samples = deque([Counters(clock())])
        self.prompts = LengthHistogram()
        self.outputs = LengthHistogram()
        self.totals = LengthHistogram()

    def step_begins(self) -> None:
        self._entered = self._clock()

    def step_ended(self, failed: bool) -> None:
        now = self._clock()
        self._busy += now - self._entered
        if now - self._samples[-1].time >= PERIOD_S:
            self._samples.append(self._counters(now))
            while len(self._samples) > 2 and self._samples[1].time <= now - WINDOW_S:
                self._samples.popleft()

    def finished(self, request: Request) -> None:
        """Count a request that ended. Each branch, and the winner of a beam search, counts as one."""
        prompt, output = len(request.prompt_token_ids), len(request.output_token_ids)
        self.prompts.add(prompt)
        self.outputs.add(output)
        self.totals.add(prompt + output)

    def _counters(self, now: float) -> Counters:
        metrics, stats = self._metrics, self._kv.stats()
        return Counters(
            time=now,
            busy_seconds=self._busy,
            steps=metrics.steps,
            computed_tokens=metrics.computed_tokens,
            output_tokens=metrics.output_tokens,
            finished_requests=metrics.finished_requests,
            preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            map_stall_seconds=stats.map_stall_seconds,
            swap_bytes=stats.swap_out_bytes + stats.swap_in_bytes,
        )

    def rates(self) -> dict[str, float | None]:
        """Rates per second over the last `WINDOW_S` seconds. A share is None if nothing happened.

        - `window_s`: seconds covered; `busy_share`: the share of them spent in steps.
        - `prefix_hit_rate`: the share of looked-up prompt tokens that were found.
        - `map_stall_share`: the share of the time in steps spent waiting for pages to be mapped.
        """
        now = self._counters(self._clock())
        past = self._samples[0]
        for sample in self._samples:
            if sample.time <= now.time - WINDOW_S:
                past = sample
        # There are no samples while nothing runs, so the last sample may be old.
        seconds = min(now.time - past.time, WINDOW_S + PERIOD_S)
        busy = min(now.busy_seconds - past.busy_seconds, seconds)
        asked = now.prefix_query_tokens - past.prefix_query_tokens

        def per_second(name: str) -> float:
            change: float = getattr(now, name) - getattr(past, name)
            return change / seconds if seconds > 0 else 0.0

        return {
            "window_s": seconds,
            "busy_share": busy / seconds if seconds > 0 else None,
            "steps_per_s": per_second("steps"),
            "tokens_per_s": per_second("computed_tokens"),
            "output_tokens_per_s": per_second("output_tokens"),
            "finished_requests_per_s": per_second("finished_requests"),
            "preemptions_per_s": per_second("preemptions"),
            "swap_bytes_per_s": per_second("swap_bytes"),
            "prefix_hit_rate": (now.prefix_hit_tokens - past.prefix_hit_tokens) / asked if asked else None,
            "map_stall_share": (now.map_stall_seconds - past.map_stall_seconds) / busy if busy > 0 else None,
        }

    def lengths(self) -> dict[str, Any]:
        """Length histograms of requests that ended with `stop` or `length`."""
        return {
            "prompt": self.prompts.to_list(),
            "output": self.outputs.to_list(),
            "total": self.totals.to_list(),
        }
