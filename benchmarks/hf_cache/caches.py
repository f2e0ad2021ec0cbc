"""The caches and models that are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from vattn import VirtualCache

# Newer releases call it `cache`.
CACHE_ARGUMENT = "cache"
if CACHE_ARGUMENT not in inspect.signature(LlamaForCausalLM.forward).parameters:
    CACHE_ARGUMENT = "past_key_values"
DTYPE = torch.float32  # CPUs without bf16 matrix units compute in it


def models(smoke: bool) -> dict[str, LlamaConfig]:
    """SmolLM2-135M, and four of the sixteen layers of Llama 3.2 1B with a small vocabulary."""
    if smoke:
        return {"smollm2": _llama(layers=2, hidden=192, heads=3, kv_heads=1, inner=128, vocab=256)}
    return {
        "smollm2": _llama(layers=30, hidden=576, heads=9, kv_heads=3, inner=1536, vocab=49152),
        "llama": _llama(layers=4, hidden=2048, heads=32, kv_heads=8, inner=8192, vocab=8192),
    }


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
    )


def build(config: LlamaConfig) -> LlamaForCausalLM:
    """The model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(DTYPE).eval().requires_grad_(False)


def factories(config: LlamaConfig, most: int) -> dict[str, Callable[[], Any]]:
    """How to make each cache; `most`: tokens of the longest context, for which StaticCache reserves."""
    grouped = {"nbits": 4, "q_group_size": 64, "residual_length": 128}
    return {
        "dynamic": lambda: DynamicCache(config=config),
        "virtual": lambda: VirtualCache(config),
        "virtual-tokens": lambda: VirtualCache(config, layout="tokens"),
        "static": lambda: StaticCache(config=config, max_cache_len=most),
        "quantized-fp8": lambda: QuantizedCache("fp8", config),
        "quantized-quanto": lambda: QuantizedCache("quanto", config, axis_key=0, axis_value=0, **grouped),
        "quantized-hqq": lambda: QuantizedCache("hqq", config, axis_key=1, axis_value=1, **grouped),
        "offloaded": lambda: DynamicCache(config=config, offloading=True),
    }


def states(config: LlamaConfig, tokens: int) -> torch.Tensor:
    """K or V of that many tokens of one layer."""
    dim = config.hidden_size // config.num_attention_heads
    return torch.randn(1, config.num_key_value_heads, tokens, dim, dtype=DTYPE)


def token_bytes(config: LlamaConfig) -> int:
    """Bytes of one token's K and V in all layers."""
    dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * dim * DTYPE.itemsize


def fill(cache: Any, config: LlamaConfig, prompt: torch.Tensor) -> None:
    """Put a prompt into every layer."""
    for layer in range(config.num_hidden_layers):
        cache.update(prompt, prompt, layer)


def usable(make: Callable[[], Any], config: LlamaConfig) -> str:
    """Why a cache cannot run here; empty if it can."""
    try:
        cache = make()
        for tokens in (8, 1):
            fill(cache, config, states(config, tokens))
    except (ImportError, AssertionError, RuntimeError, ValueError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""
