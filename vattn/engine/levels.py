"""Fair holdings: whose memory and slots may be taken for whom.

A tenant's level is the KV tokens its running requests hold, by weight. Stack each tenant's requests,
most urgent at the bottom: a request stands as high as the level of those below it.

    level  |          | a3 |
           |          +----+
           |          | a2 |          the highest one, a3, yields first
           +----+     +----+
           | b1 |     | a1 |          a1 and b1 stand on the ground: never evicted for another tenant
           +----+-----+----+
             b          a
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vattn.engine.request import Request


class Candidate(NamedTuple):
    """The running request that yields first."""

    request: Request
    level: float
    """What its tenant would hold without it."""


def level(running: Sequence[Request], tenant: str, weights: Mapping[str, float]) -> float:
    """Tokens that a tenant's running requests hold, over its weight."""
    held = sum(r.num_tokens for r in running if r.service.tenant == tenant)
    return held / weights.get(tenant, 1.0)


def levels(running: Sequence[Request], weights: Mapping[str, float]) -> dict[str, float]:
    """The levels of all tenants that have running requests."""
    held: dict[str, float] = {}
    for request in running:
        tenant = request.service.tenant
        held[tenant] = held.get(tenant, 0.0) + request.num_tokens / weights.get(tenant, 1.0)
    return held


def first_to_yield(running: Sequence[Request], weights: Mapping[str, float]) -> Candidate:
    """The highest of `running` (not empty, by rank); of equals the least urgent.

    Never the most urgent one of all, unless it is alone: it stands on the ground.
    """
    held: dict[str, float] = {}
    highest: Candidate | None = None
    for request in running:
        tenant = request.service.tenant
        below = held.get(tenant, 0.0)
        if highest is None or below >= highest.level:
            highest = Candidate(request, below)
        held[tenant] = below + request.num_tokens / weights.get(tenant, 1.0)
    assert highest is not None
    return highest


def others_run(running: Sequence[Request], tenant: str) -> bool:
    """Does a request of another tenant run? If not, nobody is evicted for `tenant`: see `entitled`."""
    return any(request.service.tenant != tenant for request in running)


def entitled(own_level: float, need: float, other_level: float) -> bool:
    """May a tenant at `own_level` get `need` more, by weight, before one that would be at `other_level`?

    When it then has no more than the other; or when it has nothing at all and the other has something.
    What is taken this way can't be taken back the same way, so that two tenants never take turns at
    evicting each other.
    """
    return other_level > 0 and (own_level == 0 or own_level + need <= other_level)
