"""The interface for observing an engine. Probes, recorders and the coordinator implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vattn.engine.in_flight import NewToken
    from vattn.engine.scheduler import Batch


class StepListener:
    """The engine calls these methods in this order, in the thread that steps it. By default they do nothing.

    A listener must be quick, because the step waits for it. It may read the engine at any call, and may
    change it only in `step_begins`.
    """

    def step_begins(self) -> None:
        """Called before a step begins."""

    def scheduled(self, batch: Batch) -> None:
        """Called before a batch is launched. Its requests have not advanced yet."""

    def launched(self, batch: Batch) -> None:
        """Called after a batch was launched. Its requests have advanced."""

    def settled(self, news: Sequence[NewToken]) -> None:
        """Called when the tokens of a step are known. A negative token means that sampling failed."""

    def step_ended(self, failed: bool) -> None:
        """Called when the step is over."""
