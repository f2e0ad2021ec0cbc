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
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import walk
from .launch import KVScales, Operands, capability, check_int32
from .split import SplitBuffers, combine, split_arguments
from .tables import Tile, decode_tile, prefill_tile
from .tables import paged as paged_tile
from .walk import load_tile


@triton.jit
def _load(source, BLOCK_SIZE: tl.constexpr, start, live, tokens, dims,
          HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """One tile, a LOAD of `walk`. Pointers in `source` are at block 0 of the KV head, `table` at the
    request's first entry."""
    k, v, k_scale, v_scale, table, block_stride, stride, scale_block_stride, scale_stride = source
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    if tokens.shape[0] <= BLOCK_SIZE:
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
def _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head,
             kv_stride_block, kv_stride_pos, kv_stride_head,
             scale_stride_block, scale_stride_pos, scale_stride_head,
             TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """`_load`'s source for one request and KV head."""
    base = kv_head.to(tl.int64) * kv_stride_head
    if TOKEN_SCALES:
        k_scale += kv_head.to(tl.int64) * scale_stride_head
        v_scale += kv_head.to(tl.int64) * scale_stride_head
    else:
        k_scale = k  # not read, but a function must return some pointer
        v_scale = v
    table = block_table + request.to(tl.int64) * table_stride
    return (k + base, v + base, k_scale, v_scale, table, kv_stride_block, kv_stride_pos,
            scale_stride_block, scale_stride_pos)  # fmt: skip


@triton.jit(do_not_specialize=["num_splits", "q_heads", "table_stride"],
            do_not_specialize_on_alignment=["block_table", "seq_lens", "split_len"])  # fmt: skip
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
    source = _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head,
                      kv_stride_block, kv_stride_pos, kv_stride_head,
                      scale_stride_block, scale_stride_pos, scale_stride_head, SCALES == "token")  # fmt: skip
    walk.decode(_load, source, BLOCK_SIZE, first, last, q, out, partial, partial_lse, k_scale, v_scale,
                qk_scale, request, kv_head, tl.program_id(0) % HEAD_TILES, split, num_splits, q_heads,
                q_stride_row, q_stride_head, out_stride_row, out_stride_head,
                GROUP, HEAD_DIM, BLOCK_H, BLOCK_D, BLOCK_N, STAGES, ONE_SPLIT, SCALES, WIDE, UPCAST,
                PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"],
            do_not_specialize_on_alignment=["cu_seqlens", "block_table", "seq_lens"])  # fmt: skip
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
    source = _at_head(k, v, k_scale, v_scale, block_table, table_stride, request, kv_head,
                      kv_stride_block, kv_stride_pos, kv_stride_head,
                      scale_stride_block, scale_stride_pos, scale_stride_head, SCALES == "token")  # fmt: skip
    walk.prefill(_load, source, _load, source, BLOCK_SIZE, q, out, k_scale, v_scale, qk_scale,
                 q_first, q_len, tl.load(seq_lens + request), block * TILE_TOKENS, token, head, kv_head,
                 q_stride_row, q_stride_head, out_stride_row, out_stride_head, TILE_TOKENS,
                 HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, STAGES, SCALES, WIDE, UPCAST, PRECISION)  # fmt: skip


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    scales: KVScales | None = None,
    splits: SplitBuffers | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention of one query token per request, the last of its seq_lens tokens.

    q             `[requests, q_heads, head_dim]` float16, bfloat16 or float32 (tf32 on a GPU), any strides
    k, v          `[blocks, block_size, kv_heads, head_dim]`, q's dtype or int8 / float8_e4m3fn with `scales`;
                  block_size a power of two
    block_table   int32 `[requests, max_blocks]`; entries behind a request's last block are not read
    seq_lens      int32 `[requests]`, 0 for a padding row, which yields zeros
    scale         of the softmax, default head_dim ** -0.5
    splits        plan and workspace of split decode; None runs each context in one piece
    out           where to write, default a new dense tensor like q; returned
    tile          launch shape, default from `tables`

    Raises ValueError for operands the kernel cannot take. Lengths and blocks are not read on the host.
    """
    op = Operands.check(q, k, v, scale, scales, out)
    check_int32("block_table", block_table, (q.shape[0], -1))
    check_int32("seq_lens", seq_lens, q.shape[:1])
    block_size = _block_size(op)
    partial, lse, split_len, num_splits = split_arguments(splits, op)
    tile = tile or paged_tile(decode_tile(capability(), op.block_d, op.itemsize))
    decode_kernel[op.decode_grid(num_splits)](
        op.q, op.k, op.v, op.out, partial, lse, block_table, seq_lens, split_len, *op.scale_arguments(),
        num_splits, op.q_heads, *op.qo_strides(), block_table.stride(0), *op.kv_strides(),
        BLOCK_SIZE=block_size, BLOCK_H=op.block_h, ONE_SPLIT=num_splits == 1, **op.constants(tile),
    )  # fmt: skip
    if splits and num_splits > 1:
        combine(op.out, seq_lens, splits, tile.block_n)
    return op.out


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float | None = None,
    scales: KVScales | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Causal attention of packed chunks, each the last tokens of its request.

    q            `[tokens, q_heads, head_dim]`; rows cu_seqlens[b] to cu_seqlens[b + 1] are request b's
    cu_seqlens   int32 `[requests + 1]`, ascending
    seq_lens     int32 `[requests]`, tokens including the chunk; 0 yields zeros
    max_query_len   at least the longest chunk: it sizes the grid

    Everything else as in `decode`. Rows of q outside every chunk are neither read nor written.
    """
    op = Operands.check(q, k, v, scale, scales, out)
    requests = seq_lens.shape[0]
    check_int32("cu_seqlens", cu_seqlens, (requests + 1,))
    check_int32("block_table", block_table, (requests, -1))
    check_int32("seq_lens", seq_lens, (requests,))
    block_size = _block_size(op)
    tile = tile or paged_tile(prefill_tile(capability(), op.block_d, op.itemsize, tma=False))
    prefill_kernel[op.prefill_grid(tile, max_query_len, requests)](
        op.q, op.k, op.v, op.out, cu_seqlens, block_table, seq_lens, *op.scale_arguments(),
        *op.qo_strides(), block_table.stride(0), *op.kv_strides(),
        BLOCK_SIZE=block_size, PACK=op.packs(tile), BLOCK_M=tile.block_m, **op.constants(tile),
    )  # fmt: skip
    return op.out


def _block_size(op: Operands) -> int:
    size = op.k.shape[1]
    if size & (size - 1):
        raise ValueError(f"block size {size} is not a power of two")
    return size
