"""The waiting requests: one queue per tenant, each sorted by rank."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from vattn.engine.request import Request


class WaitingRequests:
    """One sorted queue per tenant.

    tenant a   head | . | . | .        most urgent first
    tenant b   head | .
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Request]] = {}

    def add(self, request: Request) -> None:
        queue = self._queues.setdefault(request.service.tenant, [])
        bisect.insort(queue, request, key=lambda r: r.rank)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError or ValueError if it is not waiting."""
        tenant = request.service.tenant
        queue = self._queues[tenant]
        at = bisect.bisect_left(queue, request.rank, key=lambda r: r.rank)
        if at == len(queue) or queue[at] is not request:
            raise ValueError(f"request {request.request_id!r} does not wait")
        del queue[at]
        if not queue:
            del self._queues[tenant]

    def head(self, tenant: str) -> Request | None:
        """The tenant's most urgent request; None if it has none."""
        queue = self._queues.get(tenant)
        return queue[0] if queue else None

    @property
    def tenants(self) -> list[str]:
        """The tenants that have waiting requests."""
        return list(self._queues)

    def count(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, most urgent first."""
        return iter(sorted((r for queue in self._queues.values() for r in queue), key=lambda r: r.rank))

    def check(self) -> None:
        """Raise AssertionError unless every queue is sorted and holds only its tenant's requests."""
        for tenant, queue in self._queues.items():
            assert queue, f"{tenant} has an empty queue"
            assert all(r.service.tenant == tenant for r in queue)
            assert [r.rank for r in queue] == sorted(r.rank for r in queue), "queues are by rank"
