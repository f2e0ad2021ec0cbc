"""Tiny models with random weights, one per kind of attention the engine supports.

`TINY[name]()` is a fresh config, `build(name)` a float32 model in eval mode. `MORE` has architectures
that are built otherwise but look no different to the engine. Weights are drawn wide (unit variance
through every matrix), so the best next token leads by far more than rounding, and greedy tokens can be
compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 160
MAX_POSITIONS = 512


def _config(model_type: str, **fields: Any) -> Callable[[], PreTrainedConfig]:
    """A config of that type: two layers, 64 wide, four query heads over two KV heads unless told."""
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return lambda: CONFIG_MAPPING[model_type](**{**defaults, **fields})


TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    # GQA, the common case; tied embeddings as in SmolLM2
    "llama": _config("llama", num_hidden_layers=3, tie_word_embeddings=True),
    # MQA: one KV head
    "llama_mqa": _config("llama", num_key_value_heads=1),
    # MHA, a head size that is not a power of two
    "llama_d24": _config("llama", hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=24),
    # biases on q, k and v
    "qwen2": _config("qwen2"),
    # q and k normalised per head; heads wider than hidden_size / num_heads
    "qwen3": _config("qwen3", head_dim=80),
    # as Mistral from v0.3 on: no sliding window
    "mistral": _config("mistral", sliding_window=None),
    # q, k, v in one matrix, gate and up in another
    "phi3": _config("phi3"),
    # q and k normalised over all heads; norms behind the blocks
    "olmo2": _config("olmo2"),
    # rotation of a quarter of each head, attention and MLP in parallel, LayerNorm, biases
    "gpt_neox": _config(
        "gpt_neox",
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    # tied, scaled embeddings; MQA with wide heads
    "gemma": _config("gemma", num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
    # scaled attention, residuals and logits
    "granite": _config("granite", attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0),
}

MORE: dict[str, Callable[[], PreTrainedConfig]] = {
    # interleaved rotation, parallel blocks, scaled logits
    "cohere": _config("cohere", logit_scale=0.5),
    # learned absolute positions, Conv1D projections
    "gpt2": _config("gpt2", num_key_value_heads=4),
    # mixture of experts
    "mixtral": _config("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """That model with weights which depend on `seed` alone; float32, eval, no gradients."""
    return randomize(AutoModelForCausalLM.from_config({**TINY, **MORE}[name](), dtype=torch.float32), seed)


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Overwrite every weight: matrices of unit gain, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    # A tied head scores a token by its own embedding: kept small, or each token would predict itself.
    tied = model.get_output_embeddings().weight is embedding
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight is embedding:
                weight.normal_(0.0, 0.08 if tied else 1.0, generator=generator)
            elif weight.dim() >= 2:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.3, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
    return model.eval().requires_grad_(False)
