"""Events that complete when a test says so."""

from __future__ import annotations

from collections.abc import Callable


class FakeEvent:
    """A step on a device that the test drives; `finish` is also what `synchronize` does.

    `on_finish` runs once, when the step ends: the last moment it may touch memory.
    """

    def __init__(self, on_finish: Callable[[], None] = lambda: None) -> None:
        self.done = False
        self.waited = 0
        self._on_finish = on_finish

    def finish(self) -> None:
        if not self.done:
            self._on_finish()
            self.done = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.finish()
