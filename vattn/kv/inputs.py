"""The attention inputs of a step: where K and V are. Made once per step on the host, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Chunk(NamedTuple):
    """One request's share of a step: tokens `start .. start + length` are computed and stored."""

    request_id: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


BlockTables = NDArray[np.int32]
"""`[B, widest]`: request b's blocks are the first ceil(seq_lens[b] / block_size) of row b."""


@dataclass(frozen=True)
class AttentionInputs:
    """Where a step stores K and V and where attention reads them. Made once per step, used by every layer.

    Packed queries `[T, heads, dim]` hold the chunks one after the other:

        chunk     0           1    2
        tokens  | . . . . . | . | . . |        cu_seqlens = [0, 5, 6, 8]
    """

    kv: torch.Tensor
    """`[layer, 2, row, position, kv_head, head_dim]`; rows are slots or blocks."""
    cu_seqlens: list[int]
    """B + 1 offsets of the chunks in the packed tokens."""
    seq_lens: list[int]
    """B lengths after this step: how many tokens each request attends to."""
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

    block_tables: BlockTables
    block_size: int

    def blocks(self) -> tuple[NDArray[np.int64], list[int]]:
        """The blocks of all requests one after the other, and how many each request has."""
        counts = -(-np.asarray(self.seq_lens, np.int64) // self.block_size)
        used = np.arange(self.block_tables.shape[1]) < counts[:, None]
        return self.block_tables[used].astype(np.int64), counts.tolist()

    def tables(self) -> list[list[int]]:
        """The blocks of each request."""
        flat, counts = self.blocks()
        ends = [0, *accumulate(counts)]
        return [flat[a:b].tolist() for a, b in pairwise(ends)]


Positions = NDArray[np.int64]


def offsets(chunks: Sequence[Chunk]) -> list[int]:
    """`cu_seqlens`: B + 1 offsets of the chunks in the packed tokens."""
    return [0, *accumulate(chunk.length for chunk in chunks)]


def positions(chunks: Sequence[Chunk]) -> tuple[Positions, Positions]:
    """For each packed token: the chunk it belongs to, and its position in its request."""
    count = len(chunks)
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
    lengths = np.fromiter((chunk.length for chunk in chunks), np.int64, count)
    owners = np.arange(count)
    if count == int(lengths.sum()):
        return owners, starts
    ends = np.cumsum(lengths)
    owners = np.repeat(owners, lengths)
    return owners, np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
