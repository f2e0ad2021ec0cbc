"""How sure a few repeats make us: intervals from ranks alone, with no assumption about the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

CONFIDENCE = 0.95
"""What intervals aim at."""
ENOUGH = 0.9
"""Less than this concludes nothing. Five repeats reach 0.9375, six 0.969, three only 0.75."""


@dataclass(frozen=True)
class Interval:
    """The median of `n` repeats, and [low, high], which holds the true median with `coverage`.

    `coverage` is exact for independent repeats: the chance that neither all of too many lie above nor below.
    """

    median: float
    low: float
    high: float
    n: int
    coverage: float

    @property
    def enough(self) -> bool:
        """True when there were repeats enough to conclude anything."""
        return self.coverage >= ENOUGH

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "coverage": round(self.coverage, 4)}


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest pair of order statistics, equally far from both ends, that covers `confidence`.

    With few values even the extremes do not: then they are the interval, and `coverage` says so.

        sorted    x1   x2   x3 … xn-2  xn-1  xn      P(x(k) <= true median <= x(n+1-k))
                  k=1  k=2                           = 1 - 2 P(Binomial(n, 1/2) < k)
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / float(2**n)

    k = max((k for k in range(1, (n + 1) // 2 + 1) if coverage(k) >= confidence), default=1)
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], n, max(0.0, coverage(k)))
