"""The interface of a memory: it carries out the operations of the books on one device, when it is safe.

    books     decide ──> operation ──> Memory.apply        Map, Grant, Unmap, Copy, Discard, Move, Finish
    engine    a step ──> submitted(event)
    time      ── epoch 1 (step) ── epoch 2 (copy) ── epoch 3 (step) ──>
                            Unmap: done when every epoch up to here is over

A memory keeps track of epochs. An epoch is work that runs on the device asynchronously (a step, or a copy in
any direction) and has an event at its end. Nothing is unmapped before all epochs that may touch it are over.
Writes to memory need no epoch, since the device's stream orders them. Callers need not care: `apply`,
`copy_out` and `copy_in` open epochs themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from vattn.kv.books.operations import Copy, Discard, Finish, Grant, Map, Move, Operation, Unmap
from vattn.kv.books.units import UnitLayout
from vattn.kv.memory.views import KVViews
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.driver import Driver
from vattn.vmm.retire import Event, Retirement

if TYPE_CHECKING:
    import torch


class Memory(ABC):
    """KV memory of one device. A unit may have an address only while it is in a row.

    `driver`: of the device. With an `AccountingDriver` there are books and driver calls but no bytes: nothing
    is allocated or copied within it, and torch is needed only to swap.

    A subclass implements `make_views`, `copy`, `read` and `write`, and overrides what it needs of `map`,
    `grant`, `unmap`, `finish`, `discard` and `move`. None of them needs to care about epochs.
    """

    def __init__(self, layout: UnitLayout, driver: Driver) -> None:
        self.layout = layout
        self.has_bytes = not isinstance(driver, AccountingDriver)
        self.time = Retirement()
        self._device_of = driver
        self._views: KVViews | None = None
        self._closed = False

    @cached_property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._device_of.device

    @property
    def views(self) -> KVViews:
        """All of the memory; made when it is first looked at."""
        if self._closed:
            raise RuntimeError("the KV cache is closed")
        if self._views is None:
            self._views = self.make_views()
        return self._views

    works_ahead = False
    """Whether `Map(ahead=True)` runs in the background."""

    # ------------------------------------------------------------------ called by the cache
    def apply(self, operation: Operation) -> None:
        """Carry out an operation of the books, or raise and leave nothing half done."""
        match operation:
            case Map():
                self.map(operation)
            case Grant():
                self.grant(operation)
            case Unmap():
                self.unmap(operation)
            case Copy():
                with self.epoch():
                    self.copy(operation)
            case Discard():
                self.discard(operation)
            case Move():
                with self.epoch():
                    self.move(operation)
            case Finish():
                self.finish(operation)

    def copy_out(self, row: int, units: list[int], tokens: int) -> torch.Tensor:
        """The first `tokens` tokens of a request, as one tensor on this device; may be a view."""
        with self.epoch():
            return self.read(row, units, tokens)

    def copy_in(self, row: int, units: list[int], start: int, data: torch.Tensor) -> int:
        """Write back what `copy_out` returned, from token `start` on. Returns the bytes written."""
        with self.epoch():
            return self.write(row, units, start, data)

    def submitted(self, event: Event | None) -> None:
        """Record that work was submitted to the device. `event` marks its end; None if it is over."""
        self.time.submit(event)
        self.time.poll()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Make the work submitted inside an epoch: later unmaps wait until it is over.

        This holds even if an error is raised inside, because part of the work may have been submitted.
        """
        try:
            yield
        finally:
            self.time.submit(self.event())

    def event(self) -> Event | None:
        """An event behind the work submitted so far; None on a CPU, where that work is done."""
        if not self.has_bytes or self.device.type != "cuda":
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ------------------------------------------------------------------ implemented by subclasses
    @abstractmethod
    def make_views(self) -> KVViews:
        """All of the memory, as tensors."""

    def map(self, operation: Map) -> None:  # noqa: B027
        """See `operations.Map`. Does nothing by default, for units with fixed places."""

    def grant(self, operation: Grant) -> None:  # noqa: B027
        """See `operations.Grant`."""

    def unmap(self, operation: Unmap) -> None:  # noqa: B027
        """See `operations.Unmap`. The unmapping happens once it is safe."""

    def finish(self, operation: Finish) -> None:  # noqa: B027
        """See `operations.Finish`."""

    def discard(self, operation: Discard) -> None:  # noqa: B027
        """See `operations.Discard`."""

    def move(self, operation: Move) -> None:
        """See `operations.Move`."""
        raise NotImplementedError(f"{type(self).__name__} does not move")

    @abstractmethod
    def copy(self, operation: Copy) -> None:
        """See `operations.Copy`."""

    @abstractmethod
    def read(self, row: int, units: list[int], tokens: int) -> torch.Tensor:
        """The first `tokens` tokens of a row with these units, as one tensor; may be a view."""

    @abstractmethod
    def write(self, row: int, units: list[int], start: int, data: torch.Tensor) -> int:
        """Write back what `read` returned, from token `start` on. Returns the bytes written."""

    @property
    def stall_seconds(self) -> float:
        """Seconds that steps waited for units to be mapped."""
        return 0.0

    @property
    def driver_calls(self) -> dict[str, int]:
        """Number of driver calls by kind; empty if there is no driver."""
        return {}

    def check(self, rows: dict[int, list[int]], made: int) -> None:  # noqa: B027
        """Raise AssertionError unless the rows hold exactly these units and `made` units exist."""

    def close(self) -> None:
        """Give everything back. Idempotent; may be called again after a failure."""
        self._closed = True
        self._views = None
