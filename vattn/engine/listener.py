"""Look on while an engine works: probes, recorders and the coordinator listen, they replace nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vattn.engine.engine import NewToken
    from vattn.engine.scheduler import Batch


class StepListener:
    """Called in the thread that steps the engine, in this order; the methods do nothing by default.

    A listener must be quick. It may read the engine, and change it only in `step_begins`.
    """

    def step_begins(self) -> None:
        """A step is about to begin."""

    def scheduled(self, batch: Batch) -> None:
        """A batch is about to be launched; its requests are still where they were before."""

    def launched(self, batch: Batch) -> None:
        """A batch was launched, and its requests have moved on."""

    def settled(self, news: Sequence[NewToken]) -> None:
        """Tokens of a step are known. Negative ones are none."""

    def step_ended(self, failed: bool) -> None:
        """The step is over."""
