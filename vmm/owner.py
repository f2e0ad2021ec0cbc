"""Which process a thing belongs to: memory mapped here is shared with forked children, its books are not."""

from __future__ import annotations

import os
import threading


class WrongProcess(RuntimeError):
    """Something is used in a forked child that belongs to the parent; nothing was touched."""


class OwnerProcess:
    """Remembers which process made something. `what` names it in errors."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """False in a child that was forked since."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise WrongProcess in a forked child."""
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"this {self._what} belongs to process {self._pid}, from which this one was forked, and its "
                f"memory is shared with it: make another {self._what} here"
            )


class OwnedLock:
    """A lock that only its owner may take. A child might inherit it locked, so it must not even wait."""

    def __init__(self, what: str) -> None:
        self.owner = OwnerProcess(what)
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        """As of a lock; False in a forked child."""
        return self.owner.here and self._lock.acquire(blocking)

    def release(self) -> None:
        """As of a lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self.owner.require()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
