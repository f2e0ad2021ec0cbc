"""Rules about block and page sizes: what the lengths that were served would have liked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vattn.lab.doctor.case import Case, Length
from vattn.lab.doctor.finding import Finding
from vattn.units import nbytes, number, percent

BLOCKS = (8, 16, 32, 64, 128, 256)
PAGES_HOST = tuple(4096 << n for n in range(10))
PAGES_CUDA = tuple((2 << 20) << n for n in range(4))
ACCEPTED = 0.05
"""Tail waste that isn't worth smaller units."""
WASTED = 0.10
MOMENTS = 8


class Size(NamedTuple):
    """A choice, and the share of mapped memory that tails would have wasted."""

    label: str
    option: str
    tokens: float
    waste: float


def waste(lengths: Sequence[Length], unit_tokens: float) -> float:
    """Share of what requests map that lies unused in last units, over their lives.

    A request is in memory while its output grows: it counts with `MOMENTS` lengths on the way, weighted by
    its output. Where outputs are unknown, its final length stands for it.
    """
    prompt, output, times = (np.array(column, np.float64) for column in zip(*lengths, strict=True))
    moments = (np.arange(MOMENTS) + 0.5) / MOMENTS
    tokens = np.ceil(prompt[:, None] + output[:, None] * np.where(output[:, None] > 0, moments, 1.0))
    weight = (times * np.maximum(output, 1.0))[:, None]
    mapped = np.ceil(tokens / unit_tokens) * unit_tokens
    return float(1.0 - (tokens * weight).sum() / (mapped * weight).sum())


def choices(case: Case) -> list[Size]:
    """From the largest unit to the smallest."""
    found: list[Size] = []
    if case.backend == "paged":
        sizes = sorted({*BLOCKS, int(case.unit_tokens or 16)}, reverse=True)
        found = [Size(f"{n} tokens", f"block_size={n}", float(n), waste(case.lengths, n)) for n in sizes]
    elif case.backend == "virtual" and case.token_bytes:
        pages = PAGES_HOST if case.device.startswith("cpu") else PAGES_CUDA
        ranges = 2 * int(case.model.get("num_layers") or 0)
        for layout, times in (("per_layer", ranges), ("interleaved", 1)):
            for page in pages:
                tokens = page * times / case.token_bytes
                if times and tokens >= 1:
                    option = f"kv_layout='{layout}', page_bytes={page}"
                    found.append(
                        Size(f"{nbytes(page)} {layout}", option, tokens, waste(case.lengths, tokens))
                    )
    return sorted(found, key=lambda size: -size.tokens)


def best(sizes: Iterable[Size]) -> Size | None:
    """The largest unit that wastes no more than is accepted; else the one that wastes least.

    Large units mean few table entries and driver calls, and only waste speaks against them.
    """
    ordered = list(sizes)
    return next(
        (s for s in ordered if s.waste <= ACCEPTED), min(ordered, key=lambda s: s.waste, default=None)
    )


def unit_size(case: Case) -> Finding | None:
    """Blocks or pages are too large, or much smaller than they need be, for these lengths."""
    if not case.lengths or not case.unit_tokens or case.backend not in ("paged", "virtual"):
        return None
    now = waste(case.lengths, case.unit_tokens)
    measured = case.steps.waste(case.steps.tail_waste) if case.steps is not None else now
    sizes = choices(case)
    chosen = best(sizes)
    if chosen is None:
        return None
    unit = "block" if case.backend == "paged" else "page"
    here = f"a {unit} holds {number(case.unit_tokens)} tokens; requests ended with {_quartiles(case.lengths)}"
    table = f"by these lengths this size wastes {percent(now)}; others: " + ", ".join(
        f"{s.label} {percent(s.waste)}" for s in _shown(sizes, chosen)
    )
    numbers = {"measured": measured, "now": now, "best": chosen.waste, "best_tokens": chosen.tokens}
    if measured >= WASTED and chosen.tokens < case.unit_tokens and chosen.waste <= now / 2:
        text = (
            f"{unit.capitalize()}s are too large for these requests: {percent(measured)} of the memory is "
            "unused tails."
        )
        evidence = (
            f"tails take {percent(measured)} of what requests map (threshold {percent(WASTED)})",
            here,
            table,
        )
        return Finding(
            "unit-size",
            "problem" if case.waits().memory >= WASTED else "advice",
            text,
            evidence,
            (f"{chosen.option}: about {percent(chosen.waste)} wasted",),
            numbers,
        )
    if case.backend == "paged" and case.unit_tokens <= 8 and chosen.tokens >= 4 * case.unit_tokens:
        text = "Blocks are smaller than these requests need: every block costs a table entry and a look-up."
        return Finding("unit-small", "advice", text, (here, table), (chosen.option,), numbers)
    return None


def _shown(sizes: list[Size], chosen: Size) -> list[Size]:
    at = sizes.index(chosen)
    return sizes[max(0, at - 3) : at + 3]


def _quartiles(lengths: Sequence[Length]) -> str:
    totals = np.repeat([n.prompt + n.output for n in lengths], [max(1, round(n.times)) for n in lengths])
    low, middle, high = np.percentile(totals, (25, 50, 75))
    return f"{low:,.0f} / {middle:,.0f} / {high:,.0f} tokens (quartiles)"
