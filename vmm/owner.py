"""Which process owns an object. A forked child shares mapped memory with its parent but not the books of it,
so only the owner may use either."""

from __future__ import annotations

import os


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
