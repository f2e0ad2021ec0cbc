"""Service level objectives: which requests were served well enough to count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vattn.errors import ConfigError
from vattn.lab.bench.timeline import Timeline

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Slo:
    """Upper limits in milliseconds; None: no limit. A request is good if it keeps all of them.

    The meaning of vLLM's `--goodput`: failed requests are not good, and the TPOT of a single token is 0.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @staticmethod
    def parse(pairs: Sequence[str]) -> Slo | None:
        """`["ttft:200", "tpot:50"]`; None of no pairs. Raises ConfigError."""
        limits: dict[str, float] = {}
        for pair in pairs:
            name, _, value = pair.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in METRICS or name in limits or not 0 <= limit < math.inf:
                raise ConfigError(
                    f"--goodput {pair!r}: write one of {', '.join(METRICS)}, a colon and milliseconds, "
                    "each once, e.g. ttft:200 tpot:50"
                )
            limits[name] = limit
        return Slo(**limits) if limits else None

    def good(self, timeline: Timeline) -> bool:
        """With several outputs, the slowest one's TPOT counts."""
        if not timeline.success:
            return False
        measured = {
            "ttft": timeline.ttft,
            "tpot": max(timeline.tpots, default=0.0),
            "e2el": timeline.e2el,
        }
        for name, value in measured.items():
            limit = getattr(self, name)
            if limit is not None and (value is None or value * 1e3 > limit):
                return False
        return True

    def to_dict(self) -> dict[str, float]:
        limits = {name: getattr(self, name) for name in METRICS}
        return {name: limit for name, limit in limits.items() if limit is not None}
