"""What one step asks of the device, in counts that a cost model can price."""

from __future__ import annotations

from typing import NamedTuple


class StepWork(NamedTuple):
    """One step. Lengths in tokens, of the whole model (not one device's share)."""

    tokens: int
    """Rows through the linear layers: decodes and prompt chunks."""
    decodes: int
    """Requests that compute one token."""
    sampled: int
    """Rows of logits."""
    decode_kv: int
    """Tokens of KV that decodes read: the sum of their lengths."""
    prefill_kv: int
    """Tokens of KV that prompt chunks read: the sum of their ends."""
    pairs: int
    """(query, key) pairs of prompt chunks: each query attends to itself and all before it."""
    requests: int
    """Chunks in the step: what the host has to handle one by one."""
    calls: float
    """Seconds of driver calls made for it."""


def chunk_pairs(start: int, length: int) -> int:
    """Pairs of a chunk of `length` queries behind `start` computed tokens, causally."""
    return length * start + length * (length + 1) // 2
