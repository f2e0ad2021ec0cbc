"""What the kernel benchmark sweeps: head configurations, batches and contexts, the important ones first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Heads:
    """The attention of a model: what decides strides and work."""

    model: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    """Of the whole model: an interleaved token lies `layers` x 2 x kv_heads x head_dim elements on."""

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPE.itemsize

    @property
    def token_bytes(self) -> int:
        return self.layers * self.layer_token_bytes


LLAMA_3_8B = Heads("Llama-3-8B", 32, 8, 128, 32)
QWEN3_1_7B = Heads("Qwen3-1.7B", 16, 8, 128, 28)
TINY = Heads("tiny", 4, 2, 32, 2)


@dataclass(frozen=True)
class Problem:
    """Attention of `batch` requests that have `context` tokens each: of their last one, or of all."""

    kind: Literal["decode", "prefill"]
    heads: Heads
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.heads.model} {self.batch} x {self.context}"

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return self.batch * self.context

    @property
    def queries(self) -> int:
        return self.batch if self.kind == "decode" else self.tokens

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer: what a set of buffers to rotate over is made of."""
        return self.tokens * self.heads.layer_token_bytes

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes one launch moves: K and V once, queries in, outputs out."""
        query = self.heads.q_heads * self.heads.head_dim * DTYPE.itemsize
        return self.layer_bytes + 2 * self.queries * query

    @property
    def flop(self) -> int:
        """Operations of the two matrix products over the keys each query sees."""
        pairs = self.tokens if self.kind == "decode" else self.batch * self.context * (self.context + 1) // 2
        return 4 * self.heads.q_heads * self.heads.head_dim * pairs


K = 1024
DECODE_FIRST = [(64, 8 * K), (1, 8 * K), (8, 8 * K), (256, 1 * K), (64, 1 * K), (8, 64 * K), (1, 64 * K)]
PREFILL_FIRST = [8 * K, 1 * K, 2 * K, 4 * K, 16 * K, 32 * K, 64 * K]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K)


def sweep() -> Iterator[Problem]:
    """Everything, in the order in which a short budget should be spent; those that never fit come too."""
    seen: set[Problem] = set()

    def fresh(problem: Problem) -> Iterator[Problem]:
        if problem not in seen:
            seen.add(problem)
            yield problem

    for heads in (LLAMA_3_8B, QWEN3_1_7B):
        most = len(DECODE_FIRST) if heads is LLAMA_3_8B else 3
        yield from fresh(Problem("decode", heads, *DECODE_FIRST[0]))
        for context in PREFILL_FIRST[:most]:
            yield from fresh(Problem("prefill", heads, 1, context))
        for batch, context in DECODE_FIRST[1:most]:
            yield from fresh(Problem("decode", heads, batch, context))
    # The rest by size, so that virtual memory only grows: creating pages is what takes time.
    grid = sorted(((batch, context) for batch in BATCHES for context in CONTEXTS), key=math.prod)
    for heads in (LLAMA_3_8B, QWEN3_1_7B):
        for context in PREFILL_FIRST:
            yield from fresh(Problem("prefill", heads, 1, context))
        for batch, context in grid:
            yield from fresh(Problem("decode", heads, batch, context))


def dry_sweep() -> Iterator[Problem]:
    """The same kinds of problems, as small as they can be."""
    yield Problem("decode", TINY, 2, 40)
    yield Problem("prefill", TINY, 1, 24)
