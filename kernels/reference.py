"""The reference for the kernels, written the obvious way: float64, one query token at a time, plain PyTorch.

Every kernel test compares with it. It is not fast, and it shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import KVScales

INT8_MAX = 127.0
FP8_MAX = 448.0


def gather(cache: Tensor, place: int | Sequence[int], length: int) -> Tensor:
    """The first `length` tokens of a slot (an int) or of a list of blocks.

    `[slots, max_len, ...]` or `[blocks, block_size, ...]` -> `[length, ...]`
    """
    if isinstance(place, int):
        return cache[place, :length]
    size = cache.shape[1]
    return torch.stack([cache[place[t // size], t % size] for t in range(length)])


def read(cache: Tensor, scale: Tensor | None, place: int | Sequence[int], length: int) -> Tensor:
    """Keys or values of one request in float64, `[length, kv_heads, head_dim]`."""
    stored = gather(cache, place, length).double()
    if scale is None:
        return stored
    factor = scale if scale.ndim == 1 else gather(scale, place, length)
    return stored * factor.double()[..., None]


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens of one request, in float64.

    q `[tokens, q_heads, head_dim]`; keys, values `[length, kv_heads, head_dim]`, length >= tokens. Query
    token i sees keys 0 to length - tokens + i; heads g * group to (g + 1) * group - 1 share KV head g.
    """
    tokens, q_heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(tokens):
        seen = length - tokens + i + 1
        for head in range(q_heads):
            kv_head = head // (q_heads // kv_heads)
            scores = keys[:seen, kv_head].double() @ q[i, head].double() * scale
            out[i, head] = torch.softmax(scores, 0) @ values[:seen, kv_head].double()
    return out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Sequence[int | Sequence[int]],
    cu_seqlens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """float64 output of a packed batch; rows of q in no chunk, and of requests of length 0, are zero.

    places holds each request's slot (an int) or its blocks (a list); the rest as in `contiguous.prefill`.
    A decode step is a batch of chunks of one token.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for b, (place, length) in enumerate(zip(places, seq_lens, strict=True)):
        if length:
            rows = slice(cu_seqlens[b], cu_seqlens[b + 1])
            keys = read(k, scales.k if scales else None, place, length)
            values = read(v, scales.v if scales else None, place, length)
            out[rows] = attend(q[rows], keys, values, scale)
    return out


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round `x` `[tokens, kv_heads, head_dim]` to int8 or float8_e4m3fn; returns stored values and scales.

    scale `[kv_heads]` is static, what doesn't fit is clamped. Without it every token and head gets
    its own, `[tokens, kv_heads]`: the largest magnitude over the largest number, 0 for all-zero vectors.
    """
    limit = INT8_MAX if dtype == torch.int8 else FP8_MAX
    if scale is None:
        scale = (x.float().abs().amax(-1) / limit).float()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    scaled = (x.float() * inverse[..., None]).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
