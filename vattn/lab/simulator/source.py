"""Who sends what when, on the virtual clock; the rules of `vattn.lab.bench.load`.

due ──> [ wait for a slot: max_concurrency ] ──> SimulatedRequest ──> engine
 ^ next turn of a session, think time after the answer <────────────────┘
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.trace import TraceWorkload
from vattn.lab.bench.workload import RandomWorkload, Workload
from vattn.lab.simulator.request import SimulatedRequest


class Plan(NamedTuple):
    """A request to be sent. `prompt` None: tokens that no other request has."""

    prompt_len: int
    output_len: int
    prompt: list[int] | None = None
    session: str | None = None
    think_s: float = 0.0
    arrival_s: float | None = None


def plan(workload: Workload, vocab_size: int) -> list[Plan]:
    """The workload's requests; without token ids where no two prompts can share any.

    Raises ConfigError for several outputs of one prompt, which are not simulated.
    """
    if isinstance(workload, RandomWorkload):
        rng = np.random.default_rng(workload.seed)
        prompts = workload.prompt_lengths.draw(rng, workload.requests)
        outputs = workload.output_lengths.draw(rng, workload.requests)
        return [Plan(p, o) for p, o in zip(prompts, outputs, strict=True)]
    if isinstance(workload, TraceWorkload) and not any(r.session or r.hash_ids for r in workload.rows):
        return [Plan(r.prompt_len, r.output_len, arrival_s=r.arrival_s) for r in workload.rows]
    plans = []
    for r in workload.generate(vocab_size):
        if r.n != 1:
            raise ConfigError(f"a request wants n={r.n} outputs: the simulator gives one each")
        plans.append(
            Plan(len(r.prompt_token_ids), r.output_len, r.prompt_token_ids, r.session, r.think_s, r.arrival_s)
        )
    return plans


class Source:
    """Requests of `plans`, sent as `arrivals` say; at most `max_concurrency` of them unanswered."""

    def __init__(
        self,
        plans: Sequence[Plan],
        arrivals: Arrivals,
        max_concurrency: int | None = None,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {max_concurrency}")
        self.plans = plans
        self.arrivals = arrivals
        self.shares_prefixes = shares_prefixes
        self.sent: list[SimulatedRequest] = []
        self._slots = None if max_concurrency is None else [0.0] * max_concurrency
        self._turns: dict[str, deque[int]] = {}
        self._spoken: dict[str, list[int]] = {}
        first: list[int] = []
        for index, request in enumerate(plans):
            if request.session is None:
                first.append(index)
            elif request.session in self._turns:
                self._turns[request.session].append(index)
            else:
                self._turns[request.session] = deque()
                self._spoken[request.session] = []
                first.append(index)
        traced = arrivals.kind == "trace"
        times = [self._traced(i) for i in first] if traced else arrivals.times(len(first))
        self._due = list(zip(times, first, strict=True))
        heapq.heapify(self._due)

    def _traced(self, index: int) -> float:
        arrival = self.plans[index].arrival_s
        if arrival is None:
            raise ConfigError("trace arrivals need a workload with arrival times; this one has none")
        return arrival * self.arrivals.time_scale

    @property
    def next_due(self) -> float:
        """When the next request can be sent; infinity: not before somebody is answered, or never."""
        return self._due[0][0] if self._due and self._slots != [] else math.inf

    def send(self) -> SimulatedRequest:
        """The request that is due next."""
        due, index = heapq.heappop(self._due)
        arrival = due if self._slots is None else max(due, heapq.heappop(self._slots))
        _, output_len, prompt, session, _, _ = self.plans[index]
        length = self.plans[index].prompt_len
        if session is not None and prompt is not None:
            prompt = self._spoken[session] = self._spoken[session] + prompt
            length = len(prompt)
        request = SimulatedRequest(
            len(self.sent), length, output_len, arrival, prompt, shares=self.shares_prefixes
        )
        request.plan = index
        self.sent.append(request)
        return request

    def request(self, request_id: str) -> SimulatedRequest:
        """The request of that id, which was sent."""
        return self.sent[int(request_id.removeprefix("r"))]

    def ended(self, request: SimulatedRequest, now: float) -> None:
        """A request was answered (or failed) at `now`: its slot is free and its session goes on."""
        if self._slots is not None:
            heapq.heappush(self._slots, now)
        session = self.plans[request.plan].session
        if session is None:
            return
        turns = self._turns[session]
        if request.error is not None:
            turns.clear()  # after a failure the session ends
        if turns:
            self._spoken[session] = list(request.token_ids)
            index = turns.popleft()
            due = now + self.plans[index].think_s
            if self.arrivals.kind == "trace":
                due = max(due, self._traced(index))
            heapq.heappush(self._due, (due, index))
