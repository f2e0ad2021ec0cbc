"""Replay an event log: drive the real scheduler and a real cache, and compare every decision.

    log     arrive ─ step ─ tokens ─ finish ─ …        what came from outside is done again,
    replay    add  ─ schedule() ─ append ─ finish      what the scheduler decides is compared

The cache runs on the accounting driver: same books, no memory. So a log from a GPU replays on a laptop.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vattn.engine.blueprint import rebuild_cache, rebuild_scheduler
from vattn.engine.events import FORMAT
from vattn.engine.groups import BeamGroup
from vattn.engine.preemption import How, ScriptedPreemption
from vattn.engine.request import Request
from vattn.engine.scheduler import Batch, Preempted, Scheduler
from vattn.engine.service import Service
from vattn.errors import ConfigError
from vattn.outputs import RequestMetrics
from vattn.params import BeamSearchParams, SamplingParams
from vattn.sampling.beam import BeamSearch
from vattn.sampling.detokenize import IncrementalDetokenizer, StopChecker
from vattn.sampling.sampling_state import SamplingStates

_DECISIONS = ("admit", "preempt", "starve", "step")
_ENDS = ("finish", "abort", "timeout")


@dataclass(frozen=True)
class Replay:
    """What came out."""

    requests: int
    steps: int
    preemptions: int
    decisions: int
    """Decisions that came out the same."""
    divergence: str | None
    """The first one that did not: where, what the log says, what the scheduler does. None: all equal."""


def replay(path: str | Path, *, check: bool = True) -> Replay:
    """Replay a whole log, or up to the first decision that differs.

    `check`: prove the books of scheduler and cache after every step. Raises ConfigError when the file
    is not a log, or is one that can't be replayed.
    """
    events = _read(Path(path))
    number, header = next(events, (0, {}))
    if header.get("event") != "header" or header.get("format") != FORMAT:
        raise ConfigError(f"{path} is not an event log: its first line is not a {FORMAT} header")
    kv, driver = rebuild_cache(header)
    try:
        player = _Player(rebuild_scheduler(header, kv), check)
        for number, event in events:
            try:
                player.play(event)
            except KeyError as error:
                raise ConfigError(f"{path}, line {number}: there is no {error}") from error
            if player.divergence is not None:
                player.divergence = f"line {number}, step {event['step']}: {player.divergence}"
                break
        return Replay(
            len(player.requests),
            player.steps,
            player.scheduler.num_preemptions,
            player.decisions,
            player.divergence,
        )
    finally:
        kv.close()
        driver.close()


class _Player:
    """One event after another."""

    def __init__(self, scheduler: Scheduler, check: bool) -> None:
        self.scheduler = scheduler
        self._preemption = scheduler.preemption = ScriptedPreemption(scheduler.kv)
        self.check = check
        self.requests: dict[str, Request] = {}
        self.steps = 0
        self.decisions = 0
        self.divergence: str | None = None
        self._states = SamplingStates()
        self._logged: list[Any] = []
        """Decisions of the step that the log is about to close."""
        self._batch: Batch | None = None
        """Scheduled; done when the next event does not say that it failed."""

    def play(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step_failed":
            if self._batch is None:
                raise ConfigError(
                    f"step {event['step']} failed while it was scheduled ({event['error']}): what the "
                    "scheduler had done by then is not in the log"
                )
            self._batch = None
            return
        self._advance()
        if kind == "arrive":
            self._arrive(event)
        elif kind in _DECISIONS:
            self._logged.append(_decision(event))
            if kind == "step":
                self._step()
        elif kind == "tokens":
            for request_id, token in event["tokens"]:
                request = self.requests[request_id]
                request.settle_pending()
                if request.group is None:  # beams get theirs when all of them are there
                    request.append(token, None)
        elif kind == "fork":
            self._fork(event)
        elif kind == "reset":
            self.scheduler.kv.reset_prefix_cache()
        elif kind == "resize":
            self._resize(event["budget_bytes"])
        elif kind == "extend":
            self.requests[event["id"]].append(event["token"], None)
            self.scheduler.resume(self.requests[event["id"]])
        elif kind == "drop" or kind in _ENDS:
            self.scheduler.finish(self.requests[event["id"]])
        elif kind != "refuse":
            raise ConfigError(f"unknown event {kind!r}: the log is of a newer version")

    def _arrive(self, event: dict[str, Any]) -> None:
        service = Service(event["priority"], event["tenant"], event["timeout_s"])
        request = self._request(event, event["prompt"], [], service, event["arrival"], event["salt"])
        if event["beams"]:
            search = BeamSearch(BeamSearchParams(beam_width=1), request.max_tokens, frozenset())
            request.group = BeamGroup(search, request)  # what the search chose is in the log
        self.scheduler.add(request)

    def _fork(self, event: dict[str, Any]) -> None:
        parent, tokens, length = self.requests[event["parent"]], event["token_ids"], event["prompt_len"]
        rank = tuple(event["rank"])
        request = self._request(event, tokens[:length], tokens[length:], parent.service, rank[1], parent.salt)
        request.rank, request.group = (rank[0], rank[1]), parent.group
        given = event["tokens"]
        if self.scheduler.fork(parent, request, given or event["asked"]) != bool(given):
            self.divergence = f"the log forks {event['id']!r} with {given} tokens, the cache does not"
        self.decisions += 1

    def _request(
        self,
        event: dict[str, Any],
        prompt: list[int],
        outputs: list[int],
        service: Service,
        arrival: int,
        salt: str | None,
    ) -> Request:
        params = SamplingParams(max_tokens=event["max_tokens"], ignore_eos=True, detokenize=False)
        request = Request(
            request_id=event["id"],
            prompt_token_ids=list(prompt),
            output_token_ids=outputs,
            params=params,
            sampling=self._states.new_state(params, prompt, outputs),
            stop=StopChecker(params, IncrementalDetokenizer(None, params), max_tokens=event["max_tokens"]),
            arrival=arrival,
            max_tokens=event["max_tokens"],
            metrics=RequestMetrics(event["t"]),
            service=service,
            salt=salt,
        )
        self.requests[event["id"]] = request
        return request

    def _resize(self, budget_bytes: int) -> None:
        self._preemption.script = self._hows()
        done = [_preempted(one) for one in self.scheduler.resize(budget_bytes)]
        logged, self._logged = self._logged, []
        if logged != done:
            self.divergence = f"resized to {budget_bytes:,}, the log has {logged}, the scheduler does {done}"
        self.decisions += 1

    def _hows(self) -> deque[How]:
        """What became of preempted requests depended on speeds that only the log's machine knew."""
        return deque(d[4] for d in self._logged if d[0] == "preempt")

    def _step(self) -> None:
        self._preemption.script = self._hows()
        batch = self.scheduler.schedule()
        logged, self._logged = self._logged, []
        replayed = [
            *(("admit", request.request_id, cached) for request, cached in batch.admitted),
            *map(_preempted, batch.preempted),
            *(("starve", request.request_id) for request in batch.starved),
            ("step", [(request.request_id, length) for request, length in batch.items]),
        ]
        for told, done in zip(logged, replayed, strict=False):
            if told != done:
                self.divergence = f"the log has {told}, the scheduler does {done}"
                return
            self.decisions += 1
        if len(logged) != len(replayed):
            self.divergence = f"the log has {logged}, the scheduler does {replayed}"
            return
        self.steps += 1
        self._batch = batch
        if self.check:
            self.scheduler.check()

    def _advance(self) -> None:
        """The scheduled step has run: its tokens are computed, the sampled ones on their way."""
        batch, self._batch = self._batch, None
        if batch is None or not batch.items:
            return
        sampling = [item.request for item in batch.items if item.samples]
        self.scheduler.kv.begin_step([item.chunk for item in batch.items])
        for request, length in batch.items:
            request.num_computed += length
            self.scheduler.kv.computed(request.request_id, request.token_ids, request.num_computed)
        for row, request in enumerate(sampling):
            request.add_pending(row)
        self.scheduler.kv.submitted(None)


def _preempted(one: Preempted) -> Any:
    return ("preempt", one.request.request_id, one.reason, one.by.request_id, one.how)


def _decision(event: dict[str, Any]) -> Any:
    kind = event["event"]
    if kind == "admit":
        return (kind, event["id"], event["cached"])
    if kind == "preempt":
        return (kind, event["id"], event["reason"], event["by"], event["how"])
    if kind == "starve":
        return (kind, event["id"])
    return (kind, [tuple(item) for item in event["tokens"]])


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and events."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    event = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
                if not isinstance(event, dict) or "event" not in event:
                    raise ConfigError(f"{path}, line {number} is not an event")
                yield number, event
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
