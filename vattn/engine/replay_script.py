"""Plays an event log as a script: an executor returns its tokens, and the engine must repeat its events.

engine ──── trace (arrive, step, tokens, finish …) ────> Script   compares it with the next event
       <─── ScriptedExecutor.collect ────────────────── Script   the tokens of the next event
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vattn.engine.events import EventLog
from vattn.engine.executor import Executor, StepResult
from vattn.engine.in_flight import NewToken
from vattn.engine.preemption import How
from vattn.engine.request import Request
from vattn.engine.scheduler import Batch, Preempted, Scheduled
from vattn.errors import ConfigError
from vattn.kv.base import KVCache
from vattn.outputs import FinishReason

Event = dict[str, Any]
_KNOWN = {
    "begin", "arrive", "refuse", "admit", "preempt", "starve", "fail", "step", "step_failed", "tokens",
    "fork", "extend", "drop", "finish", "abort", "timeout", "reset", "resize", "resize_failed",
}  # fmt: skip
_OF_TOKENS = ("fork", "extend", "drop", "finish")
"""Events that follow from the tokens of a step."""


class Script(EventLog):
    """Reads the events of a log in order. It is also the `trace` of the replaying engine, so it receives
    what that engine does."""

    def __init__(self, events: Iterator[tuple[int, Event]], path: Path) -> None:
        self.path = path
        self.steps = 0
        self.decisions = 0
        """Number of decisions that matched the log."""
        self.divergence: str | None = None
        """Description of the first difference. Nothing is compared after it."""
        self._events = events
        self._ahead: deque[tuple[int, Event]] = deque()
        self._ends: dict[str, Event] = {}
        """By request id, the `finish` events of outputs that end with the current tokens."""

    # ------------------------------------------------------------------ reading
    def peek(self, ahead: int = 0) -> Event | None:
        """The event `ahead` places after the next one; None if the log ends before it."""
        while len(self._ahead) <= ahead:
            found = next(self._events, None)
            if found is None:
                return None
            if found[1]["event"] not in _KNOWN:
                raise ConfigError(f"unknown event {found[1]['event']!r}: the log is of a newer version")
            self._ahead.append(found)
        return self._ahead[ahead][1]

    @property
    def line(self) -> int:
        """The line number of the next event; 0 if the log is over."""
        return self._ahead[0][0] if self.peek() is not None else 0

    def skip(self) -> None:
        """Go on to the event after the next one."""
        self._ahead.popleft()

    def differs(self, why: str) -> None:
        """Record the first difference, at the line of the next event."""
        if self.divergence is None:
            step = (self.peek() or {"step": "?"})["step"]
            self.divergence = f"line {self.line}, step {step}: {why}"

    def hows(self) -> deque[How]:
        """How the next preempted requests gave up their KV. It depended on the speed of the log's machine."""
        found: deque[How] = deque()
        for event in self._until("step", "resize"):
            if event["event"] == "preempt":
                found.append(event["how"])
        return found

    def refuse_failures(self) -> None:
        """Raise ConfigError if the next step failed and the log does not record enough to replay it."""
        first = self.peek()
        if first is not None and first["event"] == "step_failed":
            raise ConfigError(
                f"step {first['step']} failed while it was scheduled ({first['error']}): what the "
                "scheduler had done by then is not in the log"
            )
        if first is not None and first["event"] == "resize_failed":
            raise ConfigError(
                f"a resize to {first['budget_bytes']:,} bytes failed in step {first['step']} "
                f"({first['error']}): which requests had yielded by then is not in the log"
            )
        for event in self._until("step", "resize"):
            if event["event"] == "fail":
                raise ConfigError(
                    f"in step {event['step']} the driver refused memory to {event['id']!r} "
                    f"({event['error']}): replay has no driver that refuses the same"
                )

    def _until(self, *kinds: str) -> Iterator[Event]:
        ahead = 0
        while (event := self.peek(ahead)) is not None:
            if event["event"] in kinds:
                return
            yield event
            ahead += 1

    # ------------------------------------------------------------------ tokens
    def settles_now(self) -> bool:
        """True if the engine waited for the tokens in flight before it scheduled the next step."""
        event = self.peek()
        return event is not None and event["event"] in ("tokens", *_OF_TOKENS)

    def tokens_of(self, sampling: Sequence[Request]) -> list[int]:
        """The token sampled for each request; -1 if there was none."""
        event = self.peek()
        if self.divergence is not None or event is None or event["event"] != "tokens":
            self._ends = {}
            return [-1] * len(sampling)
        ahead = 1
        self._ends = {}
        while (after := self.peek(ahead)) is not None and after["event"] in _OF_TOKENS:
            if after["event"] == "finish":
                self._ends[after["id"]] = after
            ahead += 1
        given = dict(event["tokens"])
        return [given.get(request.request_id, -1) for request in sampling]

    def end_of(self, request_id: str) -> Event | None:
        """The event with which an output ends at its current token; None if it goes on."""
        return self._ends.get(request_id)

    def end_order(self) -> dict[str, int]:
        """Position in the order of ending, by id, of the requests that end next."""
        order: dict[str, int] = {}
        while (event := self.peek(len(order))) is not None:
            if event["event"] not in ("finish", "abort", "timeout") or event["id"] in order:
                break
            order[event["id"]] = len(order)
        return order

    # ------------------------------------------------------------------ comparing
    def _compare(self, *done: Any, decision: bool = False) -> None:
        if self.divergence is not None or (event := self.peek()) is None:
            return
        told = _told(event)
        if told != done:
            self.differs(f"the log has {told}, the engine does {done}")
            return
        self.skip()
        self.decisions += decision

    def begin(self, overlap: bool) -> None:
        if (self.peek() or {}).get("event") == "begin":
            self._compare("begin", overlap)

    def arrive(self, request: Request) -> None:
        self._compare("arrive", request.request_id)

    def step(self, batch: Batch) -> None:
        for request, cached in batch.admitted:
            self._compare("admit", request.request_id, cached, decision=True)
        self._preempted(batch.preempted)
        for request in batch.starved:
            self._compare("starve", request.request_id, decision=True)
        self._compare("step", [(r.request_id, length) for r, length in batch.items], decision=True)
        self.steps += self.divergence is None

    def _preempted(self, preempted: Sequence[Preempted]) -> None:
        for victim, reason, by, how in preempted:
            self._compare("preempt", victim.request_id, reason, by.request_id, how, decision=True)

    def step_failed(self, error: BaseException) -> None:
        self._compare("step_failed")

    def reset(self) -> None:
        self._compare("reset")

    def resize(self, budget_bytes: int, preempted: Sequence[Preempted]) -> None:
        self._preempted(preempted)
        self._compare("resize", budget_bytes, decision=True)

    def tokens(self, sampled: Sequence[NewToken]) -> None:
        tokens = [(request.request_id, token) for request, token, _ in sampled if token >= 0]
        if tokens:
            self._compare("tokens", tokens)

    def fork(self, parent: Request, child: Request, asked: int, tokens: int) -> None:
        self._compare("fork", child.request_id, parent.request_id, tokens, decision=True)

    def extend(self, request: Request, token: int) -> None:
        self._compare("extend", request.request_id, token)

    def drop(self, request: Request) -> None:
        self._compare("drop", request.request_id)

    def finish(self, request: Request, reason: FinishReason) -> None:
        kind = reason if reason in ("abort", "timeout") else "finish"
        self._compare(kind, request.request_id, reason)


