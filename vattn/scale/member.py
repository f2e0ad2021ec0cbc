"""An engine's side of the coordinator file. It writes what it holds and follows the budget that it reads."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from vattn.errors import DriverError, VattnError
from vattn.scale.coordinator import Coordinator, may_hold
from vattn.scale.ledger import CoordinatorError, EngineEntry, Ledger

BEAT_S = 0.5


class Budgeted(Protocol):
    """The part of a KV cache that this module uses."""

    @property
    def budget_bytes(self) -> int: ...

    def tokens_in(self, budget_bytes: int) -> int: ...


@dataclass(frozen=True)
class Report:
    """What an engine reports about itself."""

    in_use: int
    """Bytes that live requests need."""
    status: dict[str, Any] = field(default_factory=dict)


def smallest_budget(kv: Budgeted, tokens: int) -> int:
    """The smallest budget in bytes that fits a request of `tokens` tokens, at most the cache's budget."""
    low, high = 0, kv.budget_bytes
    while low < high:
        middle = (low + high) // 2
        if kv.tokens_in(middle) >= tokens:
            high = middle
        else:
            low = middle + 1
    return low


class Member:
    """One engine in the file.

    `resize` gives the engine another budget. If it raises VattnError or DriverError, it must have changed
    nothing. `report` is called at most every `BEAT_S` seconds. Not thread-safe: call it from the thread that
    steps the engine.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        name: str,
        device: str,
        asked: int,
        floor: int,
        resize: Callable[[int], None],
        report: Callable[[], Report],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.coordinator = coordinator
        self._resize = resize
        self._report = report
        self._clock = clock
        self._due = 0.0
        self._resting = False
        self._entry = coordinator.join(name=name, device=device, asked=asked, floor=floor)
        self._total: int | None = coordinator.read().totals.get(device)
        self._left = False
        try:
            if self._entry.budget != asked:
                self._resize(self._entry.budget)
        except BaseException:
            self.leave()
            raise

    @property
    def entry(self) -> EngineEntry:
        """The engine's entry, as last written or read."""
        return copy.deepcopy(self._entry)

    def beat(self) -> None:
        """Called before each step. Twice a second, it writes the engine's state and reads its budget.

        Does not wait: if the file is locked, it tries again at the next step.
        """
        self._resting = False
        if self._clock() >= self._due:
            self.exchange()

    def rest(self) -> None:
        """Write once that no work is left, because there may be no beat for a long time."""
        if not self._resting:
            self._resting = True
            due = self._due
            self.exchange()
            if due > self._clock():
                self._due = due  # many short runs still have their beats, while they run

    def exchange(self) -> None:
        """Write the engine's state, read its new budget and follow it."""
        if self._left:
            return
        report = self._report()
        own, before = self._entry, self._entry.budget
        try:
            with self.coordinator.try_change() as ledger:
                if ledger is None:
                    return
                self._find(ledger)
                own.in_use, own.status, own.seen = report.in_use, report.status, time.time()
                wanted = may_hold(ledger, own)
                own.budget = max(before, wanted)  # until it has shrunk, it holds what it held
        except (CoordinatorError, OSError) as error:
            own.error = str(error)  # the engine goes on with what it has
        else:
            self._follow(wanted, before)
        self._due = self._clock() + BEAT_S

    def leave(self) -> None:
        """Remove the engine from the file. Idempotent. The file may be missing or unusable."""
        if self._left:
            return
        self._left = True
        try:
            self.coordinator.leave(self._entry.id)
        except (CoordinatorError, OSError):
            return  # it drops out when the process ends

    def _find(self, ledger: Ledger) -> None:
        """Read what others set in this entry. If the file was started over, enter the engine again."""
        own = self._entry
        for index, entry in enumerate(ledger.engines):
            if entry.id == own.id:
                own.limit = entry.limit
                self._total = ledger.totals.get(own.device)
                ledger.engines[index] = own
                return
        ledger.engines.append(own)
        if self._total is not None:
            ledger.totals.setdefault(own.device, self._total)

    def _follow(self, wanted: int, before: int) -> None:
        own = self._entry
        own.error = None
        if wanted == before:
            return
        try:
            self._resize(wanted)
            own.budget = wanted
        except (VattnError, DriverError) as error:
            own.budget, own.error = before, str(error)
        # If nothing can be written now, the next beat tells; until then others count the larger budget.
        with suppress(CoordinatorError, OSError), self.coordinator.try_change() as ledger:
            if ledger is not None:
                self._find(ledger)
