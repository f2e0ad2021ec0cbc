"""Quantised KV in memory: its bytes, its alignment, and scales that go where their values go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kv.caches import BACKENDS, GRANULARITY
from vattn.config import KVCacheConfig
from vattn.kv.base import Chunk, ContiguousInputs, KVCache, PagedInputs
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import SCALE_BYTES, KVLayout, KVShape, RowLayout
from vattn.kv.memory.swap import SwapSpace
from vattn.kv.memory.views import kv_views
from vattn.kv.ranges import KVRanges
from vattn.vmm.host import HostDriver

MODELS = {
    "llama-3-8b": KVShape(32, 8, 128, torch.bfloat16),
    "smollm2": KVShape(30, 3, 64, torch.bfloat16),
    "odd": KVShape(3, 3, 20, torch.bfloat16),
}
models = pytest.mark.parametrize("model", MODELS)


def per_token(shape: KVShape) -> KVShape:
    return replace(shape, dtype=torch.int8, scale_bytes=SCALE_BYTES)


@models
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_static_scales_hold_twice_the_tokens_of_bfloat16(model: str, dtype: torch.dtype) -> None:
    shape = MODELS[model]
    assert 2 * replace(shape, dtype=dtype).token_bytes == shape.token_bytes


@models
def test_scales_per_token_cost_four_bytes_a_head_and_less_than_sixteen_of_padding(model: str) -> None:
    shape = MODELS[model]
    unit = per_token(shape).token_bytes / (2 * shape.num_layers)
    values, scales = shape.num_kv_heads * shape.head_dim, 4 * shape.num_kv_heads
    assert values + scales <= unit < values + scales + 16
    if model == "llama-3-8b":
        assert shape.token_bytes / per_token(shape).token_bytes == pytest.approx(1.94, abs=0.005)


@models
@pytest.mark.parametrize("kind", list(KVLayout))
def test_values_are_aligned_for_wide_loads_and_scales_for_float32(model: str, kind: KVLayout) -> None:
    shape = per_token(MODELS[model])
    layout = RowLayout(kind, shape, 2, 40, 4096)
    size = 1 + sum((n - 1) * s for n, s in zip(layout.memory_shape, layout.memory_strides, strict=True))
    memory = torch.zeros(size, dtype=torch.int8).as_strided(layout.memory_shape, layout.memory_strides)
    _, kv, scales = kv_views(memory, shape)
    assert scales is not None and scales.shape == kv.shape[:-1] and scales.dtype == torch.float32
    assert all(stride % 16 == 0 for stride in kv.stride()[:4])
    assert (scales.data_ptr() - memory.data_ptr()) % 4 == 0
    kv.fill_(1)
    assert not scales.any(), "values and scales do not overlap"
    scales.fill_(2.0)
    assert (kv == 1).all()


SHAPE = KVShape(2, 2, 12, torch.int8, SCALE_BYTES)
RANGES = KVRanges(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]]))


def make(backend: str, config: dict[str, Any], shape: KVShape) -> KVCache:
    return create_kv_cache(
        KVCacheConfig(memory_bytes=1 << 20, **BACKENDS[backend], **config),  # type: ignore[arg-type]
        shape,
        HostDriver(granularity=GRANULARITY),
        max_model_len=96,
        model_len=96,
        max_num_seqs=5,
        fingerprint="model",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_books_count_scales_as_tokens_bytes(backend: str) -> None:
    cache = make(backend, {"dtype": "int8"}, SHAPE)
    cache.attach("a", [1] * 50)
    cache.attach("b", [2] * 7)
    usage = cache.usage()
    assert usage.logical == 57 * SHAPE.token_bytes == 57 * 4 * (24 + 8)
    usage.check()
    cache.check()
    cache.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_s_scales_are_where_its_values_are(backend: str) -> None:
    cache = make(backend, {"dtype": "int8"}, SHAPE)
    cache.attach("a", [1] * 40)
    inputs = cache.begin_step([Chunk("a", 0, 40)])
    assert inputs.scales is not None and inputs.scales.shape == inputs.kv.shape[:-1]
    inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = 3
    inputs.scales.flatten(2, 3)[:, :, inputs.slot_mapping] = 0.5
    # Copying memory copies both: that is all that sharing and swapping do.
    memory, rows = cache.views.memory, inputs.kv.shape[2]
    if isinstance(inputs, ContiguousInputs):
        cache.attach("b", [1] * 40)
        [other] = cache.begin_step([Chunk("b", 0, 40)]).slots  # type: ignore[attr-defined]
        memory[:, :, other, :40] = memory[:, :, inputs.slots[0], :40]
        where = (slice(None), slice(None), other, slice(0, 40))
    else:
        assert isinstance(inputs, PagedInputs)
        other = next(b for b in range(rows) if b not in inputs.block_tables[0])
        memory[:, :, other] = memory[:, :, inputs.block_tables[0][0]]
        where = (slice(None), slice(None), other, slice(None))
    assert (cache.tensor[where] == 3).all()
    assert cache.scales is not None and (cache.scales[where] == 0.5).all()
    del memory, inputs
    cache.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_scales_reach_every_step(backend: str) -> None:
    shape = replace(SHAPE, scale_bytes=0)
    cache = make(backend, {"dtype": "int8", "scales": RANGES}, shape)
    cache.attach("a", [1] * 3)
    scales = cache.begin_step([Chunk("a", 0, 3)]).scales
    assert scales is not None
    assert torch.equal(scales * 127, torch.stack([RANGES.k, RANGES.v], 1))
    cache.close()


def everything(cache: KVCache, request_id: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored values and scales of a request, read the way a kernel would."""
    inputs = cache.begin_step([Chunk(request_id, tokens - 1, 1)])
    assert inputs.scales is not None
    if isinstance(inputs, ContiguousInputs):
        row = inputs.slots[0]
        return inputs.kv[:, :, row, :tokens].clone(), inputs.scales[:, :, row, :tokens].clone()
    assert isinstance(inputs, PagedInputs)
    table = inputs.block_tables[0]
    kv, scales = (x[:, :, table].flatten(2, 3)[:, :, :tokens] for x in (inputs.kv, inputs.scales))
    return kv, scales


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_cached_prefixes_and_swapped_requests_bring_their_scales(backend: str) -> None:
    cache = make(backend, {"dtype": "int8"}, SHAPE)
    cache.swap = SwapSpace(1 << 20, torch.device("cpu"))
    text = list(range(40))
    cache.attach("parent", text, salt="")
    inputs = cache.begin_step([Chunk("parent", 0, 40)])
    assert inputs.scales is not None
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (2, 2, 40, 2, 12), generator=g, dtype=torch.int8)
    scales = torch.rand(2, 2, 40, 2, generator=g)
    inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = values
    inputs.scales.flatten(2, 3)[:, :, inputs.slot_mapping] = scales
    cache.computed("parent", text, 40)

    def same(request_id: str, tokens: int) -> None:
        got = everything(cache, request_id, tokens)
        assert torch.equal(got[0], values[:, :, :tokens]) and torch.equal(got[1], scales[:, :, :tokens])
        cache.check()

    assert cache.fork("parent", "child", 40)
    same("child", 40)
    hit = cache.attach("next", [*text[:35], 99], salt="")
    assert hit is not None and (hit > 0) == cache.shares_prefixes
    if hit:
        same("next", hit)
    assert cache.swap_out("parent")
    cache.free("child")
    cache.free("next")
    cache.reset_prefix_cache()
    for i in range(3):  # others write where it was
        assert cache.attach(f"other {i}", [7] * 60) is not None
        inputs = cache.begin_step([Chunk(f"other {i}", 0, 60)])
        inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = 1
    restored = cache.swap_in("parent", text, salt="")
    assert restored is not None
    same("parent", restored)
    assert restored >= 39
    del inputs
    cache.close()
