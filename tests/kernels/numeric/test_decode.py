"""Decode, contiguous and paged, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.numeric.batches import (
    LAYOUTS,
    SMALL,
    Batch,
    Placed,
    assert_close,
    decode,
    make_batch,
    place_contiguous,
    place_paged,
)
from vattn.kernels.split import SplitPlan

PLACES = ("contiguous", "paged")
LENGTHS = (1, 15, 16, 17, 35)
"""Around the tile of 16 keys: less than one, exactly one, one and a bit, two and a bit."""


def place(where: str, batch: Batch, device: torch.device, layout: str = "interleaved") -> Placed:
    if where == "contiguous":
        return place_contiguous(batch, device, layout)
    return place_paged(batch, device, layout=layout)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "group"),
    [
        (torch.float32, 32, 2, 1),
        (torch.float32, 128, 2, 4),
        (torch.bfloat16, 64, 1, 3),
        (torch.bfloat16, 80, 1, 7),
        (torch.float16, 96, 2, 2),
        (torch.float16, 112, 1, 8),
        (torch.float16, 256, 1, 2),
        (torch.float32, 48, 1, 20),
        (torch.bfloat16, 32, 1, 32),
        (torch.float32, 16, 1, 71),
    ],
)
def test_types_head_sizes_and_groups(
    where: str, dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, device: torch.device
) -> None:
    batch = make_batch(LENGTHS, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    assert_close(decode(place(where, batch, device)), batch.expected(), on=device)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(where: str, layout: str, device: torch.device) -> None:
    batch = make_batch((3, 33), dtype=torch.float16)
    assert_close(decode(place(where, batch, device, layout)), batch.expected(), on=device)


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int, device: torch.device) -> None:
    batch = make_batch((1, 16, 41))
    assert_close(decode(place_paged(batch, device, block_size)), batch.expected(), on=device)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("split_len", "num_splits"),
    [
        pytest.param(16, 4, id="the plan fits"),
        pytest.param(32, 6, id="more splits than any request has"),
        pytest.param(16, 2, id="stale, made for shorter contexts: the last split takes the rest"),
        pytest.param(5, 3, id="no multiple of a tile"),
        pytest.param(0, 3, id="never written"),
        pytest.param(2**31 - 1, 2, id="longer than everything"),
        pytest.param(-7, 3, id="nonsense"),
        pytest.param(16, 1, id="one split"),
    ],
)
def test_splits_add_up_whatever_the_plan_says(
    where: str, split_len: int, num_splits: int, device: torch.device
) -> None:
    batch = make_batch((1, 16, 0, 70), group=3, head_dim=48)
    got = decode(place(where, batch, device), SplitPlan(split_len, num_splits))
    assert_close(got, batch.expected(), on=device)


def test_many_splits(device: torch.device) -> None:
    batch = make_batch((330,), kv_heads=1, dtype=torch.bfloat16)
    got = decode(place_contiguous(batch, device), SplitPlan(16, 21))
    assert_close(got, batch.expected())


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("plan", [None, SplitPlan(16, 2)], ids=["unsplit", "split"])
def test_a_padding_row_yields_zeros_and_reads_nothing(
    where: str, plan: SplitPlan | None, device: torch.device
) -> None:
    batch = make_batch((0, 20, 0))
    placed = place(where, batch, device)
    padding = [0, 2]
    got = decode(placed, plan)
    assert torch.equal(got[padding], torch.zeros_like(got[padding]))
    assert_close(got, batch.expected(), on=device)


def test_padding_rows_may_share_one_scratch_slot(device: torch.device) -> None:
    batch = make_batch((9, 1, 1))
    placed = place_contiguous(batch, device)
    shared = replace(placed, slots=[placed.slots[0], placed.slots[1], placed.slots[1]])
    assert_close(decode(shared)[:2], batch.expected()[:2], on=device)


@pytest.mark.parametrize("where", PLACES)
def test_queries_and_output_may_be_slices_of_packed_tensors(where: str, device: torch.device) -> None:
    batch = make_batch((7, 20), head_dim=32)
    placed = place(where, batch, device)
    packed = torch.full((2, 9, 4, 40), float("nan"), device=device)
    q, out = packed[:, 3:7, :, :32].unbind(0)
    q, out = q[::2], out[::2]
    q.copy_(batch.q)
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)
    returned = placed.kernels.decode(
        q, placed.k, placed.v, seq_lens=lengths, out=out, tile=SMALL, **placed.place()
    )
    assert returned.data_ptr() == out.data_ptr()
    assert_close(out.cpu(), batch.expected(), on=device)
    assert packed[1, 4].isnan().all(), "a row between the batch's was written"
    assert packed[1, ..., 32:].isnan().all(), "padding behind the head was written"


def test_the_softmax_scale_is_the_callers(device: torch.device) -> None:
    batch = make_batch((20,))
    got = decode(place_contiguous(batch, device), scale=0.7)
    assert_close(got, batch.expected(0.7), on=device)


def test_scores_far_apart_do_not_overflow(device: torch.device) -> None:
    batch = make_batch((40,), dtype=torch.bfloat16)
    batch.q *= 100
    assert_close(decode(place_contiguous(batch, device)), batch.expected(), on=device)


@pytest.mark.parametrize("where", PLACES)
def test_the_tiles_that_ship(where: str, device: torch.device) -> None:
    batch = make_batch((3, 150), head_dim=64, dtype=torch.bfloat16)
    assert_close(decode(place(where, batch, device), SplitPlan(128, 2), tile=None), batch.expected())


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int, device: torch.device) -> None:
    pick = torch.Generator().manual_seed(seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (), generator=pick))]

    lengths = [choose(0, 1, 2, 13, 16, 31, 48, 57) for _ in range(choose(1, 2, 3))] + [choose(1, 60)]
    batch = make_batch(
        lengths,
        kv_heads=choose(1, 2, 3),
        group=choose(1, 2, 5, 17),
        head_dim=choose(32, 40, 64, 72),
        dtype=(torch.float32, torch.float16, torch.bfloat16)[choose(0, 1, 2)],
        seed=seed,
    )
    plan = (None, SplitPlan(choose(8, 16, 32), choose(2, 3, 5)))[choose(0, 1)]
    layout = LAYOUTS[choose(0, 1, 2)]
    contiguous = decode(place_contiguous(batch, device, layout), plan)
    paged = decode(place_paged(batch, device, choose(2, 16, 32), layout), plan)
    assert_close(contiguous, batch.expected(), on=device)
    assert_close(paged, batch.expected(), on=device)
    assert torch.equal(contiguous, paged), "the same arithmetic in the same order must give the same bits"
