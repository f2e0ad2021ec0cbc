"""When requests are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vattn.errors import ConfigError

ArrivalKind = Literal["poisson", "gamma", "constant", "at-once", "trace"]


@dataclass(frozen=True)
class Arrivals:
    """An open-loop arrival process: requests are sent at these times, whatever the engine does.

    - `poisson`: independent arrivals, `rate` a second on average.
    - `gamma`: gaps are gamma-distributed with shape `burstiness`: 1 is Poisson, less comes in bursts,
      more is evener (vLLM's `--burstiness`).
    - `constant`: a gap of exactly 1 / rate.
    - `at-once`: everything at time 0.
    - `trace`: the times the workload brings, `time_scale` times as far apart.

    The first request is sent at time 0 (`trace`: when the trace says so). In a session only the first
    turn arrives this way; later ones follow the answers.
    """

    kind: ArrivalKind
    rate: float = math.inf
    burstiness: float = 1.0
    time_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ArrivalKind):
            raise ConfigError(f"arrivals are one of {', '.join(get_args(ArrivalKind))}, not {self.kind!r}")
        if self.kind in ("poisson", "gamma", "constant") and not 0 < self.rate < math.inf:
            raise ConfigError(f"{self.kind} arrivals need a rate above 0 a second, got {self.rate}")
        for name, value in (("burstiness", self.burstiness), ("time_scale", self.time_scale)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")

    def times(self, n: int) -> list[float]:
        """`n` times in seconds, rising from 0. Not for `trace`, where the workload has them."""
        if self.kind == "at-once":
            return [0.0] * n
        if self.kind == "constant":
            return [i / self.rate for i in range(n)]
        if self.kind == "trace":
            raise ConfigError("trace arrivals need a workload with arrival times; this one has none")
        shape = self.burstiness if self.kind == "gamma" else 1.0
        rng = np.random.default_rng(self.seed)
        gaps = rng.gamma(shape, 1 / (self.rate * shape), max(0, n - 1))
        return [0.0, *np.cumsum(gaps).tolist()][:n]

    def describe(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("poisson", "gamma", "constant"):
            record["rate"] = self.rate
        if self.kind in ("poisson", "gamma"):
            record |= {"burstiness": self.burstiness if self.kind == "gamma" else 1.0, "seed": self.seed}
        if self.kind == "trace":
            record["time_scale"] = self.time_scale
        return record
