"""What the books ask of a memory. Units are known by number, rows by their place in the books' tables.

A decision is a generator: it yields operations and gets an exception thrown in where one failed. So the code
that decides also takes back. It never yields while it takes back.

    books     grow("a") ── Map(row 3, at 2, units 7) ──> memory
                        <── done, or the driver's error ──
              return True, or undo and raise
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Map(NamedTuple):
    """Units that nobody else holds appear in a row, writable, from position `at` on. All or nothing.

    What a memory has at `at` and behind from before (of a decision that was taken back) goes first.
    """

    row: int
    at: int
    units: tuple[int, ...]
    new: tuple[int, ...]
    """Those of the units that do not exist yet. Should the operation fail, they still do not."""
    ahead: bool = False
    """Nobody needs them yet: a memory may do it in the background. `Finish` tells how it went."""


class Grant(NamedTuple):
    """Units that others hold appear in an empty row as well, read-only where a device can. All or nothing."""

    row: int
    units: tuple[int, ...]


class Finish(NamedTuple):
    """Wait for what is done ahead in a row. Raises what it failed with; then it is undone."""

    row: int


class Unmap(NamedTuple):
    """A row keeps its first `keep` units. They are gone from it for the books even if this raises."""

    row: int
    keep: int


class Copy(NamedTuple):
    """The first `nbytes` bytes of each range, from one unit to another. No row need show the source."""

    source: int
    target: int
    nbytes: int


class Discard(NamedTuple):
    """Give the memory of units back that nobody holds."""

    units: tuple[int, ...]


class Move(NamedTuple):
    """Have `limit` units from now on: those that live move to other numbers, the rest is new or gone."""

    limit: int
    numbers: Mapping[int, int]
    """New numbers by old ones."""


Operation = Map | Grant | Finish | Unmap | Copy | Discard | Move
Decision = Generator[Operation, None, T]


class CarriesOut(Protocol):
    """What a memory must be able to do."""

    def apply(self, operation: Operation) -> None:
        """Do it, or raise and leave nothing half done."""


def carry_out(decision: Decision[T], memory: CarriesOut) -> T:
    """Let a memory do what a decision asks; what it decided. Raises what the decision could not take."""
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
    """Does nothing: for books kept where the memory is not (another rank, a simulation, a replay)."""

    def apply(self, operation: Operation) -> None:
        """Nothing to do."""
