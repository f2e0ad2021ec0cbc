"""The event log: every decision of an engine, one JSON object a line, complete enough to be replayed.

    {"event": "header", "format": "vattn-trace-2", "version": …, "scheduler": {limits …}, "kv": {…}}
    {"event": "begin", "step": 0, "t": 0.0, "overlap": false}      steps launched before tokens are known?
    {"event": "arrive", "step": 0, "t": 0.01, "id": "0", "prompt": [token ids], "max_tokens": 16,
     "priority": 0, "tenant": "default", "timeout_s": null, "arrival": 0, "salt": "",
     "beams": false, "branches": 1}                                branches: outputs sampled from this prompt
    {"event": "refuse", …, "tenant": "a", "waiting": 12, "max_waiting": 8}
    {"event": "admit", …, "id": "0", "cached": 0}                  cached: tokens not to be computed
    {"event": "preempt", …, "id": "0", "reason": "memory", "by": "1", "how": "recompute"}
    {"event": "resize", …, "budget_bytes": 1048576}                behind those who yielded to it
    {"event": "resize_failed", …, "budget_bytes": 1048576, "error": "…"}
    {"event": "reset", …}                                          all cached prefixes were forgotten
    {"event": "starve", …, "id": "0"}                              no memory although nothing runs
    {"event": "fail", …, "id": "0", "error": "…"}                  its memory could not be had
    {"event": "step", …, "tokens": [["0", 7], …]}                  closes the decisions of that step
    {"event": "step_failed", …, "error": "…"}                      the step just scheduled has not happened
    {"event": "tokens", …, "tokens": [["0", 421], …]}              what was sampled: request, token id
    {"event": "fork", …, "id": "0#1", "parent": "0", "tokens": 20, "token_ids": [...], …}    0: it waits
    {"event": "extend", …, "id": "0#1", "token": 7}, {"event": "drop", …, "id": "0#2"}        of beams
    {"event": "finish" | "abort" | "timeout", …, "id": "0", "reason": "length"}

`step` counts calls of the scheduler, `t` is seconds since the log was opened, on a monotonic clock.
The log holds prompts and outputs as token ids: whoever can read it can read them.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.engine.groups import BeamGroup, ParallelGroup
from vattn.engine.request import Request
from vattn.errors import ConfigError
from vattn.outputs import FinishReason

if TYPE_CHECKING:
    from vattn.engine.in_flight import NewToken
    from vattn.engine.scheduler import Batch, Preempted

FORMAT = "vattn-trace-2"
_BUFFER = 1 << 16


class EventLog:
    """What an engine tells about its decisions; this one forgets it all."""

    def begin(self, overlap: bool) -> None:
        """An engine begins; `overlap`: it launches a step before the last one's tokens are known."""

    def arrive(self, request: Request) -> None:
        """A request was accepted."""

    def refuse(self, tenant: str, waiting: int, max_waiting: int) -> None:
        """Requests of `tenant` were refused: `waiting` of its requests would have waited."""

    def step(self, batch: Batch) -> None:
        """The scheduler has decided."""

    def reset(self) -> None:
        """All cached prefixes were forgotten."""

    def resize(self, budget_bytes: int, preempted: Sequence[Preempted]) -> None:
        """The cache has another budget; these requests yielded to it."""

    def resize_failed(self, budget_bytes: int, error: BaseException) -> None:
        """The cache keeps its budget; requests may have yielded all the same."""

    def step_failed(self, error: BaseException) -> None:
        """The step just decided on has not happened, or could not be decided."""

    def tokens(self, sampled: Sequence[NewToken]) -> None:
        """A step's tokens have arrived."""

    def fork(self, parent: Request, child: Request, asked: int, tokens: int) -> None:
        """A request was to begin with `asked` tokens of another, and did with `tokens`; 0: it waits."""

    def extend(self, request: Request, token: int) -> None:
        """A beam got a token."""

    def drop(self, request: Request) -> None:
        """A beam was given up."""

    def finish(self, request: Request, reason: FinishReason) -> None:
        """A request has ended."""

    def close(self) -> None:
        """No more will come."""


