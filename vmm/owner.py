"""Which process owns an object. A forked child shares mapped memory with its parent but not the books of it,
so only the owner may use either."""

from __future__ import annotations

import os
import threading


class WrongProcess(RuntimeError):
    """A forked child used an object of its parent. Nothing was touched."""


class OwnerProcess:
    """Remembers which process made an object. `what` names the object in errors."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this process made the object; False in a forked child."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise WrongProcess in a forked child."""
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"this {self._what} belongs to process {self._pid}, from which this one was forked, and its "
                f"memory is shared with it: make another {self._what} here"
            )


class OwnedLock:
    """A lock that only its owner process may take. A forked child may inherit it locked, so it can't wait."""

    def __init__(self, what: str) -> None:
        self.owner = OwnerProcess(what)
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        """As `threading.Lock.acquire`; returns False in a forked child."""
        return self.owner.here and self._lock.acquire(blocking)

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> None:
        self.owner.require()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
