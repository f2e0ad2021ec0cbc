"""Arrival processes have the statistics they promise."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.from_options import choose_arrivals
from vattn.lab.bench.trace import TraceRow, TraceWorkload
from vattn.lab.bench.workload import RandomWorkload

RANDOM = RandomWorkload(3)
TRACE = TraceWorkload(Path("t.jsonl"), (TraceRow(0.0, 5, 2),), "own")


def gaps(arrivals: Arrivals, n: int = 8000) -> np.ndarray:
    return np.diff(arrivals.times(n))


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        (Arrivals("poisson", 4.0), 1.0),
        (Arrivals("gamma", 4.0, burstiness=1.0), 1.0),
        (Arrivals("gamma", 4.0, burstiness=0.25), 2.0),
        (Arrivals("gamma", 4.0, burstiness=4.0), 0.5),
    ],
)
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(
    arrivals: Arrivals, variation: float
) -> None:
    found = gaps(arrivals)
    assert found.mean() == pytest.approx(0.25, rel=0.06)
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.06), "1 / sqrt(burstiness)"


def test_poisson_gaps_have_no_memory() -> None:
    found = gaps(Arrivals("poisson", 1.0))
    for t in (0.5, 1.0, 2.0):
        assert (found > t).mean() == pytest.approx(math.exp(-t), abs=0.02)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert Arrivals("constant", 4.0).times(4) == [0.0, 0.25, 0.5, 0.75]


def test_at_once_is_at_once() -> None:
    assert Arrivals("at-once").times(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["poisson", "gamma", "constant", "at-once"])
def test_the_first_comes_at_zero_and_time_never_runs_back(kind: str) -> None:
    for n in (0, 1, 50):
        times = Arrivals(kind, 2.0).times(n)  # type: ignore[arg-type]
        assert len(times) == n and times[:1] == [0.0] * min(n, 1)
        assert all(a <= b for a, b in pairwise(times))


def test_seeds_repeat() -> None:
    assert Arrivals("poisson", 2.0, seed=5).times(9) == Arrivals("poisson", 2.0, seed=5).times(9)
    assert Arrivals("poisson", 2.0, seed=5).times(9) != Arrivals("poisson", 2.0, seed=6).times(9)


def test_what_is_asked_for_decides_the_process() -> None:
    assert choose_arrivals(RANDOM).kind == "at-once"
    assert choose_arrivals(RANDOM, rate=math.inf).kind == "at-once"
    assert choose_arrivals(RANDOM, rate=3.0).describe() == {
        "kind": "poisson", "rate": 3.0, "burstiness": 1.0, "seed": 0,
    }  # fmt: skip
    assert choose_arrivals(RANDOM, rate=3.0, burstiness=0.5) == Arrivals("gamma", 3.0, 0.5)
    assert choose_arrivals(RANDOM, kind="constant", rate=3.0) == Arrivals("constant", 3.0)
    assert choose_arrivals(TRACE).kind == "trace"
    assert choose_arrivals(TRACE, rate=2.0).kind == "poisson"


@pytest.mark.parametrize(
    "wishes",
    [
        {"kind": "trace"},
        {"kind": "weekly"},
        {"kind": "poisson"},
        {"kind": "at-once", "rate": 3.0},
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": math.nan},
        {"burstiness": 0.5},
        {"rate": 3.0, "burstiness": 0.0},
        {"kind": "constant", "rate": 3.0, "burstiness": 2.0},
    ],
)
def test_contradictions_are_refused(wishes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        choose_arrivals(RANDOM, **wishes)  # type: ignore[arg-type]
