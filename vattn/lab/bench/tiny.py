"""A tiny model with random weights: benchmarks run with it in seconds, with nothing to download.

vattn bench throughput --model tiny
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vattn.models.loader import LoadedModel, load_model
from vattn.models.placement import choose_device, choose_dtype

TINY = "tiny"
"""What `--model` calls it."""

MAX_POSITIONS = 2048


def tiny_config() -> LlamaConfig:
    """Llama, two layers, 64 wide, four query heads over two KV heads: 512 bytes of KV per float32 token."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def load_tiny(device: str = "auto", dtype: str = "auto", seed: int = 0) -> LoadedModel:
    """The tiny model, the same weights for the same seed; it has no tokenizer, so prompts are token ids."""
    place = choose_device(device)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = LlamaForCausalLM(tiny_config())
    finally:
        torch.random.set_rng_state(state)
    model.to(place, choose_dtype(dtype, place, torch.float32))
    return load_model(model.eval().requires_grad_(False), device=place)


def load_for_bench(name: str, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """`"tiny"`, or any model `load_model` finds."""
    return load_tiny(device, dtype) if name == TINY else load_model(name, device=device, dtype=dtype)
