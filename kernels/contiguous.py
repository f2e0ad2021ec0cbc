"""Attention over contiguous ranges: each request's keys and values lie in one slot, in order.

      k, v   slot 0  | t0 t1 t2 ........ |      a token is [kv_heads, head_dim], its neighbour
             slot 1  | t0 t1 t2 ........ |      `kv_stride_pos` elements further on
             slot 2  | t0 t1 t2 ........ |

An address is a scalar 64-bit base (slot, head, first token of the tile) plus 32-bit offsets that are the
same for every tile. Memory at and behind a request's last token is never touched and need not exist.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import walk
from .launch import KVScales, Operands, capability, check_int32
from .split import SplitBuffers, combine, split_arguments
from .tables import Tile, decode_tile, prefill_tile
from .walk import load_tile


@triton.jit
def _load(source, LAYOUT: tl.constexpr, start, live, tokens, dims,
          HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """One tile by pointers, a LOAD of `walk`. Pointers in `source` are at token 0 of the slot and head."""
    k, v, k_scale, v_scale, stride, scale_stride = source
    PADDED: tl.constexpr = dims.shape[0] != HEAD_DIM
    at = tl.cast(start, tl.int64)
    offsets = tokens * stride
    k_tile = load_tile(k + at * stride + (offsets[None, :] + dims[:, None]),
                       live[None, :], (dims < HEAD_DIM)[:, None], MASKED, PADDED)  # fmt: skip
    v_tile = load_tile(v + at * stride + (offsets[:, None] + dims[None, :]),
                       live[:, None], (dims < HEAD_DIM)[None, :], MASKED, PADDED)  # fmt: skip
    if TOKEN_SCALES:
        scale_at = at * scale_stride + tokens * scale_stride
        k_scales = load_tile(k_scale + scale_at, live, live, MASKED, False)
        v_scales = load_tile(v_scale + scale_at, live, live, MASKED, False)
    else:
        k_scales = 1.0
        v_scales = 1.0
    return k_tile, v_tile, k_scales, v_scales


@triton.jit
def _load_tma(source, LAYOUT: tl.constexpr, start, live, tokens, dims,
              HEAD_DIM: tl.constexpr, MASKED: tl.constexpr, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """One whole tile by tensor descriptors over [slot, token, head, dim], a LOAD_WHOLE of `walk`."""
    k_tiles, v_tiles, slot, kv_head = source
    k_tile = k_tiles.load([slot, start, kv_head, 0]).reshape(tokens.shape[0], dims.shape[0]).T
    v_tile = v_tiles.load([slot, start, kv_head, 0]).reshape(tokens.shape[0], dims.shape[0])
    return k_tile, v_tile, 1.0, 1.0


@triton.jit
def _at_slot(k, v, k_scale, v_scale, slot, kv_head, kv_stride_slot, kv_stride_pos, kv_stride_head,
             scale_stride_slot, scale_stride_pos, scale_stride_head, TOKEN_SCALES: tl.constexpr):  # fmt: skip
    """`_load`'s source for one slot and KV head."""
    base = slot.to(tl.int64) * kv_stride_slot + kv_head.to(tl.int64) * kv_stride_head
    if TOKEN_SCALES:
        scale_base = slot.to(tl.int64) * scale_stride_slot + kv_head.to(tl.int64) * scale_stride_head
        k_scale += scale_base
        v_scale += scale_base
    else:
        k_scale = k  # not read, but a function must return some pointer
        v_scale = v
    return k + base, v + base, k_scale, v_scale, kv_stride_pos, scale_stride_pos


@triton.jit(do_not_specialize=["num_splits", "q_heads"],
            do_not_specialize_on_alignment=["slots", "seq_lens", "split_len"])  # fmt: skip
