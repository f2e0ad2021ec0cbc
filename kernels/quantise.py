"""8-bit keys and values in stock PyTorch: rounding on the way in, widening on the way out.

    value = stored x scale       scale: one per token and head (largest magnitude / LARGEST), or given

The Triton store kernel writes bit-identical numbers. `reference.quantise` defines them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each stored type."""


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round `x` `[..., heads, dim]` to `dtype`, halves to even; returns stored values and their scales.

    scale: float32, broadcast over `[..., heads]`; values beyond LARGEST x scale are clamped. With None each
    vector gets its own scale (0 for a vector of zeros), and nothing is clamped.
    """
    limit = LARGEST[dtype]
    x = x.float()
    if scale is None:
        scale = x.abs().amax(-1).div_(limit)
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    scaled = (x * inverse.unsqueeze(-1)).clamp_(-limit, limit)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scale


def store_quantised(
    kv: Tensor, scales: Tensor, slot_mapping: Tensor, k: Tensor, v: Tensor, *, per_token: bool
) -> None:
    """Write new tokens into one layer of an 8-bit cache.

    kv `[2, N, Hkv, D]` over flat positions, any strides; k, v `[T, Hkv, D]`. Scales per token `[2, N, Hkv]`
    are written beside the values; static ones `[2, Hkv]` are read.
    """
    stored, factors = quantise(torch.stack((k, v)), kv.dtype, None if per_token else scales.unsqueeze(1))
    # As int8: PyTorch does not index float8.
    kv.view(torch.int8).index_copy_(1, slot_mapping, stored.view(torch.int8))
    if per_token:
        scales.index_copy_(1, slot_mapping, factors)


def dequantise(stored: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write stored x scale into the floats `out`; `scales` must broadcast. Equal shapes, any strides."""
    if stored.dtype == torch.float8_e4m3fn and out.device.type == "cpu":
        # PyTorch widens float8 one by one. A float16 with the same bits, moved up to its sign and exponent,
        # is 2^8 times smaller: exponents are biased by 15, not 7. (NaN, 0x7f, would read as 480.)
        #     e4m3   s eeee mmm        float16   s 0eeee mmm0000000
        wide = torch.empty(stored.shape, dtype=torch.int16).copy_(stored.view(torch.int8))
        wide.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(wide.view(torch.float16))
        scales = scales * 256
    else:
        out.copy_(stored)
    out.mul_(scales)
