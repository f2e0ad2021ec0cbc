"""CPU attention with stock PyTorch: SDPA on views of the KV tensor, or on gathered blocks.

Grouped queries (G query heads share a KV head) are packed so that one K/V read serves the group:

    decode    q [1, Hkv, G, D]     k, v [1, Hkv, L, D]     the group as query rows, no mask
    prefill   q [Hkv, G, n, D]     k, v [Hkv, G, L, D]     G by stride 0, causal

What depends on lengths is decided once per step (`cut`, `causal_bias`); `attend` runs per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

KeysValues = Callable[[int], tuple[Tensor, Tensor]]
"""Request index -> its keys and values, each `[1, Hkv, L, D]`."""


class Run(NamedTuple):
    """A stretch of packed queries handled alike: one prefill chunk, or neighbouring decodes."""

    first: int
    """Index of its first token in the packed queries."""
    tokens: int
    request: int
    """Index of its first request; a run of decodes has one request per token."""
    prefill: bool
    bias: Tensor | None
    """Prefill behind a context: additive mask `[tokens, L]`. None: SDPA's `is_causal` says it."""


def cut(
    cu_seqlens: Sequence[int], seq_lens: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Run]:
    """Cut a step into runs; masks in `dtype` on `device`."""
    runs: list[Run] = []
    for b, total in enumerate(seq_lens):
        first, n = cu_seqlens[b], cu_seqlens[b + 1] - cu_seqlens[b]
        if n > 1:
            runs.append(Run(first, n, b, True, causal_bias(n, total, dtype, device)))
        elif runs and not runs[-1].prefill:
            runs[-1] = runs[-1]._replace(tokens=runs[-1].tokens + 1)
        else:
            runs.append(Run(first, 1, b, False, None))
    return runs


def causal_bias(new: int, total: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask `[new, total]` for the last `new` of `total` tokens.

    None when they are all of them: `is_causal`, which aligns at the top left, is the same mask.
    """
    if new == total:
        return None
    return torch.full((new, total), float("-inf"), dtype=dtype, device=device).triu_(diagonal=total - new + 1)


def store_kv(kv: Tensor, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Write new tokens. kv `[2, N, Hkv, D]` over flat positions (any strides); k, v `[T, Hkv, D]`."""
    kv[0].index_put_((slot_mapping,), k)
    kv[1].index_put_((slot_mapping,), v)


def attend(q: Tensor, runs: Sequence[Run], kv_of: KeysValues, scale: float) -> Tensor:
    """Attention of one layer. q `[T, Hq, D]`; returns `[T, Hq, D]`."""
    outs = [(_prefill if run.prefill else _decode)(q, run, kv_of, scale) for run in runs]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode(q: Tensor, run: Run, kv_of: KeysValues, scale: float) -> Tensor:
    heads, dim = q.shape[1:]
    kv_heads = kv_of(run.request)[0].shape[1]
    rows = q[run.first : run.first + run.tokens].view(run.tokens, 1, kv_heads, heads // kv_heads, dim)
    outs = []
    for b, row in enumerate(rows.unbind(0), run.request):
        k, v = kv_of(b)
        outs.append(sdpa(row, k, v, scale=scale))
    return torch.cat(outs).view(run.tokens, heads, dim)


def _prefill(q: Tensor, run: Run, kv_of: KeysValues, scale: float) -> Tensor:
    heads, dim = q.shape[1:]
    k, v = kv_of(run.request)
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q[run.first : run.first + run.tokens].view(run.tokens, kv_heads, group, dim)
    out = sdpa(
        grouped.permute(1, 2, 0, 3),
        k[0].unsqueeze(1).expand(-1, group, -1, -1),
        v[0].unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=run.bias,
        is_causal=run.bias is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(run.tokens, heads, dim)
