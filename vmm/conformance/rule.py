"""What a rule is, and the words rules are written in."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..driver import INVALID_VALUE, NOT_SUPPORTED, DriverError

if TYPE_CHECKING:
    from .sandbox import Sandbox

Touch = Callable[[], object]
"""An access to memory that must fault."""
Check = Callable[["Sandbox"], "str | Touch | None"]


class Outcome(enum.StrEnum):
    """What came of a rule."""

    PASS = "pass"
    FAIL = "fail"
    NOT_SUPPORTED = "not supported"


class Result(NamedTuple):
    """One rule on one driver."""

    rule: str
    outcome: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True)
class Rule:
    """One statement about a driver, and the check that it holds.

    `check` returns a detail worth telling, or None; it raises `Violation` or a `DriverError` when the rule is
    broken, `Unsupported` when the driver has no such thing. The check of a `faults` rule returns an access to
    memory: that must kill the process (CPU) or poison its context (GPU).
    """

    name: str
    statement: str
    source: str
    """Function or chapter of NVIDIA's documentation that says so, or "vattn": what this project asks."""
    check: Check
    faults: bool = False
    defined: bool = True
    """False: the documentation leaves open what happens otherwise, so it is no failure."""
    measures: bool = False
    """Whether it compares the device's free memory: nobody else of ours may take any meanwhile."""


class Violation(Exception):
    """The rule does not hold; the message says what was seen."""


class Unsupported(Exception):
    """The driver does not have what the rule is about."""


def rule(
    statement: str, source: str, *, faults: bool = False, defined: bool = True, measures: bool = False
) -> Callable[[Check], Rule]:
    """Make a rule of a function; its name, with dashes, is the function's."""

    def make(check: Check) -> Rule:
        name = check.__name__.replace("_", "-")
        return Rule(name, statement, source, check, faults, defined, measures)

    return make


def expect(holds: object, otherwise: str) -> None:
    """Raise `Violation(otherwise)` unless something holds."""
    if not holds:
        raise Violation(otherwise)


def refused(
    what: str, call: Callable[..., object], *args: object, codes: tuple[int, ...] = (INVALID_VALUE,)
) -> str:
    """The name of the error that a call is refused with; accepting it, or another error, is a violation."""
    try:
        call(*args)
    except DriverError as error:
        if error.code not in codes:
            raise Violation(f"{what}: refused with {error.name} ({error.code})") from error
        return error.name
    raise Violation(f"{what}: accepted")


def supported(call: Callable[..., int], *args: object) -> int:
    """The value of a call that a driver may answer with NOT_SUPPORTED."""
    try:
        return call(*args)
    except DriverError as error:
        if error.code == NOT_SUPPORTED:
            raise Unsupported(str(error)) from error
        raise
