"""What a device's memory does for the books, and when.

    books     decide ──> operation ──> Memory.apply        Map, Grant, Unmap, Copy, Discard, Move, Finish
    engine    a step ──> submitted(event)
    time      ── epoch 1 (step) ── epoch 2 (copy) ── epoch 3 (step) ──>
                            Unmap: done when every epoch up to here is over

Memory owns time. Each piece of work that runs on the device by itself (a step, a copy in any direction) is
an epoch with an event behind it, and nothing is unmapped before all epochs that may touch it are over. What
only rewrites memory is ordered by the device's stream. Callers need not know: `apply`, `copy_out` and
`copy_in` open epochs themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vattn.kv.books.operations import Copy, Discard, Finish, Grant, Map, Move, Operation, Unmap
from vattn.kv.books.units import UnitLayout
from vattn.kv.memory.views import KVViews
from vattn.vmm.retire import Event, Retirement


class Memory(ABC):
    """One device's KV memory. Units have no address of their own unless a row shows them.

    A subclass sets `_views` and overrides what it needs of `map`, `grant`, `unmap`, `finish`, `discard`,
    `move`, `copy`, `read` and `write`. None of them needs to think of time.
    """

    def __init__(self, layout: UnitLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.time = Retirement()
        self._views: KVViews | None = None

    @property
    def views(self) -> KVViews:
        """All of the memory."""
        if self._views is None:
            raise RuntimeError("the KV cache is closed")
        return self._views

    works_ahead = False
    """Whether `Map` ahead of a need is done in the background."""

    # ------------------------------------------------------------------ called by the cache
    def apply(self, operation: Operation) -> None:
        """Do what the books decided, or raise and leave nothing half done."""
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
        """A copy on this device of the first `tokens` tokens of a request; may be a view."""
        with self.epoch():
            return self.read(row, units, tokens)

    def copy_in(self, row: int, units: list[int], start: int, data: torch.Tensor) -> int:
        """Put back what `copy_out` gave, from token `start` on. Returns the bytes written."""
        with self.epoch():
            return self.write(row, units, start, data)

    def submitted(self, event: Event | None) -> None:
        """Work was handed to the device; `event` marks its end (None: it is over)."""
        self.time.submit(event)
        self.time.poll()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """What is handed to the device inside is over before anything is unmapped that is given up after it.

        Also if it fails: the device may have got a part of it.
        """
        try:
            yield
        finally:
            self.time.submit(self.event())

    def event(self) -> Event | None:
        """Marks the work submitted so far; None on a CPU, where it is done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ------------------------------------------------------------------ what a subclass does
    def map(self, operation: Map) -> None:  # noqa: B027
        """See `operations.Map`. Nothing to do where units have fixed places."""

    def grant(self, operation: Grant) -> None:  # noqa: B027
        """See `operations.Grant`."""

    def unmap(self, operation: Unmap) -> None:  # noqa: B027
        """See `operations.Unmap`; done once that is safe."""

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
        """Put back what `read` gave, from token `start` on. Returns the bytes written."""

    @property
    def stall_seconds(self) -> float:
        """Time that somebody waited for units to be mapped."""
        return 0.0

    @property
    def driver_calls(self) -> dict[str, int]:
        """Driver calls by kind; empty where no driver is involved."""
        return {}

    def check(self, rows: dict[int, list[int]], made: int) -> None:  # noqa: B027
        """Raise AssertionError unless rows show these units and so many units exist."""

    def close(self) -> None:
        """Give everything back. Idempotent; may be tried again where it failed."""
        self._views = None
