"""Split decode: cut the contexts of a step into parts so that the whole GPU is busy, then sum the parts.

    request 0  |=========|=========|=========|====|          split_len tokens per program, the same for
    request 1  |=========|===|                               all: every program does equal work, and those
    request 2  |====|                                        behind a request's end return at once
                split 0   split 1   split 2   split 3

The plan is made on the host, once per step; kernels read `split_len` from device memory, so that a captured
CUDA graph replays with the current plan. The grid has a fixed number of splits, and the last one takes all
that is left. So a stale plan is slow but never wrong.

Flash-Decoding (Dao et al., 2023) introduced the splits; FlashInfer (Ye et al., 2025) the plan per step.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Operands, next_power_of_2
from .softmax import MINUS_INFINITY
from .walk import split_length

GRANULE = 256
"""Plans use multiples of this many tokens: whole tiles of every kernel and whole blocks up to this size."""

MAX_SPLITS = 64
"""More parts per request than this cost more to sum than they save."""

START_TOKENS = 64
"""What starting a program costs, in tokens of work: filling the pipeline, writing its part. An estimate."""

SUM_TOKENS = 512
"""What the second kernel costs, in tokens of work of one program. An estimate."""


@dataclass(frozen=True)
class SplitPlan:
    """Program s of a request attends to tokens [s * split_len, (s + 1) * split_len)."""

    split_len: int
    num_splits: int


def plan_splits(
    seq_lens: Sequence[int], kv_heads: int, programs: int, num_splits: int | None = None
) -> SplitPlan:
    """The split length that should finish a decode step soonest.

    seq_lens: tokens of each request. programs: how many programs the GPU runs at a time (SMs times two to
    three). num_splits: size of a grid that is already fixed, as in a captured graph.

    Model: programs start in order as others end, so a step takes the average load of a slot plus, at the
    end, one program that has just begun. Long splits leave slots idle, short ones pay START_TOKENS often.
    """
    longest = max(seq_lens, default=0)
    limit = MAX_SPLITS if num_splits is None else num_splits
    if limit < 1 or programs < 1:
        raise ValueError(f"cannot plan for {limit} splits on {programs} programs")

    def cost(split_len: int) -> float:
        jobs = sum(-(-n // split_len) for n in seq_lens) * kv_heads
        average = (sum(seq_lens) * kv_heads + jobs * START_TOKENS) / programs
        last = min(split_len, longest) + START_TOKENS
        return max(average, last) + 0.5 * last + (SUM_TOKENS if split_len < longest else 0)

    whole = max(1, -(-longest // GRANULE)) * GRANULE
    shortest = -(-max(1, -(-longest // limit)) // GRANULE) * GRANULE
    candidates = [whole]
    while candidates[-1] > shortest:
        candidates.append(max(shortest, candidates[-1] // (2 * GRANULE) * GRANULE))
    best = min(candidates, key=cost)
    return SplitPlan(best, max(1, -(-longest // best)) if num_splits is None else num_splits)


class SplitBuffers:
    """Device memory of split decode for up to `requests` requests; one serves every layer.

        split_len   int32 [1]                                     the plan
        partial     float32 [requests, q_heads, num_splits, head_dim]   each split's output
        lse         float32 [requests, q_heads, num_splits]             its log2-sum-exp

    Entries of splits that a request does not have are never written nor read.
    """

    def __init__(
        self, requests: int, q_heads: int, head_dim: int, plan: SplitPlan, device: torch.device | str
    ) -> None:
        num_splits = plan.num_splits
        self.num_splits = num_splits
        self.split_len = torch.full((1,), plan.split_len, dtype=torch.int32, device=device)
        parts = (requests, q_heads, num_splits)
        self.partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts, dtype=torch.float32, device=device)

    def write(self, plan: SplitPlan) -> None:
        """Take over a new plan for the same grid; ordered with the work of the current stream."""
        if plan.num_splits != self.num_splits:
            raise ValueError(f"the plan has {plan.num_splits} splits, these buffers {self.num_splits}")
        self.split_len.fill_(plan.split_len)


def split_arguments(
    buffers: SplitBuffers | None, op: Operands
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """partial, lse, split_len, num_splits of a decode kernel; ValueError if the buffers don't fit.

    One split needs neither parts nor a sum.
    """
    if buffers is None or buffers.num_splits == 1:
        return None, None, None, 1
    have, need = buffers.partial.shape, op.q.shape
    if have[0] < need[0] or have[1] != need[1] or have[3] != need[2]:
        raise ValueError(
            f"split buffers are for {have[0]} requests of {have[1]} heads of {have[3]}; "
            f"this step has {need[0]} of {need[1]} of {need[2]}"
        )
    return buffers.partial, buffers.lse, buffers.split_len, buffers.num_splits


@triton.jit(do_not_specialize=["num_splits", "q_heads"],
            do_not_specialize_on_alignment=["seq_lens", "split_len"])  # fmt: skip
def combine_kernel(
    partial, lse, out, seq_lens, split_len, num_splits, q_heads, out_stride_row, out_stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sum a request's splits, weighted by their share of the softmax. Grid (q_heads, requests)."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + request)
    count = tl.minimum(tl.cdiv(seq_len, split_length(split_len, seq_len, BLOCK_N)), num_splits)
    dims = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, BLOCK_S)
    first = (request * q_heads + head) * num_splits
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = tl.full([1], MINUS_INFINITY, tl.float32)
    mass = tl.zeros([1], tl.float32)
    for start in tl.range(0, count, BLOCK_S):
        live = start + splits < count
        place = first + start + splits
        part_lse = tl.load(lse + place, mask=live, other=MINUS_INFINITY)
        part = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :],
                       mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        weights = tl.exp2(part_lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
        mass = mass * decay + tl.sum(weights, 0)
        peak = new_peak
    result = acc / tl.where(mass > 0.0, mass, 1.0)
    tl.store(out + request * out_stride_row + head.to(tl.int64) * out_stride_head + dims,
             result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)  # fmt: skip


def combine(out: Tensor, seq_lens: Tensor, buffers: SplitBuffers, block_n: int) -> None:
    """Write `out` `[requests, q_heads, head_dim]` from the parts in `buffers`; block_n as in the decode."""
    requests, q_heads, head_dim = out.shape
    combine_kernel[(q_heads, requests)](
        buffers.partial, buffers.lse, out, seq_lens, buffers.split_len, buffers.num_splits, q_heads,
        out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), BLOCK_N=block_n, BLOCK_S=16, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
