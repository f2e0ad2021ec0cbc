"""The rules themselves: each says what it asks, and each notices when it does not get it."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.vmm.conformance import broken
from vattn.vmm.conformance import faults
from vattn.vmm.conformance.rule import Outcome, Rule
from vattn.vmm.conformance.sandbox import DriverSpec, Sandbox
from vattn.vmm.conformance.specification import RULES
from vattn.vmm.conformance.suite import Suite
from vattn.vmm.conformance.worker import run
from vattn.vmm.driver import DriverUnavailable

SPEC = DriverSpec("cpu", {"granularity": broken.PAGE, "budget": broken.MEMORY})

# Needs a driver that another process can open, and so cannot be broken here.
IN_ANOTHER_PROCESS = {"exported-memory-is-shared", "exported-memory-outlives-the-exporter"}


BROKEN = [kind for kind in vars(broken).values() if isinstance(kind, type) and issubclass(kind, broken.Sound)]


def outcome(rule: Rule, kind: type[broken.Sound]) -> tuple[Outcome, str]:
    """What a rule says about a driver of this process."""
    said: list[dict[str, Any]] = []
    run(rule, kind(), SPEC, said.append)
    (message,) = said
    return Outcome(message["outcome"]), message["detail"]


def outcomes(rules: Sequence[Rule], kind: type[broken.Sound]) -> dict[str, Outcome]:
    """What rules say about a driver that may well take its process with it: a crash is a failure."""
    found: dict[str, Outcome] = {}
    while len(found) < len(rules):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                faulthandler.disable()
                torch.set_num_threads(1)  # a fork has no other thread
                for rule in rules[len(found) :]:
                    os.write(writing, f"{rule.name}={outcome(rule, kind)[0]}\n".encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading) as answers:
            for name, _, said in (line.rstrip().partition("=") for line in answers):
                found[name] = Outcome(said)
        os.waitpid(child, 0)
        if len(found) < len(rules):
            found[rules[len(found)].name] = Outcome.FAIL
    return found


def test_every_rule_notices_a_driver_that_breaks_it() -> None:
    """All hold for the sound driver; for each there is a broken one of which it says something else."""
    rules = [rule for rule in RULES if rule.name not in IN_ANOTHER_PROCESS]
    sound = outcomes(rules, broken.Sound)
    assert {name for name, said in sound.items() if said is not Outcome.PASS} == {
        "recommended-granularity-is-a-multiple"
    }
    noticed: dict[str, list[str]] = {rule.name: [] for rule in rules}
    for kind in BROKEN:
        if kind is not broken.Sound:
            said = outcomes(rules, kind)
            different = [name for name in sound if said[name] is not sound[name]]
            assert different, f"{kind.__name__} is not noticed at all"
            for name in different:
                noticed[name].append(kind.__name__)
    assert not [name for name, kinds in noticed.items() if not kinds], noticed


def test_what_the_documentation_leaves_open_is_no_failure() -> None:
    by_name = {rule.name: rule for rule in RULES}
    open_, closed = by_name["unmap-refuses-a-gap"], by_name["map-refuses-mapped-addresses"]
    assert not open_.defined and closed.defined
    assert outcome(open_, broken.Agreeable) == (
        Outcome.NOT_SUPPORTED,
        "not enforced: unmapped addresses: accepted",
    )
    assert outcome(closed, broken.Agreeable) == (Outcome.FAIL, "a second handle: accepted")


def test_rules_are_told_apart_and_say_what_they_ask() -> None:
    assert len({rule.name for rule in RULES}) == len({rule.statement for rule in RULES}) == len(RULES) >= 50
    for rule in RULES:
        assert rule.statement.endswith(".") and "\n" not in rule.statement and len(rule.statement) < 105
        assert rule.source == "vattn" or rule.source.startswith(("cu", "CU", "Programming Guide")), (
            rule.source
        )
    ends = [rule.faults for rule in RULES]
    assert ends == sorted(ends), "what ends a process comes last"


def test_a_sandbox_gives_back_what_a_rule_made() -> None:
    driver = broken.Sound()
    box = Sandbox(driver, SPEC)
    box.usable(3, room=2)
    box.aliases(2)
    box.create()
    box.close()
    assert driver.memory_info()[0] == broken.MEMORY and not driver.shadow.reservations


def test_a_rule_that_ends_its_process_or_hangs_does_not_touch_the_next() -> None:
    """A name that the worker does not know ends it, as a crash would; a stopped process does not answer."""
    unknown = Rule("made-up", "Something.", "vattn", lambda box: None, defined=False)
    with Suite(SPEC, seconds=20) as suite:
        first = suite._worker
        result = suite.run(unknown)
        assert result.outcome is Outcome.NOT_SUPPORTED
        assert result.detail == "not enforced: the process ended with 1: KeyError: 'made-up'"
        assert suite.run(RULES[0]).outcome is Outcome.PASS and suite._worker is not first
        assert suite._worker is not None
        suite._worker._process.send_signal(signal.SIGSTOP)
        suite._worker._seconds = 0.2
        result = suite.run(RULES[0])
        assert (result.outcome, result.detail) == (Outcome.FAIL, "no answer within 0.2 seconds")
        assert suite.run(RULES[0]).outcome is Outcome.PASS


def test_workers_for_rules_that_fault_are_started_ahead_on_a_gpu() -> None:
    with Suite(SPEC) as suite:
        suite.about["device"] = "cuda:0"
        results = suite.run_all([RULES[0], *faults.RULES[:3]])
        assert next(results).outcome is Outcome.PASS and len(suite._spares) == 2, "the first has a worker"
        assert [result.outcome for result in results] == [Outcome.PASS] * 3
        processes = [worker._process for worker in suite._spares]
    assert all(process.poll() is not None for process in processes), "close ends them"
    with Suite(SPEC) as suite:
        assert [result.outcome for result in suite.run_all([RULES[0]])] == [
            Outcome.PASS
        ] and not suite._spares


def test_a_driver_that_does_not_open_is_unavailable() -> None:
    with pytest.raises(DriverUnavailable, match="granularity 100 is not a multiple"):
        Suite(DriverSpec("cpu", {"granularity": 100}))
