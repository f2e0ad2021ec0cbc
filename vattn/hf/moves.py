"""Reorder the sequences of a batch in place, moving only those that change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

SPARE = -1  # a row outside the batch, to break cycles


def plan_moves(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Plan copies (to, from), in order, after which row i holds what row `rows[i]` held before.

    A row is overwritten only if no later copy reads it. To break a cycle, one row is first copied to `SPARE`.
    Beam search rarely needs that, because a beam that forks replaces another one.
    """
    source = {row: read for row, read in enumerate(rows) if row != read}
    readers = Counter(source.values())
    free = [row for row in source if not readers[row]]
    moves: list[tuple[int, int]] = []
    while source:
        if not free:  # only cycles are left
            row = next(iter(source))
            moves.append((SPARE, row))
            reader = next(other for other, read in source.items() if read == row)
            source[reader] = SPARE
            readers[row] = 0
            free.append(row)
        row = free.pop()
        read = source.pop(row)
        moves.append((row, read))
        readers[read] -= 1
        if read in source and not readers[read]:
            free.append(read)
    return moves


def apply_moves(states: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Apply the moves along dimension 0."""
    spare: torch.Tensor | None = None
    for row, read in moves:
        if row == SPARE:
            spare = states[read].clone()
        elif read == SPARE:
            assert spare is not None
            states[row].copy_(spare)
        else:
            states[row].copy_(states[read])
