"""Which models are accepted, which are refused and by what name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.tiny import MORE, TINY, build, randomize
from vattn.errors import UnsupportedModel
from vattn.models.attention import register_attention
from vattn.models.proof import prove_packed
from vattn.models.spec import ModelSpec
from vattn.models.support import PROVEN_TYPES, check_supported

ALL = {**TINY, **MORE}

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # model type, fields, the feature named, the evidence shown
    (
        "mistral",
        {"sliding_window": 4096, "max_position_embeddings": 32768},
        "sliding-window",
        "sliding_window=4096",
    ),
    (
        "phi3",
        {"sliding_window": 2047, "max_position_embeddings": 4096},
        "sliding-window",
        "sliding_window=2047",
    ),
    ("starcoder2", {"sliding_window": 1024}, "sliding-window", "sliding_window=1024"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 8},
        "sliding-window",
        "layer_types has 'sliding_attention', sliding_window=1024",
    ),
    ("gemma3_text", {}, "sliding-window", "layer_types has 'sliding_attention'"),
    ("gemma2", {}, "soft-capped attention scores", "attn_logit_softcapping=50.0"),
    ("deepseek_v2", {}, "multi-head latent attention (MLA)", "kv_lora_rank=512"),
    ("deepseek_v3", {}, "multi-head latent attention (MLA)", "kv_lora_rank=512"),
    ("gpt_oss", {}, "attention sinks", "model_type='gpt_oss'"),
    ("mamba", {}, "state-space layers", "model_type='mamba'"),
    ("mamba2", {}, "state-space layers", "model_type='mamba2'"),
    ("jamba", {}, "linear-attention or state-space layers", "layer_types has 'linear_attention'"),
    ("qwen3_next", {}, "linear-attention or state-space layers", "layer_types has 'linear_attention'"),
    ("falcon_h1", {}, "linear-attention or state-space layers", "layer_types has 'hybrid'"),
    (
        "lfm2",
        {"layer_types": ["conv"] * 31 + ["full_attention"]},
        "convolution layers",
        "layer_types has 'conv'",
    ),
    ("rwkv", {}, "recurrent layers", "model_type='rwkv'"),
    ("llama4_text", {}, "chunked attention", "layer_types has 'chunked_attention'"),
    ("gpt_neo", {}, "local attention", "attention_layers=['global', 'local'"),
    ("bloom", {}, "ALiBi", "model_type='bloom'"),
    ("mpt", {}, "ALiBi", "model_type='mpt'"),
    ("falcon", {"alibi": True}, "ALiBi", "alibi=True"),
    ("t5", {}, "encoder-decoder", "is_encoder_decoder=True"),
    ("whisper", {}, "encoder-decoder", "is_encoder_decoder=True"),
    ("gpt2", {"add_cross_attention": True}, "cross-attention", "add_cross_attention=True"),
    ("mllama", {}, "cross-attention", "cross_attention_layers="),
    ("llava", {}, "image input", "vision_config is set"),
    ("qwen2_audio", {}, "audio input", "audio_config is set"),
    ("bert", {}, "bidirectional attention", "is_decoder=False"),
    ("llama", {"is_causal": False}, "bidirectional attention", "is_causal=False"),
    ("gemma3n_text", {}, "KV shared between layers", "num_kv_shared_layers=15"),
    ("gemma4_text", {}, "layers of different shapes", "per_layer_config is set"),
    (
        "laguna",
        {"layer_types": None, "num_attention_heads_per_layer": [48, 64] * 20},
        "layers of different shapes",
        "num_attention_heads_per_layer=[48, 64, 48",
    ),
    ("mimo_v2_flash", {}, "keys and values of different sizes", "head_dim=192, v_head_dim=128"),
    ("diffllama", {}, "differential attention", "model_type='diffllama'"),
    ("doge", {}, "dynamic attention masks", "model_type='doge'"),
    ("falcon", {}, "computes attention by itself", "FalconForCausalLM"),
    ("clip", {}, "image input", "vision_config is set"),
    ("vit", {}, "not a decoder-only language model", "ViTConfig"),
]


@pytest.mark.parametrize(("model_type", "fields", "feature", "evidence"), REFUSED)
def test_refused_by_name(model_type: str, fields: dict[str, Any], feature: str, evidence: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    for field, value in fields.items():
        setattr(config, field, value)
    if "use_sliding_window" in fields:  # what the window means is worked out when a config is made
        config = CONFIG_MAPPING[model_type](**fields)
    with pytest.raises(UnsupportedModel) as refusal:
        check_supported(config)
    assert model_type in str(refusal.value) or "ForCausalLM" in str(refusal.value)
    assert feature in str(refusal.value)
    assert evidence in str(refusal.value)


def test_every_feature_is_named_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"sliding-window .*; soft-capped attention scores "):
        check_supported(CONFIG_MAPPING["gemma2"]())


IDLE: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 4096}),
    ("phi3", {"sliding_window": 262144, "max_position_embeddings": 131072}),
    ("gemma", {}),
    ("nanochat", {"final_logit_softcapping": 15.0}),  # applied by the head, not in attention
]


@pytest.mark.parametrize(("model_type", "fields"), IDLE)
def test_fields_without_effect_are_accepted(model_type: str, fields: dict[str, Any]) -> None:
    check_supported(CONFIG_MAPPING[model_type](**fields))


@pytest.mark.parametrize("name", ALL)
def test_tiny_models_are_accepted_and_described(name: str) -> None:
    config = ALL[name]()
    check_supported(config)
    spec = ModelSpec.from_config(config, torch.float32)
    assert spec.max_model_len == 512
    assert spec.num_layers == config.num_hidden_layers
    assert spec.num_heads % spec.num_kv_heads == 0


def test_sizes_of_a_model() -> None:
    spec = ModelSpec.from_config(ALL["qwen3"](), torch.bfloat16)
    assert spec == ModelSpec(
        model_type="qwen3",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=80,
        vocab_size=160,
        max_model_len=512,
        dtype_name="bfloat16",
        intermediate_size=96,
    )
    assert spec.dtype == torch.bfloat16


def test_longrope_ends_where_its_frequencies_change() -> None:
    factors = [1.0] * 8
    config = CONFIG_MAPPING["phi3"](
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 4096,
        },
    )
    assert ModelSpec.from_config(config, torch.float32).max_model_len == 4096


def test_heads_must_divide() -> None:
    config = CONFIG_MAPPING["llama"]()
    config.num_attention_heads, config.num_key_value_heads = 6, 4
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads=6 .* num_key_value_heads=4"):
        ModelSpec.from_config(config, torch.float32)


# ---------------------------------------------------------------- proof by experiment
SMALL = {
    "hidden_size": 64,
    "n_embd": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "dff": 96,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "word_embed_proj_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def small(model_type: str, **changes: Any) -> Any:
    """A small config of any architecture: those of `SMALL` that it has a number for."""
    kind = CONFIG_MAPPING[model_type]
    has = kind().to_dict()
    fields = {field: value for field, value in SMALL.items() if has.get(field) is not None}
    if "head_dim" in has:
        fields["head_dim"] = SMALL["head_dim"]
    return kind(**{**fields, **changes})


def proven_here() -> Iterator[str]:
    """The proven types whose classes this version of transformers routes through the interface."""
    for model_type in sorted(PROVEN_TYPES & set(CONFIG_MAPPING)):
        try:
            check_supported(small(model_type))
        except UnsupportedModel:
            continue
        yield model_type


@pytest.mark.parametrize("name", ALL)
def test_packed_sequences_equal_separate_ones(name: str) -> None:
    register_attention()
    model = build(name)
    prove_packed(model, ModelSpec.from_config(model.config, torch.float32))


@pytest.mark.parametrize("model_type", proven_here())
def test_proven_types_are_proven(model_type: str) -> None:
    register_attention()
    model = randomize(AutoModelForCausalLM.from_config(small(model_type), dtype=torch.float32))
    prove_packed(model, ModelSpec.from_config(model.config, torch.float32))
    assert model.config._attn_implementation == "sdpa"


def test_most_types_are_proven_here() -> None:
    assert len(list(proven_here())) >= len(PROVEN_TYPES) - 3


def break_by(model_type: str, **fields: Any) -> str:
    """What the proof says of a model that the rules would have refused."""
    register_attention()
    config = small(model_type, **fields)
    model = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with pytest.raises(UnsupportedModel) as refusal:
        prove_packed(model, ModelSpec.from_config(model.config, torch.float32))
    return str(refusal.value)


def test_proof_sees_a_window() -> None:
    assert "logits of packed sequences are off by" in break_by("mistral", sliding_window=4)


def test_proof_sees_sinks() -> None:
    assert "logits of packed sequences are off by" in break_by("gpt_oss")


def test_proof_sees_layers_asked_twice() -> None:
    assert "2 layers asked for attention as [0, 0, 1, 1]" in break_by("diffllama")


def test_proof_sees_models_that_never_ask() -> None:
    assert "2 layers asked for attention as []" in break_by("falcon")


def test_proof_sees_other_shapes() -> None:
    register_attention()
    model = build("llama")
    wrong = ModelSpec.from_config(TINY["llama_mqa"](), torch.float32)
    wrong = ModelSpec(**{**vars(wrong), "num_layers": 3})
    with pytest.raises(UnsupportedModel, match=r"q, k and v have the shapes .*\(18, 2, 16\)"):
        prove_packed(model, wrong)
