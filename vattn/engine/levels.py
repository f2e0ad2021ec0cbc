"""Fair shares of memory and slots: decides which tenant's request yields to another tenant.

A tenant's level is the number of KV tokens its running requests hold, divided by its weight. Stack each
tenant's requests with the most urgent one at the bottom. The height of a request is the level of the
requests below it.

    level  |          | a3 |
           |          +----+
           |          | a2 |          a3 is the highest, so it yields first
           +----+     +----+
           | b1 |     | a1 |          a1 and b1 are at height 0: never preempted for another tenant
           +----+-----+----+
             b          a
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vattn.engine.request import Request


class Candidate(NamedTuple):
    """The running request that yields first, and what its tenant keeps."""

    request: Request
    level: float
    """The level that its tenant would have without it."""


def level(running: Sequence[Request], tenant: str, weights: Mapping[str, float]) -> float:
    """The tokens that a tenant's running requests hold, divided by its weight."""
    held = sum(r.num_tokens for r in running if r.service.tenant == tenant)
    return held / weights.get(tenant, 1.0)


def levels(running: Sequence[Request], weights: Mapping[str, float]) -> dict[str, float]:
    """The level of each tenant that has running requests."""
    held: dict[str, float] = {}
    for request in running:
        tenant = request.service.tenant
        held[tenant] = held.get(tenant, 0.0) + request.num_tokens / weights.get(tenant, 1.0)
    return held


def first_to_yield(running: Sequence[Request], weights: Mapping[str, float]) -> Candidate:
    """The request with the greatest height in `running`, which is not empty and sorted by rank.

    If several have the same height, the least urgent one yields. The most urgent request of all is at
    height 0, so it never yields unless it is alone.
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
    """True if a request of another tenant runs. Otherwise no request is preempted for `tenant`; see
    `entitled`."""
    return any(request.service.tenant != tenant for request in running)


def entitled(own_level: float, need: float, other_level: float) -> bool:
    """True if a tenant at `own_level` may get `need` more at the expense of one left with `other_level`.

    All three are tokens divided by weight. The tenant may if it ends up with no more than the other keeps,
    or if it has nothing and the other keeps something. The other tenant could not take the memory back by
    the same rule, so two tenants never preempt each other in turns.
    """
    return other_level > 0 and (own_level == 0 or own_level + need <= other_level)
