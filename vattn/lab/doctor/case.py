"""What is diagnosed: one engine under one load, whatever it was recorded by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Length(NamedTuple):
    """`times` requests of `prompt` and `output` tokens each."""

    prompt: float
    output: float
    times: float = 1.0


@dataclass(frozen=True)
class Steps:
    """One entry per step; a snapshot has a single one. Seconds and bytes."""

    duration_s: Array
    tokens: Array
    decodes: Array
    running: Array
    waiting: Array
    in_use: Array
    logical: Array
    shared_saved: Array
    tail_waste: Array
    external_waste: Array

    def share(self, chosen: npt.NDArray[np.bool_]) -> float:
        """Of the time spent in steps, that of `chosen` ones."""
        total = float(self.duration_s.sum())
        return float(self.duration_s[chosen].sum()) / total if total > 0 else 0.0

    def waste(self, column: Array) -> float:
        """`column` as a share of what requests mapped, over the time."""
        mapped = float(((self.in_use + self.shared_saved) * self.duration_s).sum())
        return float((column * self.duration_s).sum()) / mapped if mapped > 0 else 0.0


class Waits(NamedTuple):
    """Shares of the time in which requests waited, by what kept them out."""

    in_all: float
    memory: float
    seats: float
    tokens: float
    unknown: float


@dataclass(frozen=True)
class Case:
    """Anything not recorded is None or empty; rules then say nothing."""

    name: str
    backend: str
    model: Mapping[str, Any] = field(default_factory=dict)
    budget: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    steps: Steps | None = None
    requests: Sequence[Mapping[str, Any]] = ()
    """As in a bench JSON, those that succeeded."""
    lengths: Sequence[Length] = ()
    finished: int = 0
    failed: int = 0
    errors: Sequence[str] = ()
    preemptions: float = 0
    computed_tokens: float = 0
    recomputed_tokens: float = 0
    swap_bytes: float = 0
    swap_s: float = 0
    map_stall_s: float = 0
    busy_s: float = 0
    prefix_queries: float = 0
    prefix_hits: float = 0
    prefix_evictions: float = 0
    prefix_unshared: float = 0
    """Tokens not shared because pages or blocks are too large."""
    shareable: float | None = None
    """Prompt tokens that requests have in common with earlier ones, by the design of the workload."""
    caching: bool = True
    token_bytes: float | None = None
    unit_tokens: float | None = None
    unit_bytes: int | None = None
    """Of `virtual` the page of one range, of `paged` None."""
    layout: str = ""
    kv_dtype: str = "auto"
    preemption: str = "recompute"
    background_mapping: bool = False
    device: str = "cpu"
    arrival_rate: float | None = None
    throughput: float | None = None
    barrier: bool = False
    simulated: bool = False
    summary: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def full(self) -> float:
        """Most of the budget that live requests needed at once; 0 where unknown."""
        if self.steps is None or not self.budget or not self.steps.in_use.size:
            return 0.0
        return float(self.steps.in_use.max()) / self.budget

    def waits(self) -> Waits:
        """Why requests waited.

        The scheduler admits until a seat, the token budget or memory gives out. So where requests wait
        although seats and tokens were left, memory kept them out, if it was in use at all.
        """
        s = self.steps
        if s is None:
            return Waits(0, 0, 0, 0, 0)
        waiting = s.waiting > 0
        nearly_full = s.in_use >= NEARLY_FULL * (self.budget or np.inf)
        seats = waiting & (s.running >= (self.max_num_seqs or np.inf))
        tokens = (
            waiting & ~seats & ~nearly_full & (s.tokens >= 0.99 * (self.max_num_batched_tokens or np.inf))
        )
        rest = waiting & ~seats & ~tokens
        memory = rest & (s.in_use >= HALF_FULL * (self.budget or np.inf))
        return Waits(*(s.share(w) for w in (waiting, memory, seats, tokens, rest & ~memory)))


NEARLY_FULL = 0.9
HALF_FULL = 0.5
"""Below this a request kept out by memory would need half the cache for itself: something else is amiss."""
