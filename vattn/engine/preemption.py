"""Preemption frees a request's KV: it is dropped and recomputed later, or swapped to the host and back.

    recompute   tokens that no other request holds  x  seconds per prompt token
    swap        2  x  bytes of K and V  /  bandwidth of a copy

`auto` chooses the way with the lower predicted cost. It records both predictions and the real cost.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from vattn.config import PreemptionMode
from vattn.engine.request import Request
from vattn.engine.speed import SpeedMeter
from vattn.kv.base import KVCache
from vattn.vmm.driver import DriverError

How = Literal["recompute", "swap"]

RECORDS_KEPT = 1000

COPY_ERRORS = (DriverError, MemoryError, RuntimeError)
"""Errors that a copy between device and host can raise. Torch raises RuntimeError."""


@dataclass
class PreemptionRecord:
    """One preemption: the predicted costs, the chosen way and the real cost."""

    request_id: str
    tokens: int
    """Tokens of the request whose K and V were in the cache."""
    shared: int
    """Those of them that another request held as well."""
    predicted_recompute_s: float | None
    """Predicted seconds to recompute; None if no prompt has been timed yet."""
    predicted_swap_s: float | None
    """Predicted seconds to swap; None if there is no swap space, or not enough."""
    how: How
    actual_s: float | None = None
    """Real cost in seconds: the copies out and in, or the recomputation at the measured speed. None until
    the request runs again."""
    recomputed: int = 0
    """Tokens that were recomputed."""


class Preemption:
    """Takes memory from requests and gives it back. Predicts what each way of doing so costs."""

    def __init__(self, kv: KVCache, mode: PreemptionMode = "recompute") -> None:
        self.kv = kv
        self.mode = mode
        self.speed = SpeedMeter()
        self.records: deque[PreemptionRecord] = deque(maxlen=RECORDS_KEPT)
        """The most recent preemptions."""
        self.swaps = 0
        self.recomputes = 0
        self.recomputed_tokens = 0
        """Tokens that were recomputed because their K and V had been dropped."""
        self._away: dict[str, PreemptionRecord] = {}

    def give_up(self, request: Request) -> How:
        """Take a running request's memory."""
        record = self._predict(request)
        started = time.perf_counter()
        if record.how == "swap" and self._swap_out(request.request_id):
            record.actual_s = time.perf_counter() - started
            self.swaps += 1
        else:
            record.how = "recompute"
            self.kv.free(request.request_id)
            self.recomputes += 1
        self.records.append(record)
        self._away[request.request_id] = record
        return record.how

    def take_back(self, request: Request, *, resumed: bool) -> int | None:
        """Give a request memory. Returns how many tokens need no computing; None if memory is short."""
        started = time.perf_counter()
        request_id, record = request.request_id, self._away.get(request.request_id)
        cached = None
        if self.kv.swapped(request_id):
            cached = self._swap_in(request)
        if not self.kv.swapped(request_id) and cached is None:
            cached = self.kv.attach(request_id, request.token_ids, salt=request.salt, resumed=resumed)
        if cached is None or record is None:
            return cached
        del self._away[request_id]
        record.recomputed = max(0, record.tokens - cached)
        if record.how == "swap":
            record.actual_s = (record.actual_s or 0.0) + time.perf_counter() - started
        elif self.speed.seconds_per_prompt_token is not None:
            record.actual_s = record.recomputed * self.speed.seconds_per_prompt_token
        self.recomputed_tokens += record.recomputed
        return cached

    def forget(self, request: Request) -> None:
        """Forget a request that has ended, whether its K and V are in the cache or swapped out."""
        self.kv.discard(request.request_id)
        self._away.pop(request.request_id, None)

    def _swap_out(self, request_id: str) -> bool:
        try:
            return self.kv.swap_out(request_id)
        except COPY_ERRORS:
            return False  # the request goes on: its KV can't be copied, so it is recomputed

    def _swap_in(self, request: Request) -> int | None:
        """Copy a request's K and V back. Returns None if memory is short, and the request stays swapped; also
        None if the copy failed, and the request is then no longer swapped."""
        request_id = request.request_id
        try:
            return self.kv.swap_in(request_id, request.token_ids, salt=request.salt)
        except COPY_ERRORS:
            self.kv.discard(request_id)
            return None

    def _predict(self, request: Request) -> PreemptionRecord:
        tokens = request.num_computed
        shared = min(tokens, self.kv.shared_tokens(request.request_id))
        per_token = self.speed.seconds_per_prompt_token
        recompute = None if per_token is None else (tokens - shared) * per_token
        swap, space = None, self.kv.swap
        nbytes = self.kv.written(request.request_id) * self.kv.shape.token_bytes
        if self.mode != "recompute" and space is not None and nbytes and space.fits(nbytes):
            with suppress(*COPY_ERRORS):  # without memory for the measurement there is none for the copy
                swap = 2 * nbytes / space.bandwidth
        return PreemptionRecord(
            request.request_id, tokens, shared, recompute, swap, self._choose(recompute, swap)
        )

    def _choose(self, recompute: float | None, swap: float | None) -> How:
        if swap is None or self.mode == "recompute":
            return "recompute"
        if self.mode == "swap" or recompute is None:
            return "swap"
        return "swap" if swap < recompute else "recompute"


class ScriptedPreemption(Preemption):
    """Follows the decisions in a log. A replay needs this, because it can't measure the log's machine."""

    def __init__(self, kv: KVCache) -> None:
        super().__init__(kv)
        self.script: deque[How] = deque()

    def _choose(self, recompute: float | None, swap: float | None) -> How:
        return self.script.popleft() if self.script else "recompute"
