"""Attention over block tables: each request's keys and values lie scattered in blocks.

      block_table[request]  | 7 | 2 | 9 |      token t of a request is row t % BLOCK_SIZE of
      k, v   block 2  | t16 ... t31 |          block block_table[request, t // BLOCK_SIZE]
             block 7  | t0 .... t15 |          (here BLOCK_SIZE is 16)
             block 9  | t32 ...     |

The walk and the arithmetic are those of `contiguous`; what differs is that every tile begins by reading
its block numbers:

    BLOCK_SIZE >= BLOCK_N    one number per tile, then one base for all its rows
    BLOCK_SIZE <  BLOCK_N    BLOCK_N / BLOCK_SIZE numbers per tile, then a 64-bit address per row

Rows at and behind a request's last token are never touched, nor table entries behind its last block.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from . import walk
from .walk import load_tile


@triton.jit
def _load(source, BLOCK_SIZE: tl.constexpr, start, live, tokens, dims,
          HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """One tile (`walk`'s LOAD). k, v and the scales in `source` point at block 0 and the KV head, `table` at the
    request's first entry."""
    k, v, k_scale, v_scale, table, block_stride, stride, scale_block_stride, scale_stride = source
    PADDED: tl.constexpr = HEAD_DIM != dims.shape[0]
    if BLOCK_SIZE >= tokens.shape[0]:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        row = tl.cast(start % BLOCK_SIZE, tl.int64)
        at = block * block_stride + row * stride
        offsets = tokens * stride
        k_at = k + at + (offsets[None, :] + dims[:, None])
        v_at = v + at + (offsets[:, None] + dims[None, :])
        scale_at = block * scale_block_stride + row * scale_stride + tokens * scale_stride
    else:
        entries = table + start // BLOCK_SIZE + tokens // BLOCK_SIZE
        block = load_tile(entries, live, live, MASKED, False).to(tl.int64)
        row = tokens % BLOCK_SIZE
        at = block * block_stride
        offsets = row * stride
        k_at = (k + at)[None, :] + (offsets[None, :] + dims[:, None])
        v_at = (v + at)[:, None] + (offsets[:, None] + dims[None, :])
        scale_at = block * scale_block_stride + row * scale_stride
    k_tile = load_tile(k_at, live[None, :], (dims < HEAD_DIM)[:, None], MASKED, PADDED)
    v_tile = load_tile(v_at, live[:, None], (dims < HEAD_DIM)[None, :], MASKED, PADDED)
    if TOKEN_SCALES:
        k_scales = load_tile(k_scale + scale_at, live, live, MASKED, False)
        v_scales = load_tile(v_scale + scale_at, live, live, MASKED, False)
    else:
        k_scales = 1.0
        v_scales = 1.0
    return k_tile, v_tile, k_scales, v_scales


@triton.jit
def _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head, kv_stride_head,
             scale_stride_head, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """Keys, values and scales at one KV head, and one request's row of the table."""
    base = kv_head.to(tl.int64) * kv_stride_head
    if TOKEN_SCALES:
        k_scale += kv_head.to(tl.int64) * scale_stride_head
        v_scale += kv_head.to(tl.int64) * scale_stride_head
    return k + base, v + base, k_scale, v_scale, block_table + request.to(tl.int64) * table_stride


@triton.jit
def decode_kernel(
    q, k, v, out, partial, partial_lse, block_table, seq_lens, split_len, k_scale, v_scale, qk_scale,
    num_splits, q_heads, q_stride_row, q_stride_head, out_stride_row, out_stride_head, table_stride,
    kv_stride_block, kv_stride_pos, kv_stride_head, scale_stride_block, scale_stride_pos, scale_stride_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ONE_SPLIT: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * head tiles, requests, splits)."""
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // HEAD_TILES
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first, last = walk.split_bounds(seq_lens, split_len, request, split, num_splits, BLOCK_N, ONE_SPLIT)
    if not ONE_SPLIT and first >= last:
        return
    k, v, k_scale, v_scale, table = _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head,
                                             kv_stride_head, scale_stride_head, SCALES == "token")  # fmt: skip
    source = (k, v, k_scale, v_scale, table, kv_stride_block, kv_stride_pos, scale_stride_block, scale_stride_pos)
    walk.decode(_load, source, BLOCK_SIZE, first, last, q, out, partial, partial_lse, k_scale, v_scale, qk_scale,
                request, kv_head, tl.program_id(0) % HEAD_TILES, split, num_splits, q_heads,
                q_stride_row, q_stride_head, out_stride_row, out_stride_head,
                GROUP, HEAD_DIM, BLOCK_H, BLOCK_D, BLOCK_N, STAGES, ONE_SPLIT, SCALES, WIDE, UPCAST,
                PRECISION)  # fmt: skip


@triton.jit
def prefill_kernel(
    q, k, v, out, cu_seqlens, block_table, seq_lens, k_scale, v_scale, qk_scale,
    q_stride_row, q_stride_head, out_stride_row, out_stride_head, table_stride,
    kv_stride_block, kv_stride_pos, kv_stride_head, scale_stride_block, scale_stride_pos, scale_stride_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, kv_heads if PACK else q_heads, requests)."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP if PACK else BLOCK_M
    request = tl.program_id(2)
    q_first = tl.load(cu_seqlens + request)
    q_len = tl.load(cu_seqlens + request + 1) - q_first
    # Causal tiles cost more the later they are, and programs start in order: the last one goes first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if block * TILE_TOKENS >= q_len:
        return
    token, head, kv_head = walk.query_tile(block, tl.program_id(1), GROUP, PACK, BLOCK_M)
    k, v, k_scale, v_scale, table = _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head,
                                             kv_stride_head, scale_stride_head, SCALES == "token")  # fmt: skip
    source = (k, v, k_scale, v_scale, table, kv_stride_block, kv_stride_pos, scale_stride_block, scale_stride_pos)
    walk.prefill(_load, source, _load, source, BLOCK_SIZE, q, out, k_scale, v_scale, qk_scale,
                 q_first, q_len, tl.load(seq_lens + request), block * TILE_TOKENS, token, head, kv_head,
                 q_stride_row, q_stride_head, out_stride_row, out_stride_head, TILE_TOKENS,
                 HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, STAGES, SCALES, WIDE, UPCAST, PRECISION)  # fmt: skip
