"""Tiny models for the tests of this folder: those of `tests.models.tiny` and some whose layers slide."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.tiny import TINY, build, randomize

# Newer releases call it `cache`.
CACHE_ARGUMENT = "cache"
if CACHE_ARGUMENT not in inspect.signature(LlamaForCausalLM.forward).parameters:
    CACHE_ARGUMENT = "past_key_values"

WINDOW = 8
_COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
SLIDING: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": _ALTERNATING},
    "gemma3_text": {"layer_types": _ALTERNATING},
    "mistral": {},  # every layer slides
    "cohere2": {"layer_types": _ALTERNATING},
    "gpt_oss": {"layer_types": _ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
}
NAMES = (*TINY, *(f"{name}-sliding" for name in SLIDING))


@functools.cache
def model(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model by name; the same object every time."""
    kind, _, sliding = name.partition("-")
    if not sliding:
        return build(name, seed)
    config = CONFIG_MAPPING[kind](**{**_COMMON, **SLIDING[kind]})
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


def prompts(batch: int, tokens: int, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token ids and mask; the first row is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 160, (batch, tokens), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, **options: Any) -> Any:
    """`model.generate` with a cache, from a fixed seed."""
    torch.manual_seed(7)
    return model.generate(**inputs, **{CACHE_ARGUMENT: cache}, pad_token_id=0, **options)


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of one call of the model."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **{CACHE_ARGUMENT: cache}).logits
        return logits
