"""Divides a device's KV memory between engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """What one engine needs at least and wants at most, in bytes."""

    floor: int
    ask: int


def divide(total: int, claims: Sequence[Claim]) -> list[int]:
    """Equal shares, but no engine gets less than its floor or more than its ask (max-min fairness).

        level  ────────────┬──┬─────────────┬──┐          share = level, within floor .. ask
                 ┌──┐      │  │   ┌──┐      │  │
          floor ─┴──┴──    └──┘   └──┘ ask  └──┘          the others share what one does not ask for

    The level is as high as `total` allows. Raises ValueError if the floors do not fit.
    """
    floors = sum(claim.floor for claim in claims)
    if floors > total:
        raise ValueError(f"{len(claims)} engines need {floors:,} bytes at least; the total is {total:,}")

    def shares(level: int) -> list[int]:
        return [max(floor, min(ask, level)) for floor, ask in claims]

    low, high = 0, max((claim.ask for claim in claims), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(shares(middle)) <= total:
            low = middle
        else:
            high = middle - 1
    return shares(low)
