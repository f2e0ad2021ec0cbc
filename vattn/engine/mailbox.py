"""Mailboxes: the engine's loop puts what is new for a client into the client's mailbox."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vattn.engine.deltas import RequestDelta


class Mailbox(ABC):
    """The mailbox of one client. The loop holds only a weak reference to it. If the client drops the
    mailbox, its requests end."""

    closed = False
    """True after the client has left."""

    @property
    def gone(self) -> bool:
        """True if no client will read the mailbox any more."""
        return self.closed

    @abstractmethod
    def put(self, deltas: Sequence[RequestDelta]) -> None:
        """Store what one step produced. The loop's thread calls this; it must not block."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Tell the client that the engine has ended."""


class QueueMailbox(Mailbox):
    """A mailbox for a client thread that blocks until reports arrive.

    The client holds `lease` (`with mailbox.lease:`) while it waits. The interpreter itself releases this
    lock, so a client that leaves through any exception, at any instruction, counts as gone. A client that
    lives longer than one call sets `kept`. It then leaves by setting `closed`, or when nothing refers to the
    mailbox any more.
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
        """Wait for the next reports. Returns none if the time is up. Raises the error given to `fail`."""
        try:
            news = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if isinstance(news, Exception):
            self._news.put(news)  # so that the next call raises it too
            raise news
        return news
