"""One step's way through the machine: launched, in flight, settled.

    launch   schedule, plan memory, run the model, sample; tokens stay on the device
    settle   wait for the tokens, enter them into their requests

With overlap the host launches step n + 1 before it settles step n. A request then runs with a token the
host does not know yet (`pending`): its place is known, its value comes from step n's tokens on the device.

    device   | step n     | step n + 1 | step n + 2 |
    host       launch n+1 ┘ settle n  launch n+2 ┘ settle n+1 …
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.engine.batch import PackedBatch, pack
from vattn.engine.groups import BeamGroup
from vattn.engine.request import Request
from vattn.engine.runner import Runner
from vattn.engine.scheduler import Batch, Scheduler
from vattn.kv.base import KVCache
from vattn.metrics import EngineMetrics
from vattn.outputs import TokenLogprobs
from vattn.sampling.beam import Candidate, best_candidates
from vattn.sampling.sampler import SampledTokens, Sampler, prompt_logprobs


@dataclass(frozen=True)
class InFlight:
    """A launched step."""

    packed: PackedBatch
    sampling: list[Request]
    """Requests that get a token, in order of `sampled`."""
    sampled: SampledTokens | None
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]
    beams: dict[Request, list[Candidate]]
    """What may follow the beams among `sampling`."""
    started: float
    """Seconds, of the host's clock."""
    decodes: int
    prompt_tokens: int
    failure: Exception | None = None
    """What went wrong behind it; to be raised when its tokens are safe."""

    @property
    def must_settle_first(self) -> bool:
        """True when what is scheduled next depends on this step's tokens, not only on its KV."""
        return bool(self.beams) or any(request.sampling.edited for request in self.sampling)


class NewToken(NamedTuple):
    """What one request got from a settled step."""

    request: Request
    token: int
    """Negative: none; see `sampling_failure`."""
    logprobs: TokenLogprobs | None


class Pipeline:
    """Scheduler, cache, model and sampler, joined."""

    def __init__(
        self, scheduler: Scheduler, kv: KVCache, runner: Runner, sampler: Sampler, metrics: EngineMetrics
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.runner = runner
        self.sampler = sampler
        self.metrics = metrics
        self._settled = 0.0
        """When the last step was over."""

    def launch(self, batch: Batch, previous: InFlight | None) -> InFlight:
        """Run a batch behind `previous`, whose tokens may still be on their way.

        If the model, the sampler or the driver fails, every request is where it was before.
        """
        now = time.perf_counter()
        inputs = self.kv.begin_step([item.chunk for item in batch.items])
        packed = pack(batch.items)
        tokens = previous.sampled.token_ids if previous is not None and previous.sampled else None
        logits = self.runner.run(packed, inputs, tokens)
        prompts = [
            (
                rows.request,
                prompt_logprobs(
                    logits[rows.rows],
                    rows.next_token_ids,
                    rows.request.params.prompt_logprobs or 0,
                    start=rows.start,
                ),
            )
            for rows in packed.prompt_rows
        ]
        sampling = [item.request for item in batch.items if item.samples]
        sampled = None
        beams: dict[Request, list[Candidate]] = {}
        if sampling:
            rows = logits if len(sampling) == logits.shape[0] else logits[packed.sample_rows]
            sampled = self.sampler.sample(rows, [request.sampling for request in sampling])
            beams = _beam_candidates(rows, sampling)
        self.kv.submitted(self.runner.record_event())
        self.metrics.observe_step(batch.num_tokens, len(self.scheduler.running), self.kv.usage())
        self.metrics.preemptions = self.scheduler.num_preemptions
        self.metrics.swapped_requests = self.scheduler.preemption.swaps
        self.metrics.recomputed_tokens = self.scheduler.preemption.recomputed_tokens

        for request, length in batch.items:
            request.num_computed += length
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        for row, request in enumerate(sampling):
            request.add_pending(row)
        failure = self._tell_computed([item.request for item in batch.items])
        decodes = sum(length == 1 for _, length in batch.items)
        prompt_tokens = batch.num_tokens - decodes
        return InFlight(packed, sampling, sampled, prompts, beams, now, decodes, prompt_tokens, failure)

    def _tell_computed(self, requests: Sequence[Request]) -> Exception | None:
        """Tell the cache what is written. The first error: the step has happened all the same.

        What the cache was not told now it is told with the request's next tokens.
        """
        failure: Exception | None = None
        for request in requests:
            try:
                self.kv.computed(request.request_id, request.token_ids, request.num_computed)
            except Exception as error:
                failure = failure or error
        return failure

    def settle(self, flight: InFlight) -> list[NewToken]:
        """Wait for a step's tokens; those of requests that ended meanwhile are dropped."""
        for request, entries in flight.prompt_logprobs:
            request.prompt_logprobs += entries
        tokens = [] if flight.sampled is None else flight.sampled.token_ids.tolist()
        self._time(flight)
        if flight.sampled is None:
            return []
        logprobs = flight.sampled.logprobs or [None] * len(tokens)
        news = []
        for request, token, entry in zip(flight.sampling, tokens, logprobs, strict=True):
            if not request.finished:
                request.settle_pending()
                news.append(NewToken(request, token, entry))
        return news

    def _time(self, flight: InFlight) -> None:
        """Learn from a step that is over; behind another one it began when that ended."""
        now = time.perf_counter()
        seconds = now - max(flight.started, self._settled)
        self._settled = now
        if flight.sampled is not None or self.runner.device.type == "cpu":  # else nobody waited for it
            self.scheduler.preemption.speed.observe(flight.decodes, flight.prompt_tokens, seconds)


def _beam_candidates(logits: Tensor, sampling: Sequence[Request]) -> dict[Request, list[Candidate]]:
    """What may follow each beam, best first, as many as its search looks at."""
    found = [(row, r, r.group.search) for row, r in enumerate(sampling) if isinstance(r.group, BeamGroup)]
    if not found:
        return {}
    rows = torch.tensor([row for row, _, _ in found], device=logits.device)
    most = max(search.keep for _, _, search in found)
    best = best_candidates(logits[rows], most, [search.params.temperature or 1.0 for _, _, search in found])
    return {r: row[: search.keep] for (_, r, search), row in zip(found, best, strict=True)}
