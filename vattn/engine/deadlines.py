"""Requests that must end by a certain time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vattn.engine.request import Request


class Deadlines:
    """A heap of deadlines; times are seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request.arrival, request))

    @property
    def next(self) -> float | None:
        """The next deadline; None: there is none."""
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[Request]:
        """The unfinished requests whose time is up at `now`, by deadline.

        Each is taken out when the next is asked for: who fails to end one gets it again.
        """
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finished):
            if not self._heap[0][2].finished:
                yield self._heap[0][2]
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
