"""Storing new keys and values: where they land, what stays as it was, and rounding to 8 bits, bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.numeric.batches import LAYOUTS, empty_kv, to
from vattn.kernels import reference
from vattn.kernels.launch import KVScales
from vattn.kernels.quantise import store_quantised
from vattn.kernels.store import store

ROWS, POSITIONS = 3, 8


def new_tokens(
    count: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as a fused projection leaves them: slices of one packed tensor."""
    g = torch.Generator().manual_seed(3)
    fused = torch.randn(count, 4, kv_heads, head_dim, generator=g).to(dtype)
    return fused[:, 1], fused[:, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim"),
    [(torch.float32, 2, 32), (torch.bfloat16, 3, 80), (torch.float16, 1, 128), (torch.bfloat16, 40, 256)],
)
def test_tokens_land_in_their_places_and_nowhere_else(
    layout: str, dtype: torch.dtype, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    k, v = new_tokens(5, kv_heads, head_dim, dtype)
    k_cache, v_cache = (to(x, device) for x in empty_kv(layout, ROWS, POSITIONS, (kv_heads, head_dim), dtype))
    places = torch.tensor([0, POSITIONS - 1, POSITIONS, 2 * POSITIONS + 3, -1])
    store(k.to(device), v.to(device), k_cache, v_cache, places.to(device))
    for new, cache in ((k, k_cache.cpu()), (v, v_cache.cpu())):
        assert torch.equal(cache.reshape(-1, kv_heads, head_dim)[places[:4]], new[:4])
        assert cache.isnan().sum() == (ROWS * POSITIONS - 4) * kv_heads * head_dim


def test_a_flat_cache_is_one_row(device: torch.device) -> None:
    k, v = (x.to(device) for x in new_tokens(3, 2, 16, torch.float32))
    cache = torch.zeros(2, 50, 2, 16, device=device)
    store(k, v, cache[0].unsqueeze(0), cache[1].unsqueeze(0), torch.tensor([49, 0, 7], device=device))
    assert torch.equal(cache[0, [49, 0, 7]], k) and torch.equal(cache[1, [49, 0, 7]], v)


def test_no_tokens_is_no_work(device: torch.device) -> None:
    k, v = (x.to(device) for x in new_tokens(0, 2, 16, torch.float32))
    cache = torch.zeros(1, 4, 2, 16, device=device)
    store(k, v, cache, cache, torch.empty(0, dtype=torch.int64, device=device))
    assert not cache.any()


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """`[tokens, 2, 64]`: zeros, tiny and huge vectors, ties between neighbours, negative numbers."""
    x = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(4))
    x[0, 0] = 0
    x[1] *= 1e-4
    x[2] *= 100
    x[3, 1] = torch.arange(64) / 4 - 8
    x[4, 0, 0] = -1e4
    return x.to(dtype)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token and head"])
def test_rounding_to_8_bits_is_exact(
    stored: torch.dtype, dtype: torch.dtype, per_token: bool, device: torch.device
) -> None:
    k = awkward(dtype)
    v = awkward(dtype).flip(0)
    k_cache, v_cache = (to(x, device) for x in empty_kv("interleaved", ROWS, POSITIONS, (2, 64), stored))
    shape = (ROWS, POSITIONS, 2) if per_token else (2,)
    scales = KVScales(torch.full(shape, 0.25).to(device), torch.full(shape, 0.01).to(device))
    places = torch.tensor([5, 1, 20, 7, 0, 12])
    store(k.to(device), v.to(device), k_cache, v_cache, places.to(device), scales)
    for new, cache, scale in ((k, k_cache, scales.k), (v, v_cache, scales.v)):
        want, want_scale = reference.quantise(new, stored, None if per_token else scale.cpu())
        got = cache.cpu().reshape(-1, 2, 64)[places]
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        if per_token:
            assert torch.equal(scale.cpu().reshape(-1, 2)[places], want_scale)


def test_every_float8_number_and_every_tie_between_two_rounds_as_torch_does(device: torch.device) -> None:
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 64)]).reshape(-1, 1, 64)
    cache = torch.zeros(1, len(x), 1, 64, dtype=torch.float8_e4m3fn, device=device)
    ones = torch.ones(1, device=device)
    places = torch.arange(len(x), device=device)
    store(x.to(device), x.to(device), cache, cache.clone(), places, KVScales(ones, ones))
    got = cache.cpu().reshape(x.shape).view(torch.uint8)
    assert torch.equal(got, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("per_token", [False, True], ids=["per head", "per token and head"])
def test_pytorch_stores_the_same_bits(stored: torch.dtype, per_token: bool, device: torch.device) -> None:
    k = awkward(torch.float32)
    v = awkward(torch.float32).flip(0)
    places = torch.tensor([5, 1, 20, 7, 0, 12])
    caches = []
    for kernel in (True, False):
        cache = torch.zeros(2, ROWS, POSITIONS, 2, 64, dtype=torch.int8, device=device).view(stored)
        scales = torch.full((2, ROWS, POSITIONS, 2) if per_token else (2, 2), 0.25, device=device)
        new = (places.to(device), k.to(device), v.to(device))
        if kernel:
            store(*new[1:], cache[0], cache[1], new[0], KVScales(scales[0], scales[1]))
        else:
            flat = scales.flatten(1, 2) if per_token else scales
            store_quantised(cache.flatten(1, 2), flat, *new, per_token=per_token)
        caches.append((cache.view(torch.int8).cpu(), scales.cpu()))
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])
