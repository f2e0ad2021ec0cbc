"""Rules about the measurement itself."""

from __future__ import annotations

from vattn.lab.bench.intervals import ENOUGH
from vattn.lab.doctor.case import Case
from vattn.lab.doctor.finding import Finding
from vattn.units import number, percent

SPREAD = 0.10
LOOKED_AT = ("output_throughput", "median_ttft_ms", "median_tpot_ms")


def noise(case: Case) -> Finding | None:
    """Repeats differ too much, or are too few, to compare with."""
    if case.simulated:
        return None
    found = {key: case.summary[key] for key in LOOKED_AT if case.summary.get(key)}
    if not found:
        return None
    spread = {k: (s["high"] - s["low"]) / s["median"] for k, s in found.items() if s["median"]}
    worst = max(spread, key=lambda k: spread[k], default=None)
    repeats = max(int(s["n"]) for s in found.values())
    few = any(s.get("coverage", 1.0) < ENOUGH for s in found.values())
    if not few and (worst is None or spread[worst] < SPREAD):
        return None
    evidence = (
        [f"{repeats} repeats; intervals need {percent(ENOUGH)} coverage, which five repeats reach"]
        if few
        else []
    )
    if worst is not None and spread[worst] >= SPREAD:
        s = found[worst]
        evidence.append(
            f"{worst} lies between {number(s['low'])} and {number(s['high'])}: {percent(spread[worst])} of "
            f"its median (threshold {percent(SPREAD)})"
        )
    advice = ("more repeats (--repeats 9), longer runs, and nothing else on the machine",)
    sentence = "The measurement is noisy: small differences between runs mean nothing."
    return Finding("noise", "note", sentence, tuple(evidence), advice, dict(spread))


def failures(case: Case) -> Finding | None:
    """Some requests got no answer."""
    if not case.failed:
        return None
    evidence = (f"{case.failed:,} of {case.failed + case.finished:,} requests failed", *case.errors[:3])
    return Finding("failures", "problem", "Requests failed.", evidence, ("see the errors of `requests`",))
