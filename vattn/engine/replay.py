"""Replay an event log: run the real engine again and compare what it does, event by event.

    log       arrive ─ step ─ tokens ─ finish ─ …    arrivals, aborts, resizes and tokens are taken from it;
    replay    Engine.enqueue ─ Engine.step ─ …       what the engine does with them is compared

The cache runs on the accounting driver: same books, no memory. So a log from a GPU replays on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vattn.engine.blueprint import rebuild_cache, rebuild_limits
from vattn.engine.engine import Engine
from vattn.engine.events import FORMAT
from vattn.engine.intake import Intake
from vattn.engine.preemption import ScriptedPreemption
from vattn.engine.replay_script import Event, Script, ScriptedExecutor, read_events
from vattn.engine.scripted_requests import RequestMaker
from vattn.errors import ConfigError, StepError

_SETTLES = ("tokens", "fork", "extend", "drop", "finish", "preempt")
"""What may stand between the beginning of a resize and its own event."""


@dataclass(frozen=True)
class Replay:
    """What came out."""

    requests: int
    steps: int
    preemptions: int
    decisions: int
    """Decisions that came out the same."""
    divergence: str | None
    """The first one that did not: where, what the log says, what the engine does. None: all equal."""


def replay(path: str | Path, *, check: bool = True) -> Replay:
    """Replay a whole log, or up to the first decision that differs.

    `check`: prove the books of scheduler and cache after every step. Raises ConfigError when the file
    is not a log, or is one that can't be replayed.
    """
    events = read_events(Path(path))
    _, header = next(events, (0, {}))
    if header.get("event") != "header" or header.get("format") != FORMAT:
        raise ConfigError(f"{path} is not an event log: its first line is not a {FORMAT} header")
    kv, driver = rebuild_cache(header)
    try:
        script = Script(events, Path(path))
        begin = script.peek() or {}
        engine = Engine(
            ScriptedExecutor(kv, script),
            kv,
            Intake(vocab_size=1, max_model_len=header["kv"]["max_model_len"]),
            rebuild_limits(header),
            overlap=bool(begin.get("overlap")),
            trace=script,
        )
        player = _Player(engine, script, check)
        player.play()
        return Replay(
            len(player.requests),
            script.steps,
            engine.scheduler.num_preemptions,
            script.decisions,
            script.divergence,
        )
    finally:
        kv.close()
        driver.close()


class _Player:
    """Does again what came from outside, and steps the engine for the rest."""

    def __init__(self, engine: Engine, script: Script, check: bool) -> None:
        self.requests = RequestMaker(script)
        self._engine = engine
        self._script = script
        self._check = check
        self._preemption = engine.scheduler.preemption = ScriptedPreemption(engine.kv)

    def play(self) -> None:
        script = self._script
        while (event := script.peek()) is not None and script.divergence is None:
            line = script.line
            try:
                self._play(event)
            except KeyError as error:
                raise ConfigError(f"{script.path}, line {line}: there is no {error}") from error
            if script.line == line:
                script.differs(f"the log has {event['event']!r}, the engine does nothing")

    def _play(self, event: Event) -> None:
        kind = event["event"]
        if kind == "arrive":
            self._engine.enqueue(self.requests.arrive(event))
        elif kind == "refuse":
            self._script.skip()
        elif kind == "reset":
            self._reset()
        elif kind in ("finish", "abort", "timeout"):  # with tokens or a step they would stand behind these
            leader = self.requests.leader(event["id"])
            self._engine.abort(leader.request_id, event["reason"], event["error"])
            self._engine.take_deltas()
        elif kind in ("tokens", "preempt", "resize") and (budget := self._resizes()) is not None:
            self._resize(budget)
        else:
            self._step()

    def _step(self) -> None:
        self._script.refuse_failures()
        self._preemption.script = self._script.hows()
        try:
            self._engine.step()
        except StepError:
            self._engine.take_deltas()  # it failed in the log, too
        if self._check and self._script.divergence is None:
            self._engine.scheduler.check()

    def _reset(self) -> None:
        if self._resizes(1) == 0:
            self._resize(0)
        else:
            self._engine.reset_prefix_cache()

    def _resizes(self, ahead: int = 0) -> int | None:
        """The budget of the resize that begins there; None: none does.

        A resize first settles what is in flight, then requests yield to it.
        """
        while (event := self._script.peek(ahead)) is not None:
            if event["event"] == "resize":
                return int(event["budget_bytes"])
            if event["event"] not in _SETTLES:
                return None
            ahead += 1
        return None

    def _resize(self, budget_bytes: int) -> None:
        self._preemption.script = self._script.hows()
        if budget_bytes:
            self._engine.resize_kv(budget_bytes)
            self._engine.wake_up()
        else:
            self._engine.sleep()
        self._engine.take_deltas()