class TraceWriter(EventLog):
    """Writes the log. Lines reach the file when a request ends, when 64 KiB have come together, at close.

    If the disk fails, the engine goes on: the log ends there, with a warning.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        """Raises ConfigError when the file can't be written. An existing file is replaced."""
        self.path = Path(path)
        try:
            self._file = self.path.open("w", buffering=_BUFFER, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the event log {self.path} can't be written: {error.strerror}") from error
        self._start = time.perf_counter()
        self._step = 0
        self._broken = False
        self._line({"event": "header", "format": FORMAT, **header})
        self._flush()

    # ------------------------------------------------------------------ events
    def begin(self, overlap: bool) -> None:
        self._write("begin", overlap=overlap)

    def arrive(self, request: Request) -> None:
        service = request.service
        self._write(
            "arrive",
            id=request.request_id,
            prompt=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            priority=service.priority,
            tenant=service.tenant,
            timeout_s=service.timeout_s,
            arrival=request.arrival,
            salt=request.salt,
            beams=isinstance(request.group, BeamGroup),
            branches=len(request.group.branches) if isinstance(request.group, ParallelGroup) else 1,
        )

    def refuse(self, tenant: str, waiting: int, max_waiting: int) -> None:
        self._write("refuse", tenant=tenant, waiting=waiting, max_waiting=max_waiting)

    def step(self, batch: Batch) -> None:
        for request, cached in batch.admitted:
            self._write("admit", id=request.request_id, cached=cached)
        for preempted in batch.preempted:
            self._preempt(preempted)
        for request in batch.starved:
            self._write("starve", id=request.request_id)
        for request, error in batch.failed:
            self._write("fail", id=request.request_id, error=f"{type(error).__name__}: {error}")
        self._write("step", tokens=[(request.request_id, length) for request, length in batch.items])
        self._step += 1

    def reset(self) -> None:
        self._write("reset")

    def resize(self, budget_bytes: int, preempted: Sequence[Preempted]) -> None:
        for one in preempted:
            self._preempt(one)
        self._write("resize", budget_bytes=budget_bytes)

    def resize_failed(self, budget_bytes: int, error: BaseException) -> None:
        self._write("resize_failed", budget_bytes=budget_bytes, error=f"{type(error).__name__}: {error}")

    def _preempt(self, preempted: Preempted) -> None:
        victim, reason, by, how = preempted
        self._write("preempt", id=victim.request_id, reason=reason, by=by.request_id, how=how)

    def step_failed(self, error: BaseException) -> None:
        self._write("step_failed", error=f"{type(error).__name__}: {error}")
        self._flush()

    def tokens(self, sampled: Sequence[NewToken]) -> None:
        # A negative one is none: its request fails.
        tokens = [(request.request_id, token) for request, token, _ in sampled if token >= 0]
        if tokens:
            self._write("tokens", tokens=tokens)

    def fork(self, parent: Request, child: Request, asked: int, tokens: int) -> None:
        self._write(
            "fork",
            id=child.request_id,
            parent=parent.request_id,
            asked=asked,
            tokens=tokens,
            token_ids=child.token_ids,
            prompt_len=len(child.prompt_token_ids),
            max_tokens=child.max_tokens,
            rank=child.rank,
        )

    def extend(self, request: Request, token: int) -> None:
        self._write("extend", id=request.request_id, token=token)

    def drop(self, request: Request) -> None:
        self._write("drop", id=request.request_id)

    def finish(self, request: Request, reason: FinishReason) -> None:
        kind = reason if reason in ("abort", "timeout") else "finish"
        self._write(kind, id=request.request_id, reason=reason, error=request.error)
        self._flush()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error)

    # ------------------------------------------------------------------ lines
    def _write(self, event: str, **fields: Any) -> None:
        moment = round(time.perf_counter() - self._start, 6)
        self._line({"event": event, "step": self._step, "t": moment, **fields})

    def _line(self, record: Mapping[str, Any]) -> None:
        if self._broken or self._file.closed:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        if self._broken or self._file.closed:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            warnings.warn(f"the event log {self.path} ends early: {error}", RuntimeWarning, stacklevel=2)
