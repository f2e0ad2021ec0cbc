"""What an experiment is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vattn.lab.experiments.setting import Setting

Parts = Mapping[str, Any]
"""By name, slimmed reports of `vattn.lab.bench` (`Setting.compare`, `Setting.kernels`); plain JSON."""


class Experiment(ABC):
    """A question, the runs that answer it, a figure and three sentences.

    `findings` and `draw` see nothing but the parts, so that a record can be read and drawn again anywhere.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    times: ClassVar[bool]
    """True where it measures time: then it wants a machine with nothing else to do."""

    @abstractmethod
    def measure(self, setting: Setting) -> dict[str, Any]:
        """Run everything; with `setting.smoke` in seconds."""

    @abstractmethod
    def findings(self, parts: Parts) -> tuple[str, str, str]:
        """Three sentences; every number in them comes from the parts."""

    @abstractmethod
    def draw(self, parts: Parts, figure: Figure) -> None:
        """Draw on an empty figure."""
