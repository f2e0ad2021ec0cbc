"""The type of a rule, and the helpers with which rules are written."""

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
    """The outcome of a rule."""

    PASS = "pass"
    FAIL = "fail"
    NOT_SUPPORTED = "not supported"


class Result(NamedTuple):
    """The result of one rule on one driver."""

    rule: str
    outcome: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True)
class Rule:
    """A statement about a driver, and a check that it holds.

    `check` returns a detail to report, or None. It raises `Violation` or a `DriverError` if the rule is
    broken, `Unsupported` if the driver lacks the feature. The check of a `faults` rule returns an access to
    memory, which must kill the process (CPU) or poison its context (GPU).
    """

    name: str
    statement: str
    source: str
    """Function or chapter of NVIDIA's documentation; "vattn" if it is a requirement of this project."""
    check: Check
    faults: bool = False
    defined: bool = True
    """False if the documentation does not define this case. Breaking the rule is then no failure."""
    measures: bool = False
    """Whether it measures the device's free memory, so no other worker may allocate meanwhile."""


class Violation(Exception):
    """The rule does not hold. The message says what was seen."""


class Unsupported(Exception):
    """The driver lacks the feature that the rule is about."""


def rule(
    statement: str, source: str, *, faults: bool = False, defined: bool = True, measures: bool = False
) -> Callable[[Check], Rule]:
    """Make a function a rule. The rule's name is the function's, with dashes."""

    def make(check: Check) -> Rule:
        name = check.__name__.replace("_", "-")
        return Rule(name, statement, source, check, faults, defined, measures)

    return make


def expect(holds: object, otherwise: str) -> None:
    """Raise `Violation(otherwise)` unless the condition holds."""
    if not holds:
        raise Violation(otherwise)


def refused(
    what: str, call: Callable[..., object], *args: object, codes: tuple[int, ...] = (INVALID_VALUE,)
) -> str:
    """Make a call that must be refused and return the name of its error. Anything else is a violation."""
    try:
        call(*args)
    except DriverError as error:
        if error.code not in codes:
            raise Violation(f"{what}: refused with {error.name} ({error.code})") from error
        return error.name
    raise Violation(f"{what}: accepted")


def supported(call: Callable[..., int], *args: object) -> int:
    """Make a call and return its value. Raises `Unsupported` if the driver answers NOT_SUPPORTED."""
    try:
        return call(*args)
    except DriverError as error:
        if error.code == NOT_SUPPORTED:
            raise Unsupported(str(error)) from error
        raise
