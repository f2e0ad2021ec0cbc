"""How a program walks the keys, in Triton: the decode and prefill bodies every attention kernel shares.

    decode   one query token; a KV head's query heads are the rows     splits of the context run apart
    prefill  BLOCK_M query rows; the last tokens of the request        causal

             first                          whole    last
               |  tile  |  tile  |  tile  |  tail |        `load` per tile, then `softmax.attend`
                 unmasked, pipelined        masked         nothing at or behind `last` is touched

A body is given `LOAD`, a function that fetches one tile from `source`, a tuple it alone understands:

    LOAD(source, LAYOUT, start, live, tokens, dims, HEAD_DIM, MASKED, TOKEN_SCALES)
        -> k [BLOCK_D, BLOCK_N], v [BLOCK_N, BLOCK_D], k_scales [BLOCK_N], v_scales [BLOCK_N]

    LAYOUT       a constant of the caller's, such as a block size
    start        first token of the tile, a multiple of BLOCK_N
    live         [BLOCK_N], the tokens that exist; to be obeyed if MASKED
    tokens, dims 0 .. BLOCK_N - 1 and 0 .. BLOCK_D - 1; dims from HEAD_DIM on read as zero
    k_scales ... read if TOKEN_SCALES, otherwise any number

Contiguous ranges and block tables differ in their LOAD and in nothing else.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from .softmax import MINUS_INFINITY, attend, normalise


@triton.jit
def load_tile(pointers, mask_a, mask_b, USE_A: tl.constexpr, USE_B: tl.constexpr):
    """Load a tile, zero where a mask in use is false. An unmasked load carries no mask at all: that is
    what the pipeliner turns into plain 16-byte copies."""
    if USE_A and USE_B:
        tile = tl.load(pointers, mask=mask_a & mask_b, other=0.0)
    elif USE_A:
        tile = tl.load(pointers, mask=mask_a, other=0.0)
    elif USE_B:
        tile = tl.load(pointers, mask=mask_b, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def tile_tokens(BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """0 .. BLOCK_N - 1; 64-bit if a tile spans 2^31 elements or more."""
    tokens = tl.arange(0, BLOCK_N)
    if WIDE:
        tokens = tokens.to(tl.int64)
    return tokens


@triton.jit
def split_length(split_len, seq_len, BLOCK_N: tl.constexpr):
    """Tokens per split: what the plan says, rounded up to whole tiles; sane whatever number stands there."""
    return tl.maximum(tl.cdiv(tl.minimum(tl.load(split_len), seq_len), BLOCK_N), 1) * BLOCK_N


@triton.jit
def split_bounds(seq_lens, split_len, request, split, num_splits,
                 BLOCK_N: tl.constexpr, ONE_SPLIT: tl.constexpr):  # fmt: skip
    """Tokens [first, last) of a split.

    The last split takes all that is left, so every token is attended to once whatever the plan says: a
    stale plan costs time, never correctness.
    """
    last = tl.load(seq_lens + request)
    if ONE_SPLIT:
        first = 0
    else:
        length = split_length(split_len, last, BLOCK_N)
        first = split * length
        last = tl.where(split == num_splits - 1, last, tl.minimum(first + length, last))
    return first, last


@triton.jit
def head_scales(k_scale, v_scale, kv_head, HEAD_SCALES: tl.constexpr):
    """Scales of one KV head, 1 where there are none or where they are per token."""
    if HEAD_SCALES:
        k_factor = tl.load(k_scale + kv_head)
        v_factor = tl.load(v_scale + kv_head)
    else:
        k_factor = 1.0
        v_factor = 1.0
    return k_factor, v_factor


@triton.jit
def decode(
    LOAD: tl.constexpr, source, LAYOUT: tl.constexpr, first, last, q, out, partial, partial_lse,
    k_scale, v_scale, qk_scale, request, kv_head, head_tile, split, num_splits, q_heads,
    q_stride_row, q_stride_head, out_stride_row, out_stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ONE_SPLIT: tl.constexpr, SCALES: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens [first, last) of one request for up to BLOCK_H query heads of one KV head.

    Writes `out` if ONE_SPLIT, else the split's `partial` [.., HEAD_DIM] and `partial_lse` (base 2).
    """
    TOKEN_SCALES: tl.constexpr = SCALES == "token"
    group = head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
    head = (kv_head * GROUP + group).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    tokens = tile_tokens(BLOCK_N, WIDE)
    rows_live = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tile = tl.load(q + (request * q_stride_row + head * q_stride_head)[:, None] + dims[None, :],
                     mask=rows_live, other=0.0)  # fmt: skip
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k_factor, v_factor = head_scales(k_scale, v_scale, kv_head, SCALES == "head")
    qk_scale *= k_factor

    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_H], MINUS_INFINITY, tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    whole = first + (last - first) // BLOCK_N * BLOCK_N
    for start in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
        k, v, k_scales, v_scales = LOAD(source, LAYOUT, start, tokens >= 0, tokens, dims,
                                        HEAD_DIM, False, TOKEN_SCALES)  # fmt: skip
        acc, peak, mass = attend(q_tile, k, v, acc, peak, mass, rows_live, qk_scale, k_scales, v_scales,
                                 False, TOKEN_SCALES, PRECISION)  # fmt: skip
    if whole < last:
        live = whole + tokens < last
        k, v, k_scales, v_scales = LOAD(source, LAYOUT, whole, live, tokens, dims,
                                        HEAD_DIM, True, TOKEN_SCALES)  # fmt: skip
        acc, peak, mass = attend(q_tile, k, v, acc, peak, mass, live[None, :], qk_scale, k_scales, v_scales,
                                 True, TOKEN_SCALES, PRECISION)  # fmt: skip

    result = normalise(acc, mass, v_factor)
    if ONE_SPLIT:
        tl.store(out + (request * out_stride_row + head * out_stride_head)[:, None] + dims[None, :],
                 result.to(out.dtype.element_ty), mask=rows_live)  # fmt: skip
    else:
        place = (request * q_heads + head) * num_splits + split
        tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], result, mask=rows_live)
        tl.store(partial_lse + place, peak + tl.log2(mass), mask=group < GROUP)


