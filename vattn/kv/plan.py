"""Host-side arithmetic of a step: offsets, lengths and flat positions, vectorised over the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vattn.kv.base import Chunk, ContiguousInputs


def offsets(chunks: Sequence[Chunk]) -> list[int]:
    """`cu_seqlens`: B + 1 offsets of the chunks in the packed tokens."""
    total, out = 0, [0]
    for chunk in chunks:
        total += chunk.length
        out.append(total)
    return out


def flat_positions(chunks: Sequence[Chunk], bases: Sequence[int]) -> torch.Tensor:
    """int64 `[T]`: for chunk b the run `bases[b] + start .. bases[b] + end`, one run behind the other."""
    starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks)) + np.asarray(bases, np.int64)
    lengths = np.fromiter((c.length for c in chunks), np.int64, len(chunks))
    ends = np.cumsum(lengths)
    runs = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
    return torch.from_numpy(runs)


def contiguous_inputs(
    kv: torch.Tensor,
    row_tokens: int,
    chunks: Sequence[Chunk],
    slots: list[int],
    scales: torch.Tensor | None = None,
) -> ContiguousInputs:
    """Plan a step over contiguous rows: chunk b is stored at row `slots[b]`."""
    return ContiguousInputs(
        kv=kv,
        cu_seqlens=offsets(chunks),
        seq_lens=[c.end for c in chunks],
        slot_mapping=flat_positions(chunks, [slot * row_tokens for slot in slots]),
        slots=slots,
        scales=scales,
    )
