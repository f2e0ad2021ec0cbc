"""Attention over int8 and float8 caches, against the oracle on the numbers that are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.numeric.batches import (
    Batch,
    Placed,
    assert_close,
    decode,
    make_batch,
    place_contiguous,
    place_paged,
    prefill,
)
from vattn.kernels import reference
from vattn.kernels.launch import KVScales
from vattn.kernels.split import SplitPlan


def quantised(
    batch: Batch, where: str, stored: torch.dtype, per_token: bool, device: torch.device
) -> tuple[Placed, Batch]:
    """The batch placed in an 8-bit cache, and the batch whose truth is what that cache holds."""
    head_scale = torch.full((batch.keys[0].shape[1],), 0.03)

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        return reference.quantise(x, stored, None if per_token else head_scale)

    k8, v8 = [rounded(k) for k in batch.keys], [rounded(v) for v in batch.values]

    def truth(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [x.double() * scale.double()[..., None] for x, scale in pairs]

    place = place_contiguous if where == "contiguous" else place_paged
    placed: Placed = place(replace(batch, keys=[x for x, _ in k8], values=[x for x, _ in v8]), device)
    if per_token:
        # Scales take the same places as the numbers, one each, NaN elsewhere.
        factors = replace(batch, keys=[s[..., None] for _, s in k8], values=[s[..., None] for _, s in v8])
        at = place(factors, device)
        placed.scales = KVScales(at.k[..., 0], at.v[..., 0])
    else:
        placed.scales = KVScales(head_scale.to(device), head_scale.to(device))
    return placed, replace(batch, keys=truth(k8), values=truth(v8))


CASES = pytest.mark.parametrize(
    ("stored", "per_token", "dtype"),
    [
        (torch.int8, False, torch.float32),
        (torch.int8, True, torch.bfloat16),
        (torch.float8_e4m3fn, False, torch.float16),
        (torch.float8_e4m3fn, True, torch.float32),
    ],
)


@pytest.mark.parametrize("where", ["contiguous", "paged"])
@CASES
def test_decode(
    where: str, stored: torch.dtype, per_token: bool, dtype: torch.dtype, device: torch.device
) -> None:
    batch = make_batch((1, 16, 37, 0), head_dim=80, group=3, dtype=dtype)
    placed, truth = quantised(batch, where, stored, per_token, device)
    for plan in (None, SplitPlan(16, 3)):
        assert_close(decode(placed, plan), truth.expected(), on=device, factor=2)


@pytest.mark.parametrize("where", ["contiguous", "paged"])
@CASES
def test_prefill(
    where: str, stored: torch.dtype, per_token: bool, dtype: torch.dtype, device: torch.device
) -> None:
    batch = make_batch((20, 6), (4, 6), group=3, dtype=dtype)
    placed, truth = quantised(batch, where, stored, per_token, device)
    assert_close(prefill(placed), truth.expected(), on=device, factor=2)


@pytest.mark.parametrize(("stored", "error"), [(torch.int8, 0.01), (torch.float8_e4m3fn, 0.05)])
def test_scales_per_token_and_head_keep_the_error_small(
    stored: torch.dtype, error: float, device: torch.device
) -> None:
    batch = make_batch((60, 25), head_dim=64)
    placed, _ = quantised(batch, "contiguous", stored, True, device)
    got = decode(placed).double()
    exact = batch.expected()
    assert (got - exact).norm() / exact.norm() < error


def test_every_float8_number_is_read_exactly(device: torch.device) -> None:
    """One key, so that the output is the value: all 254 finite numbers pass through."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()]
    values = torch.cat([numbers.view(torch.uint8), torch.zeros(2, dtype=torch.uint8)]).view(numbers.dtype)
    batch = make_batch((1,), kv_heads=1, group=1, head_dim=256)
    placed, _ = quantised(batch, "contiguous", torch.float8_e4m3fn, False, device)
    placed.v[placed.slots[0], 0, 0] = values.to(device)
    placed.scales = KVScales(torch.ones(1, device=device), torch.ones(1, device=device))
    assert torch.equal(decode(placed)[0, 0], values.float())
