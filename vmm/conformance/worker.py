"""The process in which rules run: rule names come in on stdin, results go out as JSON lines.

    python -m ...conformance.worker DEVICE OPTIONS RESULTS_FD
    -> {"ready": {"driver": ..., "device": ..., "granularity": ..., "free": ..., "total": ...}}
       or {"unavailable": reason}
    <- NAME
    -> {"outcome": ..., "detail": ..., "clean": true}     clean: the process is fit for another rule
    -> {"touching": true}                                 from a rule that must fault, just before it does

On a CPU the touch is done by a fork, so that the process lives on; a fork cannot use CUDA.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..driver import Driver, DriverError, DriverUnavailable
from .rule import Outcome, Rule, Touch, Unsupported, Violation
from .sandbox import DriverSpec, Sandbox
from .specification import RULES

Report = Callable[[dict[str, Any]], None]
FAULTS = (-signal.SIGSEGV, -signal.SIGBUS)


def run(rule: Rule, driver: Driver, spec: DriverSpec, report: Report) -> None:
    """Check one rule and report."""
    box = Sandbox(driver, spec)
    outcome, detail, clean = Outcome.PASS, "", True
    try:
        seen = rule.check(box)
        if callable(seen):
            detail, clean = _touch(seen, driver, report)
        else:
            detail = seen or ""
    except Unsupported as reason:
        outcome, detail = Outcome.NOT_SUPPORTED, str(reason)
    except Violation as broken:
        clean = False
        outcome, detail = Outcome.FAIL, str(broken)
        if not rule.defined:
            outcome, detail = Outcome.NOT_SUPPORTED, f"not enforced: {broken}"
    except Exception as error:
        clean = False
        outcome, detail = Outcome.FAIL, f"{type(error).__name__}: {error}"
    if clean:
        try:
            box.close()
        except DriverError as error:
            clean = False
            if outcome is Outcome.PASS:
                outcome, detail = Outcome.FAIL, f"what the rule made could not be given back: {error}"
    report({"outcome": outcome, "detail": detail, "clean": clean})


def _touch(touch: Touch, driver: Driver, report: Report) -> tuple[str, bool]:
    """Make an access that must fault. Returns (how it faulted, whether this process can go on)."""
    if driver.device.type == "cpu":
        return _touch_in_a_fork(touch), True
    report({"touching": True})
    with suppress(Exception):  # a copy that is refused is no fault: only a context that is gone counts
        touch()
    try:
        driver.synchronize()
    except DriverError as error:
        return error.name, False
    raise Violation("it did not fault")


def _touch_in_a_fork(touch: Touch) -> str:
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        for number in (signal.SIGSEGV, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        try:
            touch()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in FAULTS:
        raise Violation("it did not fault")
    return signal.Signals(-code).name


def main(device: str, options: str, results: str) -> None:
    """Serve until stdin ends."""
    out = os.fdopen(int(results), "w", buffering=1)

    def report(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    spec = DriverSpec(device, json.loads(options))
    try:
        driver = spec.open()
        free, total = driver.memory_info()
    except (DriverUnavailable, DriverError, ValueError) as error:
        report({"unavailable": str(error)})
        return
    where = (
        device if device == "cpu" else str(driver.device)
    )  # the host driver's would take torch, and seconds
    about = {"driver": driver.name, "device": where, "granularity": driver.granularity}
    report({"ready": {**about, "free": free, "total": total}})
    rules = {rule.name: rule for rule in RULES}
    for line in sys.stdin:
        run(rules[line.strip()], driver, spec, report)
    out.flush()
    os._exit(0)  # whatever state the driver is in, the process gives everything back


if __name__ == "__main__":
    main(*sys.argv[1:])
