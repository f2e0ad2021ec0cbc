"""The operations that the books ask a memory to do. Units and rows are named by number.

A decision is a generator: it yields operations, and a failed operation raises at its `yield`. So the code
that decides also undoes its changes when an operation fails. It does not yield while it undoes them.

    books     grow("a") ── Map(row 3, at 2, units 7) ──> memory
                        <── done, or the driver's error ──
              return True, or undo and raise
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Map(NamedTuple):
    """Map units that nothing else holds into a row, writable, from position `at` on. All or nothing.

    A memory first unmaps what an undone decision may have left at `at` and behind.
    """

    row: int
    at: int
    units: tuple[int, ...]
    new: tuple[int, ...]
    """The units that do not exist yet. If the operation fails, they still do not exist."""
    ahead: bool = False
    """No request needs the units yet, so a memory may map them in the background until `Finish`."""


class Grant(NamedTuple):
    """Map units that others hold into an empty row too, read-only if the device can. All or nothing."""

    row: int
    units: tuple[int, ...]


class Finish(NamedTuple):
    """Wait for a `Map` ahead in a row. If that failed, its error is raised and nothing stays mapped."""

    row: int


class Unmap(NamedTuple):
    """Cut a row to its first `keep` units. For the books the others are gone even if this raises."""

    row: int
    keep: int


class Copy(NamedTuple):
    """Copy the first `nbytes` bytes of each range from unit to unit. The source need not be in a row."""

    source: int
    target: int
    nbytes: int


class Discard(NamedTuple):
    """Give back the memory of units that nothing holds."""

    units: tuple[int, ...]


class Move(NamedTuple):
    """Move to a memory of `limit` units. Held units get new numbers; other units are dropped."""

    limit: int
    numbers: Mapping[int, int]
    """Old number -> new number, for every held unit."""


Operation = Map | Grant | Finish | Unmap | Copy | Discard | Move
Decision = Generator[Operation, None, T]


class CarriesOut(Protocol):
    """Anything that can carry out operations: a memory."""

    def apply(self, operation: Operation) -> None:
        """Do it, or raise and leave nothing half done."""


def carry_out(decision: Decision[T], memory: CarriesOut) -> T:
    """Run a decision: let `memory` do its operations, and return its result.

    An error of the memory is raised in the decision first, which may handle it; otherwise it is raised here.
    """
    try:
        operation = next(decision)
        while True:
            try:
                memory.apply(operation)
            except BaseException as error:
                operation = decision.throw(error)
            else:
                operation = next(decision)
    except StopIteration as stop:
        result: T = stop.value
        return result


class NoMemory:
    """A memory that does nothing, for books without one: another rank, a simulation, a replay."""

    def apply(self, operation: Operation) -> None:
        """Nothing to do."""
