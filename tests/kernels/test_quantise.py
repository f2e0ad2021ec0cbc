"""8-bit keys and values in PyTorch: equal to the reference to the bit, and no worse than half a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vattn.kernels import reference
from vattn.kernels.quantise import LARGEST, dequantise, quantise, store_quantised

TYPES = [torch.int8, torch.float8_e4m3fn]
types = pytest.mark.parametrize("stored", TYPES)
per_token = pytest.mark.parametrize("per_token", [True, False], ids=["token", "static"])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def read(stored: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(stored.shape)
    dequantise(stored, scales.unsqueeze(-1), out)
    return out


def awkward() -> Tensor:
    """`[tokens, 2, 64]`: zeros, tiny and huge vectors, exact halves, one outlier."""
    x = torch.randn(7, 2, 64, generator=torch.Generator().manual_seed(4))
    x[0, 0] = 0
    x[1] *= 1e-4
    x[2] *= 100
    x[3, 1] = torch.arange(64) / 4 - 8
    x[4, 0, 0] = -1e4
    x[5] = torch.arange(64) - 31.5
    x[5, :, -1] = 127
    return x


@types
@per_token
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_bits_are_the_reference_s(stored: torch.dtype, per_token: bool, dtype: torch.dtype) -> None:
    x = awkward().to(dtype)
    scale = None if per_token else torch.tensor([0.25, 0.01])
    got, got_scale = quantise(x, stored, scale)
    want, want_scale = reference.quantise(x, stored, scale)
    assert torch.equal(bits(got), bits(want)) and torch.equal(got_scale, want_scale)


@given(
    seed=st.integers(0, 2**32),
    log_size=st.floats(-12, 12),
    outlier=st.floats(1, 1e4),
    heads=st.integers(1, 4),
)
def test_int8_is_off_by_half_a_step_at_most(seed: int, log_size: float, outlier: float, heads: int) -> None:
    x = torch.randn(5, heads, 24, generator=torch.Generator().manual_seed(seed)) * math.exp(log_size)
    x[..., 0] *= outlier
    stored, scale = quantise(x, torch.int8)
    error = (x.double() - read(stored, scale).double()).abs()
    # Half a step, and what float32 arithmetic adds to it.
    assert (error <= scale.double().unsqueeze(-1) / 2 + x.abs().double() * 2**-22).all()
    assert (stored.abs().amax(-1) == 127).all(), "each vector uses the whole range"


@given(seed=st.integers(0, 2**32), log_size=st.floats(-12, 12))
def test_float8_is_off_by_a_sixteenth_or_half_its_smallest_step(seed: int, log_size: float) -> None:
    x = torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(seed)) * math.exp(log_size)
    stored, scale = quantise(x, torch.float8_e4m3fn)
    error = (x.double() - read(stored, scale).double()).abs()
    subnormal = scale.double().unsqueeze(-1) * 2**-10
    assert (error <= torch.maximum(x.abs().double() / 16, subnormal) * (1 + 1e-6)).all()


@types
def test_beyond_a_static_range_values_are_clamped(stored: torch.dtype) -> None:
    scale = torch.tensor([0.5])
    got, _ = quantise(torch.tensor([[[1e6, -1e6, 1.0]]]), stored, scale)
    edge = LARGEST[stored] * 0.5
    assert read(got, scale.expand(1, 1)).tolist() == [[[edge, -edge, 1.0]]]


@types
def test_a_head_of_scale_0_is_0(stored: torch.dtype) -> None:
    got, _ = quantise(torch.ones(1, 1, 4), stored, torch.zeros(1))
    assert not got.float().any()


@types
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_read_exactly(stored: torch.dtype, dtype: torch.dtype) -> None:
    """All 254 finite numbers of float8, all 256 of int8, with strides and a scale that loses nothing."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    codes = codes[codes.float().isfinite()]
    strided = torch.zeros(len(codes), 3, dtype=torch.uint8).view(stored)
    strided[:, 1] = codes
    out = torch.empty(len(codes), dtype=dtype)
    dequantise(strided[:, 1], torch.tensor(0.5), out)
    assert torch.equal(out, (codes.float() * 0.5).to(dtype))


@types
@per_token
def test_tokens_and_scales_land_in_their_places_alone(stored: torch.dtype, per_token: bool) -> None:
    k, v = awkward(), awkward().flip(0)
    kv = torch.full((2, 20, 2, 80), 77, dtype=torch.int8).view(stored)[..., :64]
    scales = torch.full((2, 20, 2), 9.0) if per_token else torch.tensor([[0.25, 0.01], [0.5, 0.02]])
    before = scales.clone()
    places = torch.tensor([5, 1, 19, 7, 0, 12, 6])
    store_quantised(kv, scales, places, k, v, per_token=per_token)
    others = [i for i in range(20) if i not in places]
    for which, new in enumerate((k, v)):
        want, want_scale = reference.quantise(new, stored, None if per_token else before[which])
        assert torch.equal(bits(kv[which, :].view(torch.int8)[places]), bits(want))
        assert (kv[which].view(torch.int8)[others] == 77).all()
        if per_token:
            assert torch.equal(scales[which, places], want_scale) and (scales[which, others] == 9).all()
        else:
            assert torch.equal(scales[which], before[which])