class ScriptedExecutor(Executor):
    """An executor that returns the tokens of a script. Its steps take no time."""

    def __init__(self, kv: KVCache, script: Script) -> None:
        self._kv = kv
        self._script = script

    def clock(self) -> float:
        return 0.0  # no deadline may pass by itself: the log records which did

    def launch(self, items: Sequence[Scheduled], behind: list[Request] | None) -> list[Request]:
        event = self._script.peek()
        if event is not None and event["event"] == "step_failed":
            raise RuntimeError(event["error"])
        self._kv.submitted(None)
        return [item.request for item in items if item.samples]

    def collect(self, handle: list[Request]) -> StepResult:
        return StepResult(self._script.tokens_of(handle))


_FIELDS = {
    "begin": ("overlap",),
    "arrive": ("id",),
    "admit": ("id", "cached"),
    "preempt": ("id", "reason", "by", "how"),
    "starve": ("id",),
    "step": ("tokens",),
    "tokens": ("tokens",),
    "resize": ("budget_bytes",),
    "fork": ("id", "parent", "tokens"),
    "extend": ("id", "token"),
    "drop": ("id",),
    "finish": ("id", "reason"),
    "abort": ("id", "reason"),
    "timeout": ("id", "reason"),
}
"""The fields that are compared for each kind of event."""


def _told(event: Event) -> tuple[Any, ...]:
    kind = event["event"]
    values = (event[name] for name in _FIELDS.get(kind, ()))
    return (kind, *([tuple(v) for v in value] if isinstance(value, list) else value for value in values))


def read_events(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield line numbers and events. Raises ConfigError if a line is not an event."""
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
