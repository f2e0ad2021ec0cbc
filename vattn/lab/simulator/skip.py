"""Runs of equal decode steps: only requests that need a new page or block are asked about.

    step        1   2   3   4   5        A, B, C decode in every step; who waits can't be let in
    A (page of 4) . . . * .              * = its next token needs memory: the cache is asked, as it would be
    B             . * . . .              . = it has room: nothing but its length changes
    C             . . . . *

In between, `usage()` changes by one token per request: known without asking. When memory is refused, a
request arrives or one is about to end, the run stops and the scheduler takes over where it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vattn.kv.cache import KVCache
from vattn.kv.usage import MemoryUsage
from vattn.lab.simulator.request import SimulatedRequest

SHORTEST_RUN = 3
"""Shorter runs cost more to prepare than they save."""


class DecodeRun:
    """The next steps of `requests` (oldest first), all of which decode."""

    def __init__(self, kv: KVCache, requests: Sequence[SimulatedRequest]) -> None:
        self.kv = kv
        self.requests = requests
        self.done = 0
        """Steps made."""
        self.limit = min(r.max_tokens - r.num_outputs for r in requests) - 1
        """Steps before one in which a request ends."""
        if any(r.known == r.prompt_len for r in requests):
            self.limit = 0  # a first token is on its way: its time is to be noted
        self._usage = kv.usage()
        self._token_bytes = len(requests) * kv.shape.token_bytes
        self._external = kv.reserves
        self._due: dict[int, list[int]] | None = None  # places in `requests`, by step
        self._room = kv.room

    @property
    def worthwhile(self) -> bool:
        return self.limit >= SHORTEST_RUN

    def step(self) -> MemoryUsage | None:
        """Give every request its next token; the memory then, or None when the scheduler must decide."""
        if self.done >= self.limit:
            return None
        if self._due is None:
            self._due = {}
            for place, request in enumerate(self.requests):
                self._plan(place, self._room(request.num_tokens - 1) - request.num_tokens + 1)
        crossing = sorted(self._due.pop(self.done, ()))
        usage = self._usage
        if crossing:
            for place in crossing:
                request = self.requests[place]
                tokens = request.num_tokens + self.done
                if not self.kv.grow(request.request_id, tokens):
                    return None
                self._plan(place, self.done + self._room(tokens) - tokens + 1)
            asked = self.kv.usage()
            usage = replace(asked, logical=usage.logical)
        logical = usage.logical + self._token_bytes
        waste = usage.in_use + usage.shared_saved - logical
        tail, external = (0, waste) if self._external else (waste, 0)
        self._usage = replace(usage, logical=logical, tail_waste=tail, external_waste=external)
        self.done += 1
        return self._usage

    def _plan(self, place: int, step: int) -> None:
        """That request's tokens outgrow its memory in `step`."""
        assert self._due is not None
        if step < self.limit:
            self._due.setdefault(step, []).append(place)

    def finish(self) -> None:
        """Enter the steps made into requests and cache."""
        if not self.done:
            return
        for request in self.requests:
            request.known += self.done
            request.num_computed += self.done
            request.last_step += self.done
            self.kv.grow(request.request_id, request.num_tokens - 1)
