"""One step of attention by online softmax, in Triton: the arithmetic that every kernel here shares.

A program owns ROWS query rows and walks the keys in tiles of COLS tokens. It keeps three things per row:

      keys  0 ......... n                     acc   [ROWS, BLOCK_D]  sum of exp2(s - peak) * v
          +----+----+----+---+                peak  [ROWS]           largest scaled score so far
    rows  | s  |    |    |tail|               mass  [ROWS]           sum of exp2(s - peak)
          +----+----+----+---+
           step step step step(masked)        output = acc / mass,   log2-sum-exp = peak + log2(mass)

All of it is float32 and in base 2: `qk_scale` is the softmax scale times log2(e), because exp2 is one
instruction. Where K and V lie in memory is the caller's business, so a comparison between contiguous
ranges and block tables compares addresses only. Scales of quantised K and V never touch the tiles: a
scale per head is folded into `qk_scale` and the final division, a scale per token multiplies the scores
and the weights.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def widen(x, dtype: tl.constexpr):
    """A tile of K or V as numbers of `dtype`; uint8 holds the bits of float8_e4m3fn.

    Shifted into place under a float16's exponent, e4m3 bits mean 2^-8 of their value, subnormals too.
    """
    if x.dtype == tl.uint8:
        half = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
        wide = (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        wide = x.to(dtype)
    return wide


@triton.constexpr_function
def transposes(rows):
    """Whether a product of so many rows goes by wgmma (sm_90) or tcgen05 (sm_100 to sm_119)."""
    return rows >= 64 and cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0)


@triton.jit
def widen_rows(x, dtype: tl.constexpr, ROWS: tl.constexpr):
    """As `widen`, for a tile whose rows are its memory's order while a tensor core wants columns.

    ROWS: query rows of the product. Left alone, the compiler loads or moves such a tile element by element.

    8-bit    Elements would first be moved into the tensor core's layout, because they are half the bytes.
             Taken apart into pairs and put together again, which costs no instruction, the tile is widened
             16 bytes at a time where it was loaded, and moved with the instruction for 16-bit elements.
    32-bit   wgmma and tcgen05, which take 64 rows or more, want tf32 transposed in shared memory, and the
             copies from global memory would do that, 4 bytes each. An addition in between keeps them 16 bytes
             wide, and the tile is transposed on its way through registers. In wide heads it also spares the
             registers that mma.sync would hold V in.
    """
    if x.dtype.primitive_bitwidth == 8:
        quads = x.reshape(x.shape[0], x.shape[1] // 4, 2, 2).trans(0, 1, 3, 2)
        low, high = tl.split(quads)
        quads = tl.join(widen(low, dtype), widen(high, dtype)).trans(0, 1, 3, 2)
        wide = quads.reshape(x.shape[0], x.shape[1])
    elif x.dtype.primitive_bitwidth == 32 and ROWS >= 32 and (x.shape[1] >= 256 or transposes(ROWS)):
        wide = x + 0.0
    else:
        wide = x.to(dtype)
    return wide


@triton.jit
def attend(q, k, v, acc, peak, mass, visible, qk_scale, k_scales, v_scales,
           MASKED: tl.constexpr, TOKEN_SCALES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold one tile of keys into (acc, peak, mass); returns the three.

    q [ROWS, BLOCK_D], k [BLOCK_D, COLS] (transposed), v [COLS, BLOCK_D]; k and v are converted to q's
    dtype. visible, read if MASKED, broadcasts to [ROWS, COLS]. k_scales and v_scales [COLS] float32,
    read if TOKEN_SCALES. qk_scale must be positive.
    """
    scores = tl.dot(q, widen(k, q.dtype), input_precision=PRECISION)
    if TOKEN_SCALES:
        scores *= k_scales[None, :]
    if MASKED:
        scores = tl.where(visible, scores * qk_scale, MINUS_INFINITY)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet: subtract 0 instead of -inf, which would make NaN.
        origin = tl.where(new_peak == MINUS_INFINITY, 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        decay = tl.exp2(peak - origin)
    else:
        # Scale after the maximum, so that scale and subtraction are one fused multiply-add per score.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        weights = tl.exp2(scores * qk_scale - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
    mass = mass * decay + tl.sum(weights, 1)
    if TOKEN_SCALES:
        weights *= v_scales[None, :]
    weights = weights.to(q.dtype)
    wide = widen_rows(v, q.dtype, q.shape[0])
    acc = tl.dot(weights, wide, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_peak, mass


@triton.jit
def normalise(acc, mass, v_scale):
    """acc / mass * v_scale; rows that saw no key become zero."""
    return acc * (v_scale / tl.where(mass > 0.0, mass, 1.0))[:, None]
