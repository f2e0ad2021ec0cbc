"""The load generator: sends requests when they are due and notes when they were answered.

    arrivals ──due──> [ wait for a slot ] ──submit──> target ──advance──> finished ─┐
                            ^ max_concurrency                                        │
        next turn of a session, think time later  <─────────────────────────────────┘

One loop drives it all. A request that falls due while the engine is busy with a step is handed over after
it, but its latencies count from when it was due, as a client of a server would see them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.target import Finished, Target
from vattn.lab.bench.timeline import Timeline
from vattn.lab.bench.workload import WorkloadRequest

OnProgress = Callable[[int, int], None]
"""Called with (requests that ended, requests in all)."""


def drive(
    requests: Sequence[WorkloadRequest],
    arrivals: Arrivals,
    target: Target,
    *,
    max_concurrency: int | None = None,
    barrier: bool = False,
    progress: OnProgress | None = None,
) -> list[Timeline]:
    """Run all requests to their end; timelines are in the order of `requests`.

    `barrier`: static batches of at most `max_concurrency` requests: one starts when the one before is over.
    A request that waits for that has been sent, as one that waits in an engine's queue.
    `max_concurrency`: requests in flight at once (a closed loop when all arrive at once). As in vLLM's
    benchmark a request that waits for its turn has not been sent: its arrival is when it is.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {max_concurrency}")
    if barrier and max_concurrency is None:
        raise ConfigError("static batches need a size: max_concurrency")
    return _Loop(requests, arrivals, target, max_concurrency, barrier, progress).run()


class _Loop:
    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        arrivals: Arrivals,
        target: Target,
        max_concurrency: int | None,
        barrier: bool,
        progress: OnProgress | None,
    ) -> None:
        self.requests = requests
        self.arrivals = arrivals
        self.target = target
        self.progress = progress
        self.timelines: dict[int, Timeline] = {}
        self.running: dict[str, int] = {}
        self.due: list[tuple[float, int]] = []
        """Heap of (seconds after the start, index) of requests that may be sent then."""
        self.slots = None if max_concurrency is None else [0.0] * max_concurrency
        """Heap of when each free slot became free."""
        self.barrier = barrier
        self.ended = 0
        """Of the running batch, requests that hold their slot until the others end."""
        self.turns: dict[str, deque[int]] = {}
        """Per session, its turns that are not due yet."""
        self.spoken: dict[str, list[int]] = {}
        """Per session, all tokens so far."""
        self.start = 0.0

    def run(self) -> list[Timeline]:
        self._plan()
        self.start = self.target.start()
        while self.due or self.running:
            now = self.target.clock() - self.start
            if not (self.barrier and self.running):
                while self.due and self.due[0][0] <= now and self.slots != []:
                    self._send()
            blocked = not self.due or self.slots == [] or (self.barrier and bool(self.running))
            wait = math.inf if blocked else max(0.0, self.due[0][0] - now)
            for finished in self.target.advance(wait):
                self._finish(finished)
                if self.progress is not None:
                    self.progress(len(self.timelines) - len(self.running), len(self.requests))
        return [self.timelines[i] for i in range(len(self.requests))]

    def _plan(self) -> None:
        """Queue everything that waits for nobody's answer."""
        first: list[int] = []
        for index, request in enumerate(self.requests):
            if request.session is None:
                first.append(index)
            elif request.session in self.turns:
                self.turns[request.session].append(index)
            else:
                self.turns[request.session] = deque()
                self.spoken[request.session] = []
                first.append(index)
        if self.arrivals.kind == "trace":
            times = [self._traced(index) for index in first]
        else:
            times = self.arrivals.times(len(first))
        self.due = list(zip(times, first, strict=True))
        heapq.heapify(self.due)

    def _traced(self, index: int) -> float:
        arrival = self.requests[index].arrival_s
        if arrival is None:
            raise ConfigError("trace arrivals need a workload with arrival times; this one has none")
        return arrival * self.arrivals.time_scale

    def _send(self) -> None:
        due, index = heapq.heappop(self.due)
        request = self.requests[index]
        arrival = due
        if self.slots is not None:
            free = heapq.heappop(self.slots)
            # Waiting for a batch to end is the engine's doing, waiting to send the client's.
            arrival = due if self.barrier else max(due, free)
        prompt = request.prompt_token_ids
        if request.session is not None:
            prompt = self.spoken[request.session] = self.spoken[request.session] + prompt
        request_id = str(index)
        self.timelines[index] = Timeline(request_id, arrival, len(prompt))
        self.running[request_id] = index
        self.target.submit(request_id, prompt, request.output_len, request.n, request.beams)

    def _finish(self, finished: Finished) -> None:
        index = self.running.pop(finished.request_id)
        timeline = self.timelines[index]
        timeline.token_times = [[t - self.start for t in times] for times in finished.token_times]
        last = max((times[-1] for times in timeline.token_times if times), default=None)
        timeline.finished_s = last if last is not None else self.target.clock() - self.start
        if finished.first_scheduled is not None:
            timeline.first_scheduled_s = finished.first_scheduled - self.start
        timeline.token_ids = finished.token_ids
        timeline.cached_tokens = finished.cached_tokens
        timeline.preemptions = finished.preemptions
        timeline.finish_reason, timeline.error = finished.finish_reason, finished.error
        self._give_back_slot(timeline.finished_s)
        session = self.requests[index].session
        if session is not None:
            self._next_turn(session, finished, timeline.finished_s)

    def _give_back_slot(self, now: float) -> None:
        if self.slots is None:
            return
        if not self.barrier:
            heapq.heappush(self.slots, now)
            return
        self.ended += 1
        if not self.running:
            self.slots += [now] * self.ended
            heapq.heapify(self.slots)
            self.ended = 0

    def _next_turn(self, session: str, finished: Finished, answered_s: float) -> None:
        """The turn after an answer becomes due; after a failure the session ends."""
        waiting = self.turns[session]
        if finished.error is not None:
            for index in waiting:
                lost = Timeline(str(index), answered_s, 0, error="a turn before it failed")
                self.timelines[index] = lost
            waiting.clear()
        if waiting:
            self.spoken[session] = self.spoken[session] + finished.token_ids
            index = waiting.popleft()
            due = answered_s + self.requests[index].think_s
            if self.arrivals.kind == "trace":
                due = max(due, self._traced(index))
            heapq.heappush(self.due, (due, index))
