"""Capacity planning: the highest request rate that still meets an SLO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vattn.lab.bench.slo import Slo
from vattn.lab.simulator.results import Latencies
from vattn.lab.simulator.setup import Simulation

_PRECISION = 1.02
_SLOWEST = 1e-3
"""Requests per second; below, the answer is none."""


@dataclass(frozen=True)
class Capacity:
    """`rate` requests per second (0: not even one alone), of which `attained` were good."""

    rate: float
    attained: float
    runs: int


def attainment(simulation: Simulation, slo: Slo) -> float:
    """Share of all requests that keep every limit."""
    return Latencies(simulation).good(slo) / max(1, len(simulation.outcome.requests))


def highest_rate(
    run: Callable[[float], Simulation], slo: Slo, *, most: float, share: float = 0.9
) -> Capacity:
    """The highest rate, to 2 %, at which at least `share` of the requests are good.

    `run(rate)` simulates Poisson arrivals at that rate; `most`: what the engine can complete, its
    throughput when everything arrives at once (above it a queue builds up, which a short load may not
    show). Assumes that more traffic is never better.
    """
    runs, low, high, best = 0, 0.0, most, 0.0

    def good(rate: float) -> float:
        nonlocal runs
        runs += 1
        return attainment(run(rate), slo)

    attained = good(high)
    if attained >= share:
        return Capacity(high, attained, runs)
    while high > max(low * _PRECISION, _SLOWEST):
        middle = (low * high) ** 0.5 if low else high / 4
        attained = good(middle)
        if attained >= share:
            low, best = middle, attained
        else:
            high = middle
    return Capacity(low, best, runs)
