"""The contract every KV backend keeps. The scheduler and the runner see only this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from vattn.kv.layout import KVShape, KVViews
from vattn.kv.usage import MemoryUsage
from vattn.vmm.retire import Event


class Chunk(NamedTuple):
    """One request's share of a step: tokens `start .. start + length` are computed and stored."""

    request_id: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's K and V go and where attention reads: decided once per step, used by every layer.

    Packed queries `[T, heads, dim]` hold the chunks one behind the other:

        chunk     0           1    2
        tokens  | . . . . . | . | . . |        cu_seqlens = [0, 5, 6, 8]
    """

    kv: torch.Tensor
    """`[layer, 2, row, position, kv_head, head_dim]`; rows are slots or blocks."""
    cu_seqlens: list[int]
    """B + 1 offsets of the chunks in the packed tokens."""
    seq_lens: list[int]
    """B lengths after this step: what each request attends to."""
    slot_mapping: torch.Tensor
    """int64 `[T]`: row x positions-per-row + position, where each new token is stored."""
    scales: torch.Tensor | None = field(default=None, kw_only=True)
    """float32 factors of a quantised `kv`, value = stored x scale: `[layer, 2, row, position, kv_head]`,
    written with each token, or `[layer, 2, kv_head]`, static. None: `kv` holds the values themselves."""

    @property
    def decode_only(self) -> bool:
        return self.cu_seqlens[-1] == len(self.seq_lens)


@dataclass(frozen=True)
class ContiguousInputs(AttentionInputs):
    """Each request is one row: request b's keys are `kv[layer, 0, slots[b], :seq_lens[b]]`."""

    slots: list[int]


@dataclass(frozen=True)
class PagedInputs(AttentionInputs):
    """Each request is a list of blocks of `block_size` positions, the last one partly filled."""

    block_tables: list[list[int]]
    block_size: int


@dataclass
class KVStats:
    """Counters of a backend, since its creation."""

    rows_adopted: int = 0
    """Requests that took over a finished row as it lay, mapped."""
    map_stall_seconds: float = 0.0
    """Time steps waited for pages that were not mapped ahead."""
    driver_calls: dict[str, int] = field(default_factory=dict)
    """Driver calls by kind; empty where no driver is involved."""


class KVCache(ABC):
    """KV memory for many requests. Not thread-safe: one engine drives it.

    Life of a request:  attach -> (grow -> begin_step)* -> free.  `check()` may be called at any time.
    """

    name: ClassVar[str]
    reads: ClassVar[type[AttentionInputs]]
    """The kind of inputs `begin_step` gives, which the attention must be able to read."""
    shape: KVShape

    static_scales: torch.Tensor | None = None
    """float32 `[layer, 2, kv_head]` of a cache quantised with scales that are known beforehand."""
    _kv: KVViews | None
    """None once closed."""

    @property
    def views(self) -> KVViews:
        """The cache's memory, all of it, at addresses that never change."""
        if self._kv is None:
            raise RuntimeError("the KV cache is closed")
        return self._kv

    @property
    def tensor(self) -> torch.Tensor:
        """`kv[layer, 2, row, position, kv_head, head_dim]`."""
        return self.views.kv

    @property
    def scales(self) -> torch.Tensor | None:
        """Scales of a quantised cache, as `AttentionInputs.scales` has them."""
        return self.views.scales if self.static_scales is None else self.static_scales

    @property
    @abstractmethod
    def table_width(self) -> int:
        """Blocks of the longest request; 0 where a request is one row."""

    @abstractmethod
    def describe(self) -> dict[str, str | int]:
        """The choices that make up this cache, for reports: layout, page or block size, number of them."""

    @property
    @abstractmethod
    def capacity_tokens(self) -> int:
        """Tokens the whole cache can give to one request that is alone."""

    @abstractmethod
    def can_admit(self, tokens: int) -> bool:
        """Could a new request hold `tokens` tokens now, counting what reclaim would bring back?

        Leaves a little room for the growth of those that live, unless there are none.
        """

    @abstractmethod
    def attach(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """Admit a request and make room for all of `token_ids`.

        Returns how many of its tokens are already in the cache (at most len - 1), or None when
        memory is short: then nothing has changed. Raises KeyError when it lives already.
        """

    @abstractmethod
    def grow(self, request_id: str, tokens: int) -> bool:
        """Make room for `tokens` tokens in all. All or nothing; False means: preempt somebody."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Forget a request. Its memory is parked, cached or given back. Raises KeyError if unknown."""

    @abstractmethod
    def begin_step(self, chunks: Sequence[Chunk]) -> AttentionInputs:
        """Plan a step. Room must have been grown. From here on each request holds `chunk.end` tokens."""

    def submitted(self, event: Event | None) -> None:  # noqa: B027
        """The step was handed to the device; `event` marks its end (None: it is over).

        Memory it may touch is not unmapped before.
        """

    @abstractmethod
    def live(self) -> Iterable[str]:
        """Ids of the attached requests."""

    @abstractmethod
    def usage(self) -> MemoryUsage: ...

    @abstractmethod
    def stats(self) -> KVStats: ...

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless the books balance (and `usage()`'s identities hold)."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
