"""Writing new keys and values to where they belong, rounding them to 8 bits on the way if the cache does.

      k, v [tokens, kv_heads, head_dim]          cache [rows, positions, kv_heads, head_dim], any strides
        t0 ---- slot_mapping[0] = 17 ---------->   row 17 // positions, position 17 % positions
        t1 ---- slot_mapping[1] = -1 (skipped)     a row is a slot of a contiguous cache, or a block

One program per token copies all its heads; no arithmetic unless the cache is int8 or float8_e4m3fn.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FLOATS, KVScales, check_cache, next_power_of_2, scale_kind, scale_pointers

ELEMENTS_PER_PROGRAM = 4096
"""Keys and values of more heads than this are cut over several programs; 32 registers a thread hold them."""


@triton.jit
def _round_int8(x):
    """float32 to int8, halves to even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _round_e4m3(x):
    """float32 to the bits of float8_e4m3fn, halves to even; GPUs before sm_89 have no instruction for it.

    Normal numbers: round away the low 20 bits of the fraction, move the exponent's bias from 127 to 7.
    Subnormal ones are multiples of 2^-9: adding 1.5 * 2^14 leaves no bits below that.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + 24576.0).to(tl.uint32, bitcast=True) & 0xF
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (tl.where(magnitude < 0.015625, subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _store(x, cache, scale, at, scale_at, head_dims, scale_heads, live, head_live,
           SCALES: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """Write x `[heads, dims]` at `cache + at`; per-token scales are computed and written, others read."""
    if SCALES == "none":
        stored = x
    else:
        x = x.to(tl.float32)
        if SCALES == "token":
            factor = tl.div_rn(tl.max(tl.abs(x), 1), LIMIT)
            tl.store(scale + scale_at + scale_heads, factor, mask=head_live)
        else:
            factor = tl.load(scale + scale_heads, mask=head_live, other=0.0)
        inverse = tl.where(factor > 0.0, tl.div_rn(1.0, tl.where(factor > 0.0, factor, 1.0)), 0.0)
        x *= inverse[:, None]
        stored = _round_int8(x) if LIMIT == 127.0 else _round_e4m3(x)
    tl.store(cache + at + head_dims, stored.to(cache.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["positions"], do_not_specialize_on_alignment=["slot_mapping"])
def store_kernel(
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, positions,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    cache_stride_row, cache_stride_pos, cache_stride_head,
    scale_stride_row, scale_stride_pos, scale_stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, head tiles)."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token)
    if place < 0:
        return
    row = place // positions
    position = place % positions
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    head_live = head < KV_HEADS
    live = head_live[:, None] & (dims < HEAD_DIM)[None, :]
    at = row * cache_stride_row + position * cache_stride_pos
    scale_at = row * scale_stride_row + position * scale_stride_pos
    head_dims = (head * cache_stride_head)[:, None] + dims[None, :]
    k_tile = tl.load(k + token * k_stride_token + (head * k_stride_head)[:, None] + dims[None, :],
                     mask=live, other=0.0)  # fmt: skip
    v_tile = tl.load(v + token * v_stride_token + (head * v_stride_head)[:, None] + dims[None, :],
                     mask=live, other=0.0)  # fmt: skip
    scale_heads = head * scale_stride_head
    _store(k_tile, k_cache, k_scale, at, scale_at, head_dims, scale_heads, live, head_live, SCALES, LIMIT)
    _store(v_tile, v_cache, v_scale, at, scale_at, head_dims, scale_heads, live, head_live, SCALES, LIMIT)


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: KVScales | None = None,
) -> None:
    """Write new tokens into the cache.

    k, v             `[tokens, kv_heads, head_dim]`, dense in the last dimension
    k_cache, v_cache `[rows, positions, kv_heads, head_dim]`, equal strides; k's dtype, int8 or float8_e4m3fn
    slot_mapping     int64 `[tokens]`: row * positions + position; negative: the token is not stored
    scales           for an 8-bit cache. Per head: read, and values beyond the range are clamped. Per token
                     and head: computed from each vector's largest magnitude and written beside it

    Raises ValueError for operands the kernel cannot take. Two tokens must not share a place.
    """
    check_cache(k_cache, v_cache, scales)
    tokens, (kv_heads, head_dim) = slot_mapping.shape[0], k_cache.shape[2:]
    for name, x in (("k", k), ("v", v)):
        if x.shape != (tokens, kv_heads, head_dim) or x.stride(2) != 1 or x.dtype not in FLOATS:
            raise ValueError(
                f"{name} must be floats [{tokens}, {kv_heads}, {head_dim}] with a dense last dimension, "
                f"not {x.dtype} {list(x.shape)} strides {x.stride()}"
            )
    if k.dtype != v.dtype or (scales is None and k.dtype != k_cache.dtype):
        raise ValueError(f"k and v are {k.dtype} and {v.dtype}, the cache is {k_cache.dtype}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.ndim != 1 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be a dense int64 vector, not {slot_mapping.dtype}")
    if tokens == 0:
        return
    positions = k_cache.shape[1]
    limit = 127.0 if k_cache.dtype == torch.int8 else 448.0
    if k_cache.dtype == torch.float8_e4m3fn:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    scale_strides: tuple[int, ...] = (0, 0, 1)
    if scales and scales.per_token:
        scale_strides = scales.k.stride()
    block_d = next_power_of_2(head_dim)
    block_heads = min(next_power_of_2(kv_heads), ELEMENTS_PER_PROGRAM // block_d)
    store_kernel[(tokens, -(-kv_heads // block_heads))](
        k, v, k_cache, v_cache, slot_mapping, *scale_pointers(scales), positions,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3], *scale_strides,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_HEADS=block_heads, BLOCK_D=block_d,
        SCALES=scale_kind(scales), LIMIT=limit, num_warps=4,
        enable_fp_fusion=False,  # one rounding per step, as the reference has
    )  # fmt: skip
