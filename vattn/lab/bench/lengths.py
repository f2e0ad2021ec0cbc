"""Distributions of prompt and output lengths."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vattn.errors import ConfigError

LengthKind = Literal["loguniform", "uniform", "fixed", "bimodal"]


@dataclass(frozen=True)
class Lengths:
    """Token counts in [low, high].

    - `loguniform`: most are short, a few are long, as in served traffic.
    - `uniform`: every length alike. `fixed`: always `high`.
    - `bimodal`: `high` with probability `long_share`, else `low`: chat beside documents.
    """

    kind: LengthKind
    low: int
    high: int
    long_share: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in get_args(LengthKind):
            known = ", ".join(get_args(LengthKind))
            raise ConfigError(f"lengths are one of {known}, not {self.kind!r}")
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"lengths need 1 <= low <= high, got {self.low}:{self.high}")
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"the share of long ones must be in [0, 1], got {self.long_share}")

    @staticmethod
    def parse(text: str, default: LengthKind = "loguniform") -> Lengths:
        """`64` (fixed), `16:512` (the default kind), or a kind and its numbers: `uniform:16:128`,
        `bimodal:32:1024:0.2` (a fifth are 1024). Raises ConfigError."""
        match = re.fullmatch(r"(?:([a-z]+):)?(\d+)(?::(\d+))?(?::(0?\.\d+|[01](?:\.0*)?))?", text.strip())
        if not match or (match[4] and match[1] != "bimodal"):
            raise ConfigError(
                f"{text!r} is not a distribution of lengths; write 64, 16:512, uniform:16:128 or "
                "bimodal:32:1024:0.2"
            )
        low, high = int(match[2]), int(match[3] or match[2])
        kind = match[1] or (default if match[3] else "fixed")
        return Lengths(kind, low, high, float(match[4] or 0.5))  # type: ignore[arg-type]

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        """`n` lengths."""
        if self.kind == "fixed":
            return [self.high] * n
        if self.kind == "uniform":
            return [int(x) for x in rng.integers(self.low, self.high + 1, n)]
        if self.kind == "bimodal":
            return [self.high if long else self.low for long in rng.random(n) < self.long_share]
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), n)).astype(int)
        return [int(x) for x in np.clip(drawn, self.low, self.high)]

    def describe(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": self.kind, "low": self.low, "high": self.high}
        return {**record, "long_share": self.long_share} if self.kind == "bimodal" else record
