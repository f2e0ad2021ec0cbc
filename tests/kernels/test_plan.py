"""Split plans: how a decode step's contexts are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vattn.kernels.split import GRANULE, MAX_SPLITS, SplitBuffers, SplitPlan, plan_splits

H100 = 2 * 132


def programs_used(plan: SplitPlan, seq_lens: list[int], kv_heads: int) -> int:
    return sum(-(-n // plan.split_len) for n in seq_lens) * kv_heads


@given(
    seq_lens=st.lists(st.integers(0, 200_000), max_size=40),
    kv_heads=st.integers(1, 16),
    programs=st.integers(1, 500),
    grid=st.none() | st.integers(1, MAX_SPLITS),
)
def test_a_plan_covers_every_request(
    seq_lens: list[int], kv_heads: int, programs: int, grid: int | None
) -> None:
    plan = plan_splits(seq_lens, kv_heads, programs, grid)
    assert plan.split_len % GRANULE == 0 and plan.split_len > 0
    assert 1 <= plan.num_splits <= MAX_SPLITS
    assert plan.split_len * plan.num_splits >= max(seq_lens, default=0)
    if grid is not None:
        assert plan.num_splits == grid


def test_one_long_context_is_cut_so_that_the_gpu_is_busy() -> None:
    plan = plan_splits([65536], 8, H100)
    assert programs_used(plan, [65536], 8) >= H100


def test_short_contexts_are_not_cut() -> None:
    assert plan_splits([200] * 64, 8, H100).num_splits == 1
    assert plan_splits([1], 8, H100).num_splits == 1
    assert plan_splits([], 8, H100).num_splits == 1


def test_a_full_batch_is_cut_enough_to_leave_no_half_empty_wave() -> None:
    """512 programs on 264 slots would leave the second wave's last slots idle."""
    plan = plan_splits([8192] * 64, 8, H100)
    assert programs_used(plan, [8192] * 64, 8) >= 4 * H100


def test_one_long_request_among_short_ones_does_not_finish_alone() -> None:
    lens = [65536] + [512] * 31
    plan = plan_splits(lens, 8, H100)
    total = sum(lens) * 8
    assert plan.split_len <= 2 * total / H100 + GRANULE


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="0 splits"):
        plan_splits([1], kv_heads=1, programs=1, num_splits=0)


def test_buffers_take_over_a_plan_of_the_same_grid_only() -> None:
    buffers = SplitBuffers(4, 8, 64, SplitPlan(256, 3), "cpu")
    address = buffers.split_len.data_ptr()
    buffers.write(SplitPlan(1024, 3))
    assert buffers.split_len.tolist() == [1024]
    assert buffers.split_len.data_ptr() == address, "a captured graph reads this address"
    with pytest.raises(ValueError, match="2 splits, these buffers 3"):
        buffers.write(SplitPlan(1024, 2))
    assert buffers.partial.shape == (4, 8, 3, 64) and buffers.partial.dtype == torch.float32
