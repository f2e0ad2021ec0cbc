"""Causal varlen prefill, contiguous (by pointers and by TMA) and paged, against the float64 oracle."""

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
    make_batch,
    place_contiguous,
    place_paged,
    prefill,
)

TMA = replace(SMALL, tma=True)
PLACES = ("contiguous", "paged", "tma")


def run(where: str, batch: Batch, device: torch.device, layout: str = "interleaved") -> torch.Tensor:
    if where == "tma" and device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        where = "contiguous"
    placed: Placed = (
        place_paged(batch, device, layout=layout)
        if where == "paged"
        else place_contiguous(batch, device, layout)
    )
    return prefill(placed, tile=TMA if where == "tma" else SMALL)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "group"),
    [
        (torch.float32, 32, 2, 1),
        (torch.bfloat16, 64, 1, 3),
        (torch.float16, 80, 1, 7),
        (torch.float32, 128, 1, 4),
        (torch.float16, 256, 1, 2),
        (torch.float32, 112, 1, 9),
    ],
)
def test_types_head_sizes_and_groups(
    where: str, dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, device: torch.device
) -> None:
    batch = make_batch((5, 20), (5, 3), kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    assert_close(run(where, batch, device), batch.expected(), on=device)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        pytest.param([1], [1], id="one token"),
        pytest.param([16, 17], [16, 17], id="whole prompts around a tile"),
        pytest.param([1, 5, 2], [33, 21, 2], id="chunks after context"),
        pytest.param([20], [52], id="chunk over several query tiles and key tiles"),
        pytest.param([4, 0, 3], [4, 0, 19], id="an empty request between"),
        pytest.param([4, 0, 3], [4, 9, 19], id="a request with context but no new tokens"),
    ],
)
def test_chunks(where: str, query_lens: list[int], seq_lens: list[int], device: torch.device) -> None:
    batch = make_batch(seq_lens, query_lens)
    assert_close(run(where, batch, device), batch.expected(), on=device)


@pytest.mark.parametrize("where", ["contiguous", "paged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(where: str, layout: str, device: torch.device) -> None:
    batch = make_batch((19, 3), (6, 3), dtype=torch.float16)
    assert_close(run(where, batch, device, layout), batch.expected(), on=device)


@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_blocks_smaller_and_larger_than_a_tile(block_size: int, device: torch.device) -> None:
    batch = make_batch((37, 4), (9, 4))
    assert_close(prefill(place_paged(batch, device, block_size)), batch.expected(), on=device)


def test_groups_too_wide_for_a_tile_take_one_head_each(device: torch.device) -> None:
    batch = make_batch((21, 3), (4, 3), kv_heads=1, group=18)
    assert_close(prefill(place_contiguous(batch, device)), batch.expected(), on=device)


@pytest.mark.parametrize("where", PLACES)
def test_length_zero_with_query_rows_yields_zeros(where: str, device: torch.device) -> None:
    batch = make_batch((0, 6), (42, 3))
    got = run(where, batch, device)
    assert torch.equal(got[:42], torch.zeros_like(got[:42]))
    assert_close(got, batch.expected(), on=device)


def test_rows_outside_every_chunk_are_left_alone(device: torch.device) -> None:
    batch = make_batch((6, 18), (6, 2))
    placed = place_contiguous(batch, device)
    q = torch.full((12, 4, 32), float("nan"), device=device)
    out = torch.full_like(q, 7.0)
    q[2:10] = batch.q.to(device)
    placed.kernels.prefill(
        q, placed.k, placed.v, out=out, max_query_len=9, tile=SMALL,
        cu_seqlens=torch.tensor([2, 8, 10], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([6, 18], dtype=torch.int32, device=device), **placed.place(),
    )  # fmt: skip
    assert_close(out[2:10].cpu(), batch.expected(), on=device)
    assert (out[:2] == 7).all() and (out[10:] == 7).all()


def test_whole_tiles_by_tma_are_the_same_bits(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no TMA (compute capability 9.0)")
    batch = make_batch((50, 33), (10, 33), dtype=torch.bfloat16, head_dim=48)
    for layout in ("interleaved", "per_layer"):
        placed = place_contiguous(batch, device, layout)
        assert torch.equal(prefill(placed, tile=TMA), prefill(placed, tile=SMALL))


def test_a_chunk_of_one_token_is_a_decode(device: torch.device) -> None:
    batch = make_batch((23, 40), (1, 1), group=3)
    placed = place_contiguous(batch, device)
    lengths = torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)
    q = batch.q.to(device)
    decoded = placed.kernels.decode(q, placed.k, placed.v, seq_lens=lengths, tile=SMALL, **placed.place())
    assert_close(prefill(placed), decoded.cpu(), on=device)


@pytest.mark.parametrize("where", ["contiguous", "paged"])
def test_the_tiles_that_ship(where: str, device: torch.device) -> None:
    batch = make_batch((140, 9), (20, 9), head_dim=64, group=4, kv_heads=1, dtype=torch.float16)
    placed: Placed = place_paged(batch, device, 16) if where == "paged" else place_contiguous(batch, device)
    assert_close(prefill(placed, tile=None), batch.expected())


@pytest.mark.parametrize("seed", range(5))
def test_random_batches(seed: int, device: torch.device) -> None:
    pick = torch.Generator().manual_seed(100 + seed)

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (), generator=pick))]

    query_lens = [choose(0, 1, 3, 8, 17) for _ in range(choose(1, 2))] + [choose(1, 5)]
    seq_lens = [n + choose(0, 1, 15, 16, 30) for n in query_lens]
    batch = make_batch(
        seq_lens,
        query_lens,
        kv_heads=choose(1, 2),
        group=choose(1, 3, 8),
        head_dim=choose(32, 40, 64),
        dtype=(torch.float32, torch.float16, torch.bfloat16)[choose(0, 1, 2)],
        seed=seed,
    )
    layout = LAYOUTS[choose(0, 1, 2)]
    contiguous = prefill(place_contiguous(batch, device, layout))
    paged = prefill(place_paged(batch, device, choose(4, 16, 32), layout))
    assert_close(contiguous, batch.expected(), on=device)
    assert torch.equal(contiguous, paged), "the same arithmetic in the same order must give the same bits"
