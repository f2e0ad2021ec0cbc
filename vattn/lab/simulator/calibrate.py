"""Step times fitted to measured ones: the columns of a bench JSON's `steps`.

    seconds = a + b x prompt tokens + c x decodes + d x KV bytes read + e x (query, key) pairs     all >= 0

Least squares on errors relative to the fit, so that a decode step of 20 ms counts as much as a prompt step
of 2 s, and so that noise does not pull the sum: dividing by the measured time instead would favour too
small a fit, as slow outliers would count least.

The KV that decodes read is `decode_kv_tokens`; a JSON without that column (or `prefill_pairs`) has its
`logical` bytes taken for it in steps with decodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vattn.errors import ConfigError
from vattn.lab.simulator.cost import StepCost
from vattn.lab.simulator.work import StepWork

Array = npt.NDArray[np.float64]
FEATURES = ("step", "prompt_token", "decode", "kv_byte", "pair")
_ROUNDS = 30
"""Of fitting and weighting by the fit; it settles within a few."""


class Residual(NamedTuple):
    """How far the fit is from the steps it was made of."""

    steps: int
    median: float
    """Median of |fitted - measured| / measured."""
    p90: float
    total: float
    """(sum fitted - sum measured) / sum measured."""


@dataclass(frozen=True)
class Fit:
    """Seconds per unit of each feature, and how well they fit."""

    step: float
    prompt_token: float
    decode: float
    kv_byte: float
    pair: float
    residual: Residual

    def model(self, kv_token_bytes: int) -> FittedCost:
        """The cost model of a cache whose tokens take `kv_token_bytes`."""
        return FittedCost(self, kv_token_bytes)

    def to_dict(self) -> dict[str, Any]:
        coefficients = {f"{name}_s": getattr(self, name) for name in FEATURES}
        return {**coefficients, "residual": self.residual._asdict()}

    def sentence(self) -> str:
        r = self.residual
        return (
            f"step times are fitted to {r.steps:,} measured steps: half of them are within {r.median:.1%}, "
            f"nine in ten within {r.p90:.1%}; their sum is off by {r.total:+.1%}"
        )


class FittedCost:
    """A `CostModel` of fitted coefficients. Driver calls were part of what was measured: no extra."""

    def __init__(self, fit: Fit, kv_token_bytes: int) -> None:
        self.fit = fit
        self._kv_token = fit.kv_byte * kv_token_bytes

    def step(self, work: StepWork) -> StepCost:
        fit = self.fit
        seconds = (
            fit.step
            + fit.prompt_token * (work.tokens - work.decodes)
            + fit.decode * work.decodes
            + self._kv_token * work.decode_kv
            + fit.pair * work.pairs
        )
        return StepCost(seconds, 0.0)

    def describe(self) -> dict[str, float | str]:
        figures = {name: getattr(self.fit, name) for name in FEATURES}
        residual = {f"residual_{name}": value for name, value in self.fit.residual._asdict().items()}
        return {"kind": "fitted", **figures, **residual}


def calibrate(file: Path, run: str | None = None) -> Fit:
    """Fit to all repeats of `run` (None: the first run) of a bench JSON. Raises ConfigError."""
    try:
        report = json.loads(file.read_text())
        runs = {entry["name"]: entry["repeats"] for entry in report["runs"]}
        token_bytes = report["model"]["token_bytes"]
        name = next(iter(runs)) if run is None or run not in runs else run
        steps = [repeat["steps"] for repeat in runs[name] if repeat.get("steps")]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as why:
        raise ConfigError(f"{file} is no bench JSON with runs and steps: {why!r}") from why
    if not steps:
        raise ConfigError(f"{file}: run {name!r} has no steps to fit to; record them with vattn bench")
    return fit_steps(steps, token_bytes)


def fit_steps(columns: list[Mapping[str, Any]], token_bytes: int) -> Fit:
    """Fit to the steps of several repeats. Raises ConfigError when there are too few."""
    rows = np.concatenate([_features(c, token_bytes) for c in columns])
    seconds = np.concatenate([np.asarray(c["duration_s"], np.float64) for c in columns])
    timed = seconds > 0
    rows, seconds = rows[timed], seconds[timed]
    if len(seconds) < 2 * len(FEATURES):
        raise ConfigError(f"{len(seconds)} steps are too few to fit {len(FEATURES)} coefficients to")
    found = _nonnegative(rows / seconds[:, None], np.ones(len(seconds)))
    for _ in range(_ROUNDS):
        fitted = np.maximum(rows @ found, 1e-9)
        found = _nonnegative(rows / fitted[:, None], seconds / fitted)
    fitted = rows @ found
    error = np.abs(fitted - seconds) / seconds
    residual = Residual(
        len(seconds),
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        float(fitted.sum() / seconds.sum() - 1),
    )
    return Fit(**dict(zip(FEATURES, map(float, found), strict=True)), residual=residual)


def _features(columns: Mapping[str, Any], token_bytes: int) -> Array:
    tokens, decodes, logical = (
        np.asarray(columns[name], np.float64) for name in ("tokens", "decodes", "logical")
    )
    kv = np.where(decodes > 0, logical, 0.0)
    if "decode_kv_tokens" in columns:
        kv = np.asarray(columns["decode_kv_tokens"], np.float64) * token_bytes
    pairs = np.asarray(columns.get("prefill_pairs", np.zeros(len(tokens))), np.float64)
    return np.stack([np.ones(len(tokens)), tokens - decodes, decodes, kv, pairs], axis=1)


def _nonnegative(rows: Array, target: Array) -> Array:
    """argmin |rows x - target| over x >= 0.

    The optimum is the plain least-squares solution on its own support, so with five columns the best
    support is found by trying all 31.
    """
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    rows = rows / scale
    best, least = np.zeros(rows.shape[1]), float(target @ target)
    for size in range(1, rows.shape[1] + 1):
        for support in combinations(range(rows.shape[1]), size):
            solution, *_ = np.linalg.lstsq(rows[:, support], target, rcond=None)
            if (solution < 0).any():
                continue
            rest = rows[:, support] @ solution - target
            if float(rest @ rest) < least * (1 - 1e-12):
                least = float(rest @ rest)
                best = np.zeros(rows.shape[1])
                best[list(support)] = solution
    result: Array = best / scale
    return result
