"""PyTorch's attention over 8-bit caches, against the oracle of the kernels on the numbers that are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kv.caches import BACKENDS, GRANULARITY
from vattn.attention.factory import create_attention
from vattn.config import KVCacheConfig
from vattn.errors import ConfigError
from vattn.kernels import reference
from vattn.kernels.launch import KVScales
from vattn.kv.base import Chunk, ContiguousInputs, KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import SCALE_BYTES, KVShape
from vattn.kv.ranges import KVRanges
from vattn.vmm.host import HostDriver

SHAPE = KVShape(2, 3, 20, torch.int8, SCALE_BYTES)
GROUP = 2
CPU = torch.device("cpu")
WAYS: dict[str, tuple[dict[str, Any], KVShape]] = {}
for _name, _dtype in (("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)):
    _ranges = KVRanges(torch.full((2, 3), 2.5), torch.full((2, 3), 3.5))
    WAYS[f"{_name} token"] = ({"dtype": _name}, replace(SHAPE, dtype=_dtype))
    WAYS[f"{_name} static"] = (
        {"dtype": _name, "scales": _ranges},
        replace(SHAPE, dtype=_dtype, scale_bytes=0),
    )


def make(backend: str, way: str) -> KVCache:
    config, shape = WAYS[way]
    return create_kv_cache(
        KVCacheConfig(memory_bytes=1 << 20, **BACKENDS[backend], **config),  # type: ignore[arg-type]
        shape,
        HostDriver(granularity=GRANULARITY),
        max_model_len=96,
        model_len=96,
        max_num_seqs=5,
    )


STEPS = (
    [("a", 0, 13), ("b", 0, 1), ("c", 0, 30)],  # whole prompts: already they read what was stored
    [("a", 13, 1), ("b", 1, 1), ("c", 30, 7)],  # decodes, and a chunk behind a context
    [("a", 14, 1), ("b", 2, 1)],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["virtual-interleaved", "static-per_layer", "paged-16", "paged-1"])
def test_attention_reads_what_is_stored(backend: str, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = make(backend, way)
    attention = create_attention("auto", cache, CPU)
    for request, total in (("a", 15), ("b", 3), ("c", 37)):
        cache.attach(request, [0] * total)
    for step in STEPS:
        inputs = cache.begin_step([Chunk(r, start, n) for r, start, n in step])
        planned = attention.plan(inputs)
        tokens = inputs.cu_seqlens[-1]
        assert inputs.scales is not None
        for layer in range(2):
            q, k, v = (torch.randn(tokens, h, 20).to(dtype) for h in (3 * GROUP, 3, 3))
            got = planned.attend(layer, q, k, v, 0.2)
            places: list[Any] = (
                inputs.slots if isinstance(inputs, ContiguousInputs) else inputs.tables()  # type: ignore[attr-defined]
            )
            keys, values = inputs.kv[layer]
            scales = KVScales(*inputs.scales[layer])
            want = reference.attention(
                q, keys, values, places, inputs.cu_seqlens, inputs.seq_lens, 0.2, scales
            )
            tolerance = 1e-5 if dtype == torch.float32 else 3e-2
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
            # And what is stored is the new token's, rounded as the reference rounds.
            at = inputs.slot_mapping
            static = None if inputs.scales.ndim == 5 else inputs.scales[layer, 0]
            stored, factors = reference.quantise(k, inputs.kv.dtype, static)
            assert torch.equal(keys.flatten(0, 1)[at].float(), stored.float())
            if static is None:
                assert torch.equal(scales.k.flatten(0, 1)[at], factors)
    del planned, inputs, keys, values, scales
    cache.close()


@pytest.mark.parametrize(("name", "backend"), [("flex", "virtual-per_layer"), ("flex", "paged-16")])
def test_attention_that_reads_no_scales_refuses(name: str, backend: str) -> None:
    cache = make(backend, "int8 token")
    with pytest.raises(ConfigError, match=r"reads no quantised KV \(.*int8\): use 'triton'"):
        create_attention(name, cache, CPU)
    cache.close()
