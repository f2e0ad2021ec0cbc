"""`generate` returns the tokens it returns with `DynamicCache`: every way of decoding, many architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.hf.models import NAMES, WINDOW, forward, generate, model, prompts
from vattn import VirtualCache
from vattn.vmm.host import HostDriver

GREEDY = {"do_sample": False, "max_new_tokens": 12}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"batch": 1, "tokens": 9}, GREEDY),
    "greedy, a batch padded on the left": ({"batch": 3, "tokens": 9, "padding": 4}, GREEDY),
    "sampled": (
        {"batch": 2, "tokens": 9, "padding": 2},
        {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2},
    ),
    "beams": (
        {"batch": 2, "tokens": 9, "padding": 3},
        {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    ),
    "prompt lookup": ({"batch": 1, "tokens": 11}, {**GREEDY, "prompt_lookup_num_tokens": 3}),
    "draft model": ({"batch": 1, "tokens": 9}, {**GREEDY, "assistant_model": "llama"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_dynamic_cache(name: str, way: str) -> None:
    shape, options = WAYS[way]
    target, inputs = model(name), prompts(**shape)
    if way == "prompt lookup":  # a text that repeats, so that there is something to look up
        inputs = {key: torch.cat([value, value], 1) for key, value in inputs.items()}
    if "assistant_model" in options:
        options = {**options, "assistant_model": model("llama", seed=3)}
    cache = VirtualCache(target.config)

    tokens = generate(target, inputs, cache, **options)

    assert torch.equal(tokens, generate(target, inputs, DynamicCache(config=target.config), **options))
    assert cache.get_seq_length() >= inputs["input_ids"].shape[1]
    cache.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text-sliding"])
def test_in_the_layout_and_with_the_pages_of_gpus_too(name: str, way: str) -> None:
    shape, options = WAYS[way]
    target, inputs = model(name), prompts(**shape)
    if "assistant_model" in options:
        options = {**options, "assistant_model": model("llama", seed=3)}
    cache = VirtualCache(target.config, layout="tokens", driver=HostDriver(granularity=2 << 20))

    tokens = generate(target, inputs, cache, **options)

    assert torch.equal(tokens, generate(target, inputs, DynamicCache(config=target.config), **options))
    cache.check()


@pytest.mark.parametrize("name", ["qwen3", "gemma2-sliding"])
def test_a_prompt_in_chunks(name: str) -> None:
    target, inputs = model(name), prompts(1, 3 * WINDOW + 1)
    options = {**GREEDY, "prefill_chunk_size": 5}

    tokens = generate(target, inputs, VirtualCache(target.config), **options)

    assert torch.equal(tokens, generate(target, inputs, DynamicCache(config=target.config), **GREEDY))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_logits_of_a_conversation_agree_with_those_of_one_pass(name: str) -> None:
    target, ids = model(name), prompts(2, 40)["input_ids"]
    cache = VirtualCache(target.config)

    parts = [forward(target, part, cache) for part in ids.split([1, 7, 1, 20, 2, 1, 8], 1)]

    torch.testing.assert_close(torch.cat(parts, 1), target(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_generate_goes_on_from_a_cache_that_holds_a_text() -> None:
    target, inputs = model("llama"), prompts(1, 9)
    answers = []
    for cache in (VirtualCache(target.config), DynamicCache(config=target.config)):
        first = generate(target, inputs, cache, **GREEDY)
        again = {"input_ids": torch.cat([first, inputs["input_ids"]], 1)}
        answers.append(generate(target, again, cache, **GREEDY))
    assert torch.equal(*answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype: torch.dtype) -> None:
    target = type(model("llama"))(model("llama").config).to(dtype).eval()
    target.load_state_dict(model("llama").state_dict())
    inputs = prompts(2, 9, padding=2)

    tokens = generate(target, inputs, VirtualCache(target.config), **GREEDY)

    assert torch.equal(tokens, generate(target, inputs, DynamicCache(config=target.config), **GREEDY))
