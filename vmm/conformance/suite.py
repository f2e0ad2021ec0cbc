"""Runs rules on a driver in a worker process, which is replaced when it can't run another rule."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from signal import Signals
from time import perf_counter
from types import TracebackType
from typing import IO, Any, Self

from ..driver import DriverUnavailable
from .process import python
from .rule import Outcome, Result, Rule
from .sandbox import DriverSpec
from .specification import RULES

CPU_BUDGET = 256 << 20
SPARES = 4


class Suite:
    """The rules on one driver.

    `spec`: how to open it. `environment`: of the worker processes, if not this one's. `seconds`: the longest
    that a rule, or opening the driver, may take. Raises `DriverUnavailable` when it cannot be opened.
    """

    def __init__(
        self, spec: DriverSpec, environment: Mapping[str, str] | None = None, seconds: float = 120
    ) -> None:
        self.spec = spec
        self._environment = environment
        self._seconds = seconds
        self._spares: list[_Worker] = []
        self._worker: _Worker | None = self._start()
        self.about: dict[str, Any] = self._worker.ready()
        """Facts about the driver: "driver" (its name), "device", "granularity", "free", "total" (bytes)."""

    def run(self, rule: Rule) -> Result:
        """Run one rule and return its result. Whatever it does to its process, the next is not affected."""
        started = perf_counter()
        try:
            if self._worker is None:
                self._worker = self._spares.pop(0) if self._spares else self._start()
            outcome, detail, clean = self._worker.run(rule)
        except DriverUnavailable as error:
            outcome, detail, clean = Outcome.FAIL, f"the driver does not open any more: {error}", False
        if not clean and self._worker is not None:
            self._worker.close()
            self._worker = None
        return Result(rule.name, outcome, detail, perf_counter() - started)

    def run_all(self, rules: Sequence[Rule] = RULES) -> Iterator[Result]:
        """Run rules one after the other and yield their results."""
        for index, rule in enumerate(rules):
            rest = rules[index:]
            if not any(other.measures for other in rest):
                self._prepare(sum(other.faults for other in rest))
            yield self.run(rule)

    def close(self) -> None:
        """End the workers. Idempotent. A new worker is started when one is needed."""
        for worker in (*self._spares, *([self._worker] if self._worker is not None else [])):
            worker.close()
        self._spares.clear()
        self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, faults: int) -> None:
        """Start the next workers early: on a GPU a fault ends a worker, and a new one takes seconds."""
        if self.about["device"].startswith("cuda"):
            while len(self._spares) < min(faults - 1, SPARES):
                self._spares.append(self._start())

    def _start(self) -> _Worker:
        return _Worker(self.spec, self._environment, self._seconds)


class _Worker:
    """One worker process. `worker.py` describes the messages."""

    def __init__(self, spec: DriverSpec, environment: Mapping[str, str] | None, seconds: float) -> None:
        reading, writing = os.pipe()
        self._seconds = seconds
        self._results = reading
        self._buffer = b""
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        try:
            self._process = python(
                "worker",
                spec.device,
                json.dumps(dict(spec.options)),
                str(writing),
                pass_fds=(writing,),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                environment=environment,
            )
        finally:
            os.close(writing)
        self._about: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """Wait until the driver is open and return facts about it.

        If it can't be opened, ends the process and raises `DriverUnavailable`.
        """
        if self._about is None:
            first = self._message()
            if first is None or "ready" not in first:
                how = self._how_it_ended() if first is None else str(first["unavailable"])
                self.close()
                raise DriverUnavailable(how)
            self._about = first["ready"]
        return self._about

    def run(self, rule: Rule) -> tuple[Outcome, str, bool]:
        """Run a rule. Returns (outcome, detail, whether the process can run another rule)."""
        self.ready()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(rule.name + "\n")
            self._process.stdin.flush()
        message = self._message()
        touching = message is not None and "touching" in message
        if touching:
            message = self._message()
        if message is not None:
            return Outcome(message["outcome"]), message["detail"], message["clean"]
        how = self._how_it_ended()
        if touching:
            return Outcome.PASS, how, False
        if not rule.defined:
            return Outcome.NOT_SUPPORTED, f"not enforced: {how}", False
        return Outcome.FAIL, how, False

    def close(self) -> None:
        """End the process, whatever state it is in."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._results >= 0:
            os.close(self._results)
            self._results = -1
        self._errors.close()

    def _message(self) -> dict[str, Any] | None:
        """The next message; None if the process died or takes too long."""
        until = perf_counter() + self._seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._results], [], [], max(until - perf_counter(), 0))
            more = os.read(self._results, 1 << 16) if ready else b""
            if not more:
                return None
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return f"no answer within {self._seconds:g} seconds"
        if code < 0:
            return f"the process died: {Signals(-code).name}"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"the process ended with {code}: {lines[-1] if lines else 'it said nothing'}"


def spec_of(device: str) -> DriverSpec:
    """How to open a device's driver for these rules. On a CPU it gets a budget that can be exhausted."""
    return DriverSpec(device, {"budget": CPU_BUDGET} if device == "cpu" else {})
