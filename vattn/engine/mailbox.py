"""Where the engine's loop puts what is new for one client."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vattn.engine.deltas import RequestDelta


class Mailbox(ABC):
    """One client's. The loop refers to it weakly: who drops its mailbox ends its requests."""

    closed = False
    """The client has left."""

    @property
    def gone(self) -> bool:
        """True when nobody will read it any more."""
        return self.closed

    @abstractmethod
    def put(self, deltas: Sequence[RequestDelta]) -> None:
        """What one step brought. Called in the loop's thread; must not wait."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """The engine is gone."""


class QueueMailbox(Mailbox):
    """A mailbox that a thread waits at.

    A client holds `lease` (`with mailbox.lease:`) while it waits. The lock is let go by the interpreter
    itself, so a client that leaves by any exception, at any instruction, counts as gone. A client that lives
    longer than one call sets `kept`; then it leaves by `closed`, or when nothing refers to it any more.
    """

    def __init__(self) -> None:
        self.lease = threading.Lock()
        self.kept = False
        self._news: queue.SimpleQueue[Sequence[RequestDelta] | Exception] = queue.SimpleQueue()

    @property
    def gone(self) -> bool:
        return self.closed or not (self.kept or self.lease.locked())

    def put(self, deltas: Sequence[RequestDelta]) -> None:
        self._news.put(deltas)

    def fail(self, error: Exception) -> None:
        self._news.put(error)

    def get(self, timeout_s: float | None = None) -> Sequence[RequestDelta]:
        """Wait for the next reports; none when the time is up. Raises what `fail` was given."""
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if isinstance(news, Exception):
            self._news.put(news)  # for whoever asks again
            raise news
        return news