def decode_kernel(
    q, k, v, out, partial, partial_lse, slots, seq_lens, split_len, k_scale, v_scale, qk_scale,
    num_splits, q_heads, q_stride_row, q_stride_head, out_stride_row, out_stride_head,
    kv_stride_slot, kv_stride_pos, kv_stride_head, scale_stride_slot, scale_stride_pos, scale_stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ONE_SPLIT: tl.constexpr, SCALES: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * head tiles, requests, splits)."""
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // HEAD_TILES
    request = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first, last = walk.split_bounds(seq_lens, split_len, request, split, num_splits, BLOCK_N, ONE_SPLIT)
    if not ONE_SPLIT and first >= last:
        return
    source = _at_slot(k, v, k_scale, v_scale, tl.load(slots + request), kv_head,
                      kv_stride_slot, kv_stride_pos, kv_stride_head,
                      scale_stride_slot, scale_stride_pos, scale_stride_head, SCALES == "token")  # fmt: skip
    walk.decode(_load, source, 0, first, last, q, out, partial, partial_lse, k_scale, v_scale, qk_scale,
                request, kv_head, tl.program_id(0) % HEAD_TILES, split, num_splits, q_heads,
                q_stride_row, q_stride_head, out_stride_row, out_stride_head,
                GROUP, HEAD_DIM, BLOCK_H, BLOCK_D, BLOCK_N, STAGES, ONE_SPLIT, SCALES, WIDE, UPCAST,
                PRECISION)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "slots", "seq_lens"])
def prefill_kernel(
    q, k, v, k_tiles, v_tiles, out, cu_seqlens, slots, seq_lens, k_scale, v_scale, qk_scale,
    q_stride_row, q_stride_head, out_stride_row, out_stride_head,
    kv_stride_slot, kv_stride_pos, kv_stride_head, scale_stride_slot, scale_stride_pos, scale_stride_head,
    GROUP: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    SCALES: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, kv_heads if PACK else q_heads, requests).

    With TMA, whole tiles come by the descriptors `k_tiles` and `v_tiles`, blocks [1, BLOCK_N, 1, BLOCK_D]. A
    descriptor's bound is the slot's end, not the request's, so the tiles at the end go by pointers.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP if PACK else BLOCK_M
    request = tl.program_id(2)
    q_first = tl.load(cu_seqlens + request)
    q_len = tl.load(cu_seqlens + request + 1) - q_first
    # Causal tiles cost more the later they are, and programs start in order: the last one goes first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if block * TILE_TOKENS >= q_len:
        return
    token, head, kv_head = walk.query_tile(block, tl.program_id(1), GROUP, PACK, BLOCK_M)
    slot = tl.load(slots + request)
    source = _at_slot(k, v, k_scale, v_scale, slot, kv_head,
                      kv_stride_slot, kv_stride_pos, kv_stride_head,
                      scale_stride_slot, scale_stride_pos, scale_stride_head, SCALES == "token")  # fmt: skip
    LOAD_WHOLE: tl.constexpr = _load_tma if TMA else _load
    if TMA:
        whole_source = (k_tiles, v_tiles, slot, kv_head)
    else:
        whole_source = source
    walk.prefill(LOAD_WHOLE, whole_source, _load, source, 0, q, out, k_scale, v_scale, qk_scale,
                 q_first, q_len, tl.load(seq_lens + request), block * TILE_TOKENS, token, head, kv_head,
                 q_stride_row, q_stride_head, out_stride_row, out_stride_head, TILE_TOKENS,
                 HEAD_DIM, BLOCK_M, BLOCK_D, BLOCK_N, STAGES, SCALES, WIDE, UPCAST, PRECISION)  # fmt: skip


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    slots: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    scales: KVScales | None = None,
    splits: SplitBuffers | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention of one query token per request, the last of its seq_lens tokens.

    q        `[requests, q_heads, head_dim]` float16, bfloat16 or float32 (tf32 on a GPU), any strides
    k, v     `[slots, max_len, kv_heads, head_dim]`, q's dtype or int8 / float8_e4m3fn with `scales`
    slots    int32 `[requests]`; seq_lens int32 `[requests]`, 0 for a padding row, which yields zeros
    scale    of the softmax, default head_dim ** -0.5
    splits   plan and workspace of split decode; None runs each context in one piece
    out      where to write, default a new dense tensor like q; returned
    tile     launch shape, default from `tables`

    Raises ValueError for operands the kernel cannot take. Lengths and slots are not read on the host: the
    caller answers for slots < k.shape[0] and seq_lens <= k.shape[1].
    """
    op = Operands.check(q, k, v, scale, scales, out)
    check_int32("slots", slots, q.shape[:1])
    check_int32("seq_lens", seq_lens, q.shape[:1])
    partial, lse, split_len, num_splits = split_arguments(splits, op)
    tile = tile or decode_tile(capability(), op.block_d, op.itemsize)
    decode_kernel[op.decode_grid(num_splits)](
        op.q, op.k, op.v, op.out, partial, lse, slots, seq_lens, split_len, *op.scale_arguments(),
        num_splits, op.q_heads, *op.qo_strides(), *op.kv_strides(),
        BLOCK_H=op.block_h, ONE_SPLIT=num_splits == 1, **op.constants(tile),
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
    slots: Tensor,
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
    check_int32("slots", slots, (requests,))
    check_int32("seq_lens", seq_lens, (requests,))
    tile = tile or prefill_tile(capability(), op.block_d, op.itemsize, tma=can_use_tma(op))
    k_tiles, v_tiles = (_tiles(op.k, tile, op), _tiles(op.v, tile, op)) if tile.tma else (None, None)
    prefill_kernel[op.prefill_grid(tile, max_query_len, requests)](
        op.q, op.k, op.v, k_tiles, v_tiles, op.out, cu_seqlens, slots, seq_lens, *op.scale_arguments(),
        *op.qo_strides(), *op.kv_strides(), PACK=op.packs(tile), BLOCK_M=tile.block_m, TMA=tile.tma,
        **op.constants(tile),
    )  # fmt: skip
    return op.out


def can_use_tma(op: Operands) -> bool:
    """Whether tensor descriptors can express this cache: 16-byte aligned, strides below 2^40 bytes."""
    strides = [stride * op.itemsize for stride in op.k.stride()[:3]]
    aligned = all(n % 16 == 0 for n in (op.k.data_ptr(), op.v.data_ptr(), *strides))
    return aligned and all(0 < n < 2**40 for n in strides) and op.scales is None


def _tiles(cache: Tensor, tile: Tile, op: Operands) -> TensorDescriptor:
    if not can_use_tma(op):
        raise ValueError(f"no tensor descriptor has strides {cache.stride()}: use a tile without tma")
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, tile.block_n, 1, op.block_d])
