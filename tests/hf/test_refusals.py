"""What `VirtualCache` cannot do, it says: what was asked, what there is, what to do instead."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, T5Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hf.models import CACHE_ARGUMENT, generate, model, prompts
from vattn import VirtualCache
from vattn.errors import CapacityError, ConfigError, UnsupportedModel, VattnError
from vattn.vmm.host import HostDriver


def states(batch: int = 1, heads: int = 2, tokens: int = 3, dim: int = 16) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("mamba", "LinearAttentionLayer"),
        ("qwen3_next", "LinearAttentionLayer"),
        ("falcon_h1", "LinearAttentionAndFullAttentionLayer"),
        ("deepseek_v32", "DynamicIndexedLayer"),
    ],
)
def test_layers_it_does_not_have_are_named(kind: str, layer: str) -> None:
    if kind not in CONFIG_MAPPING:
        return
    with pytest.raises(UnsupportedModel, match=f"layer 0 of this model needs a {layer}"):
        VirtualCache(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs max_len=… or a config"),
        ({"config": T5Config()}, r"T5Config names no max_position_embeddings: VirtualCache\(config, max_len"),
        ({"max_len": 0}, "max_len must be a positive whole number, not 0"),
        ({"max_len": 2.5}, "max_len must be a positive whole number, not 2.5"),
        ({"max_len": 8, "page_bytes": -1}, "page_bytes must be a positive whole number, not -1"),
        ({"max_len": 8, "layout": "rows"}, "layout='rows' is unknown: use one of 'auto', 'heads', 'tokens'"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VirtualCache(**arguments)


def test_a_page_the_system_cannot_map() -> None:
    cache = VirtualCache(max_len=8, page_bytes=1000)
    with pytest.raises(ValueError, match="granularity"):
        cache.update(states(), states(), 0)


@pytest.mark.parametrize(
    "other",
    [states(batch=2), states(heads=1), states(dim=8), states().to(torch.float16)],
    ids=["batch", "heads", "dim", "dtype"],
)
def test_states_of_another_shape(other: torch.Tensor) -> None:
    cache = VirtualCache(max_len=64)
    cache.update(states(), states(), 0)
    for keys, values in ((other, states()), (states(), other)):
        with pytest.raises(
            ConfigError, match=r"holds keys \[batch=1, heads=2, tokens, dim=16\] of torch.float32"
        ):
            cache.update(keys, values, 0)
    assert cache.get_seq_length() == 3
    cache.reset()
    cache.update(other, other, 0)  # after a reset it may hold others


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (states(batch=0), states(batch=0)),
        (states(batch=2), states()),
        (states(tokens=2), states(tokens=1)),
        (states()[0], states()[0]),
    ],
    ids=["no sequence", "batches differ", "tokens differ", "three dimensions"],
)
def test_states_that_are_none(keys: torch.Tensor, values: torch.Tensor) -> None:
    cache = VirtualCache(max_len=64)
    with pytest.raises(ConfigError, match=r"must be \[batch, heads, tokens, dim\]"):
        cache.update(keys, values, 0)
    cache.update(states(), states(), 0)
    with pytest.raises(ConfigError):
        cache.update(states(tokens=2), states(tokens=1), 0)
    with pytest.raises(ConfigError, match="at least one number"):
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert cache.get_seq_length() == 3
    cache.check()


def test_max_len_stops_generate() -> None:
    target = model("llama")
    cache = VirtualCache(target.config, max_len=10)
    with pytest.raises(
        CapacityError, match=r"hold 11 tokens; its max_len is 10: VirtualCache\(config, max_len"
    ):
        generate(target, prompts(1, 6), cache, do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert [layer.get_seq_length() for layer in cache.layers] == [10] * len(cache)


def test_max_len_stops_all_layers_alike() -> None:
    target = model("gemma3_text-sliding")
    cache = VirtualCache(target.config, max_len=10)
    with pytest.raises(CapacityError):
        generate(target, prompts(1, 6), cache, do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert [layer.get_seq_length() for layer in cache.layers] == [10] * len(cache)


def test_autograd() -> None:
    target = copy.deepcopy(model("llama")).requires_grad_(True)
    cache = VirtualCache(target.config)
    with pytest.raises(VattnError, match=r"torch.no_grad\(\)"):
        target(prompts(1, 4)["input_ids"], **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 0


def test_offloading() -> None:
    cache = VirtualCache(LlamaConfig())
    for call in (cache.offload, cache.prefetch):
        with pytest.raises(NotImplementedError, match="does not offload"):
            call(0)
    for layer_call in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="does not offload"):
            layer_call()


def test_assigned_tensors() -> None:
    layer = VirtualCache(LlamaConfig()).layers[0]
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=f"{name} of a VirtualCache lie at a fixed address"):
            setattr(layer, name, states())


def test_a_driver_of_another_device() -> None:
    cache = VirtualCache(max_len=8, driver=HostDriver())
    with pytest.raises(ConfigError, match="driver given maps memory of cpu, the model computes on meta"):
        cache.update(states().to("meta"), states().to("meta"), 0)
    with pytest.raises(ValueError, match="no virtual memory driver for device 'meta'"):
        VirtualCache(max_len=8).update(states().to("meta"), states().to("meta"), 0)


def test_pickling_with_a_driver_of_the_callers() -> None:
    cache = VirtualCache(max_len=8, driver=HostDriver())
    cache.update(states(), states(), 0)
    with pytest.raises(TypeError, match="bound to a driver"):
        pickle.dumps(cache)
    assert torch.equal(copy.deepcopy(cache).layers[0].keys, cache.layers[0].keys)


def test_linear_states() -> None:
    cache = VirtualCache(LlamaConfig())
    assert not any(cache.is_linear) and isinstance(cache, DynamicCache)
    with pytest.raises(ValueError, match="LinearAttention"):
        cache.update_conv_state(states(), 0)
    with pytest.raises(ValueError, match="indexer"):
        cache.update_indexer(states(), 0)
