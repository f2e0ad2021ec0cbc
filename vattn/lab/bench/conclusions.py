"""What a run shows, and what its own noise forbids to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from vattn.lab.bench.intervals import ENOUGH, Interval, interval

ALL_PAIRS = 4
"""More runs than this are compared with the first only: all pairs would fill pages."""

Repeats = Sequence[Mapping[str, float | int | None]]
"""The metrics of each repeat of one run, in order: repeat i of all runs lay side by side in time."""


def ratio(first: Repeats, second: Repeats, metric: str) -> Interval | None:
    """Of `metric`, first / second, taken within each repeat; None where that is no number."""
    ratios = []
    for one, other in zip(first, second, strict=True):
        a, b = one.get(metric), other.get(metric)
        if a is None or b is None or a < 0 or b <= 0:
            return None
        ratios.append(a / b)
    return interval(ratios) if ratios else None


def conclusions(runs: Mapping[str, Repeats], metrics: Sequence[str]) -> list[str]:
    """Plain sentences: for every metric which runs differ, and which can't be told apart."""
    names = list(runs)
    pairs = list(combinations(names, 2))
    if len(names) > ALL_PAIRS:
        pairs = [(names[0], other) for other in names[1:]]
    sentences: list[str] = []
    compared, coverage = 0, 1.0
    for metric in metrics:
        unclear: list[str] = []
        for one, other in pairs:
            found = ratio(runs[one], runs[other], metric)
            if found is None:
                continue
            if not found.enough:
                return [_too_few(found)]
            compared, coverage = compared + 1, min(coverage, found.coverage)
            if found.low == found.high == 1:
                sentences.append(f"{metric}: the same for {one} and {other} in every repeat.")
            elif found.excludes(1):
                sentences.append(
                    f"{metric}: {one} has {found.median:.3g} times that of {other} "
                    f"({found.low:.3g} to {found.high:.3g} at {found.coverage:.0%} over {found.n} repeats)."
                )
            else:
                unclear.append(f"{one} from {other} ({found.low:.3g} to {found.high:.3g})")
        if unclear:
            sentences.append(f"{metric}: the noise is too large to tell " + ", ".join(unclear) + ".")
    by_chance = compared * (1 - coverage)
    if by_chance >= 1:
        sentences.append(
            f"{compared} comparisons were made at {coverage:.0%}: about {by_chance:.0f} would look different "
            "by chance alone."
        )
    return sentences


def same_tokens(digests: Mapping[str, Sequence[str]]) -> str | None:
    """Whether all runs produced the same tokens, so that they differ in cost alone; None for one run."""
    if len(digests) < 2:
        return None
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, found in digests.items():
        groups.setdefault(tuple(found), []).append(name)
    if len(groups) == 1 and len(set(next(iter(groups)))) == 1:
        return "All runs produced the same tokens."
    together = "; ".join(", ".join(names) for names in groups.values())
    if len(groups) == 1:
        return f"The tokens of {together} differ from repeat to repeat."
    return f"Not all runs produced the same tokens; these did: {together}."


def _too_few(found: Interval) -> str:
    return (
        f"{found.n} repeat{'s' * (found.n > 1)} cannot tell the runs apart: the widest interval covers "
        f"{found.coverage:.0%}, {ENOUGH:.0%} are needed; ask for --repeats 5 or more."
    )