@triton.jit
def query_tile(block, head_axis, GROUP: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which (token, query head) each row of a prefill tile is.

        PACK     t0 h0 | t0 h1 | t1 h0 | t1 h1 | ...   the heads of one KV head side by side (GROUP 2)
        else     t0 h  | t1 h  | t2 h  | t3 h  | ...   one query head

    Returns token [BLOCK_M] in the chunk (2^30 in rows left over), head [BLOCK_M] and KV head. Packing
    keeps tiles full when chunks are short, and narrows the diagonal, where half the work is masked.
    """
    row = tl.arange(0, BLOCK_M)
    if PACK:
        TOKENS: tl.constexpr = BLOCK_M // GROUP
        token = tl.where(row < TOKENS * GROUP, block * TOKENS + row // GROUP, 1 << 30)
        head = head_axis * GROUP + row % GROUP
        kv_head = head_axis
    else:
        token = block * BLOCK_M + row
        head = head_axis + row * 0
        kv_head = head_axis // GROUP
    return token, head, kv_head


@triton.jit
def prefill(
    LOAD_WHOLE: tl.constexpr, whole_source, LOAD: tl.constexpr, source, LAYOUT: tl.constexpr,
    q, out, k_scale, v_scale, qk_scale, q_first, q_len, seq_len, tile_first, token, head, kv_head,
    q_stride_row, q_stride_head, out_stride_row, out_stride_head, TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, SCALES: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows (token, head) of one request whose chunk is the last q_len of its seq_len tokens.

    LOAD_WHOLE, another LOAD with its own source, serves the tiles that every row sees in full.
    """
    TOKEN_SCALES: tl.constexpr = SCALES == "token"
    dims = tl.arange(0, BLOCK_D)
    tokens = tile_tokens(BLOCK_N, WIDE)
    context = seq_len - q_len
    rows_live = (token < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    q_row = (q_first + token).to(tl.int64)
    head = head.to(tl.int64)
    q_tile = tl.load(q + (q_row * q_stride_row + head * q_stride_head)[:, None] + dims[None, :],
                     mask=rows_live, other=0.0)  # fmt: skip
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k_factor, v_factor = head_scales(k_scale, v_scale, kv_head, SCALES == "head")
    qk_scale *= k_factor

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(context + tile_first + TILE_TOKENS, seq_len)
    whole = tl.maximum(context + tile_first + 1, 0) // BLOCK_N * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        k, v, k_scales, v_scales = LOAD_WHOLE(whole_source, LAYOUT, start, tokens >= 0, tokens, dims,
                                              HEAD_DIM, False, TOKEN_SCALES)  # fmt: skip
        acc, peak, mass = attend(q_tile, k, v, acc, peak, mass, rows_live, qk_scale, k_scales, v_scales,
                                 False, TOKEN_SCALES, PRECISION)  # fmt: skip
    # The diagonal: one or two tiles, too few to pipeline.
    for start in tl.range(whole, last, BLOCK_N, num_stages=1):
        key = start + tokens
        k, v, k_scales, v_scales = LOAD(source, LAYOUT, start, key < last, tokens, dims,
                                        HEAD_DIM, True, TOKEN_SCALES)  # fmt: skip
        visible = key[None, :] <= (context + token)[:, None]
        acc, peak, mass = attend(q_tile, k, v, acc, peak, mass, visible, qk_scale, k_scales, v_scales,
                                 True, TOKEN_SCALES, PRECISION)  # fmt: skip

    result = normalise(acc, mass, v_factor)
    tl.store(out + (q_row * out_stride_row + head * out_stride_head)[:, None] + dims[None, :],
             result.to(out.dtype.element_ty), mask=rows_live)  # fmt: skip
