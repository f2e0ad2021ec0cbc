"""Tracks the requests that must end by a certain time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from vattn.engine.request import Request


class Deadlines:
    """A heap of deadlines. Times are in seconds on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request.arrival, request))

    @property
    def next(self) -> float | None:
        """The next deadline, or None if there is none."""
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[Request]:
        """Yield the unfinished requests whose deadline has passed at `now`, earliest deadline first.

        A request is removed only when the caller asks for the next one. If ending a request raises, the
        next call yields that request again.
        """
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finished):
            if not self._heap[0][2].finished:
                yield self._heap[0][2]
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
