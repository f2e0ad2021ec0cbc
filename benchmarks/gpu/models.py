"""The models that engines are compared on: real shapes, random weights, made where they are used."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "small": {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model of that shape, weights drawn on the device with unit gain, eval mode.

    No file is read or written. Unit gain keeps activations and logits of ordinary size, so that the work is
    that of a trained model, and so that the best token leads by more than rounding in float32.
    """
    fields = dict(CONFIGS[name])
    config = CONFIG_MAPPING[fields.pop("model_type")](
        **fields, initializer_range=fields["hidden_size"] ** -0.5
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)
