"""Every key and tensor of a GGUF file counts: the model that was written comes back, or a refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel, Starcoder2Config

from tests.models.gguf_files import head_dim, tiny_llama, write_gguf
from tests.models.tiny import build, randomize
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError, UnsupportedModel
from vattn.models.loader import LoadedModel, load_model

IDS = torch.arange(3, 123)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(path: Path) -> LoadedModel:
    return load_model(
        path, device="cpu", prepare=False, attn_implementation="eager", progress=lambda line: None
    )


@torch.inference_mode()
def log_probabilities(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.log_softmax(-1)


def assert_same_model(path: Path, written: PreTrainedModel, unlike: PreTrainedModel | None = None) -> None:
    """The file gives the log-probabilities of `written`, which are not those of `unlike`."""
    written.set_attn_implementation("eager")
    expected = log_probabilities(written)
    torch.testing.assert_close(log_probabilities(load(path).model), expected, atol=1e-4, rtol=0)
    if unlike is not None:
        assert (log_probabilities(unlike) - expected).abs().max() > 1e-2


# ------------------------------------------------------------------ rotary positions
DIM = 16  # of a head


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": rope_type, **parameters}


FACTORS = [1.0, 1.5, 2.0, 4.0, 3.0, 7.0, 0.5, 9.0]
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        rope("linear", factor=4.0),
        {"scaling.type": "linear", "scaling.factor": 4.0},
    ),
    "linear without its name": (rope("linear", factor=4.0), {"scaling.factor": 4.0}),
    "linear in old files": (rope("linear", factor=4.0), {"scale_linear": 4.0}),
    "none": (rope("default"), {"scaling.type": "none"}),
    "another base": ({"rope_theta": 77.0, "rope_type": "default"}, {}),
    "yarn": (
        rope("yarn", factor=8.0, original_max_position_embeddings=16),
        {"scaling.type": "yarn", "scaling.factor": 8.0, "scaling.original_context_length": 16},
    ),
    "yarn with factors of its own": (
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            attention_factor=0.8 * (1 + 0.1 * math.log(8.0)),
            beta_fast=16.0,
            beta_slow=2.0,
        ),
        {
            "scaling.type": "yarn",
            "scaling.factor": 8.0,
            "scaling.original_context_length": 16,
            "scaling.attn_factor": 0.8,
            "scaling.yarn_beta_fast": 16.0,
            "scaling.yarn_beta_slow": 2.0,
            "scaling.finetuned": True,
        },
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scaling_is_applied(tmp_path: Path, kind: str) -> None:
    parameters, keys = ROPES[kind]
    written = tiny_llama(rope_parameters=parameters)
    path = write_gguf(
        tmp_path / "rope.gguf", written, keys={f"llama.rope.{key}": value for key, value in keys.items()}
    )
    assert_same_model(path, written, None if kind == "none" else tiny_llama())


@pytest.mark.parametrize(
    ("parameters", "rope_type"),
    [
        (
            rope(
                "llama3",
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            "llama3",
        ),
        (
            rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=2.0,
                original_max_position_embeddings=64,
            ),
            "longrope",
        ),
        (
            rope(
                "longrope",
                short_factor=FACTORS,
                long_factor=FACTORS,
                factor=1.0,
                attention_factor=1.0,
                original_max_position_embeddings=128,
            ),
            "longrope",
        ),
    ],
)
def test_divisors_of_frequencies_are_applied_exactly(
    tmp_path: Path, parameters: dict[str, Any], rope_type: str
) -> None:
    written = tiny_llama(rope_parameters=parameters)
    plain = tiny_llama().model.rotary_emb.inv_freq
    divisors = (plain / written.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "freqs.gguf", written, tensors={"rope_freqs.weight": divisors})
    assert_same_model(path, written, tiny_llama())
    loaded = load(path)
    assert loaded.config.rope_parameters["rope_type"] == rope_type
    torch.testing.assert_close(
        loaded.model.model.rotary_emb.inv_freq, written.model.rotary_emb.inv_freq, rtol=1e-5, atol=0
    )
    assert loaded.spec.max_model_len == 128


def test_factors_for_short_and_long_sequences_are_applied(tmp_path: Path) -> None:
    short, long = [1.0 + index / 8 for index in range(8)], FACTORS
    config = Phi3Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=64,
        pad_token_id=None,
        eos_token_id=None,
        rope_parameters=rope("longrope", short_factor=short, long_factor=long, attention_factor=1.1),
    )
    written = randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    keys = {"original_context_length": 64, "attn_factor": 1.1}
    path = write_gguf(
        tmp_path / "phi3.gguf",
        written,
        arch="phi3",
        keys={f"phi3.rope.scaling.{key}": value for key, value in keys.items()},
        tensors={
            f"rope_factors_{name}.weight": np.array(factors, np.float32)
            for name, factors in (("short", short), ("long", long))
        },
    )
    loaded = load(path)
    assert loaded.spec.max_model_len == 64
    torch.testing.assert_close(
        loaded.model.model.rotary_emb.inv_freq, written.model.rotary_emb.inv_freq, rtol=1e-5, atol=0
    )
    assert_same_model(path, written)


REFUSED_ROPES: dict[str, tuple[dict[str, Any], list[float] | None, str]] = {
    "unknown type": ({"scaling.type": "spiral"}, None, r"llama\.rope\.scaling\.type='spiral'"),
    "longrope without factors": ({"scaling.type": "longrope"}, None, "rope_factors_long"),
    "divisors and scaling": ({"scaling.type": "linear", "scaling.factor": 2.0}, FACTORS, "together"),
    "too few divisors": ({}, FACTORS[:3], "8 divisors"),
    "divisors of zero": ({}, [0.0] * 8, "above 0"),
    "attention without yarn": ({"scaling.attn_factor": 1.2}, None, r"attn_factor=1\.2"),
    "sections": ({"dimension_sections": [2, 2, 2, 2]}, None, "dimension_sections"),
    "part of a head": ({"dimension_count": 8}, None, "does not rotate as the file says"),
}


@pytest.mark.parametrize("kind", REFUSED_ROPES)
def test_rotary_positions_that_cannot_be_made_are_refused(tmp_path: Path, kind: str) -> None:
    keys, divisors, message = REFUSED_ROPES[kind]
    path = write_gguf(
        tmp_path / "rope.gguf",
        tiny_llama(),
        keys={f"llama.rope.{key}": value for key, value in keys.items()},
        tensors={} if divisors is None else {"rope_freqs.weight": np.array(divisors, np.float32)},
    )
    with pytest.raises(UnsupportedModel, match=message):
        load(path)


# ------------------------------------------------------------------ tensors
def test_biases_of_attention_and_mlp_are_applied(tmp_path: Path) -> None:
    written = tiny_llama(attention_bias=True, mlp_bias=True)
    unbiased = tiny_llama(attention_bias=True, mlp_bias=True)
    for name, weight in unbiased.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    assert_same_model(write_gguf(tmp_path / "biased.gguf", written), written, unbiased)


def test_a_bias_that_the_file_leaves_out_is_zero(tmp_path: Path) -> None:
    written = tiny_llama(attention_bias=True)
    for layer in written.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
    without = {f"blk.{index}.attn_output.bias": None for index in range(2)}
    assert_same_model(write_gguf(tmp_path / "qkv.gguf", written, tensors=without), written)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "blk.0.attn_norm.weight", "token_embd.weight"])
def test_a_missing_weight_is_named_and_not_made_up(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "holed.gguf", tiny_llama(), tensors={name: None})
    with pytest.raises(ConfigError, match="lacks the weight model"):
        load(path)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "blk.1.attn_sinks.weight", "output.bias", "blk.0.attn_q.scale"]
)
def test_a_tensor_that_has_no_place_is_named(tmp_path: Path, name: str) -> None:
    extra = {name: np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "more.gguf", tiny_llama(), tensors=extra)
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        load(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    wrong = {"blk.0.ffn_up.weight": np.ones((90, 64), np.float32)}
    path = write_gguf(tmp_path / "shape.gguf", tiny_llama(), tensors=wrong)
    with pytest.raises(ConfigError, match=r"up_proj.*\(90, 64\), not \(96, 64\)"):
        load(path)


def test_a_file_without_an_output_matrix_ties_it_to_the_embeddings(tmp_path: Path) -> None:
    written = tiny_llama(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "tied.gguf", written, tensors={"output.weight": None})
    assert_same_model(path, written)


# ------------------------------------------------------------------ keys
REFUSED: dict[str, Any] = {
    "llama.attention.sliding_window": 64,
    "llama.attention.causal": False,
    "llama.attention.scale": 0.5,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.value_length": 32,
    "llama.attention.head_count_kv": [2, 1],
    "llama.attn_logit_softcapping": 50.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.logit_scale": 0.25,
    "llama.residual_scale": 0.5,
    "llama.embedding_scale": 12.0,
    "llama.expert_count": 8,
    "llama.expert_gating_func": 2,
    "llama.rope.scaling.yarn_log_multiplier": 0.1,
    "llama.of_the_future": 1,
    "general.type": "adapter",
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_changes_the_model_is_refused_by_name(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "key.gguf", tiny_llama(), keys={key: REFUSED[key]})
    with pytest.raises(UnsupportedModel) as refusal:
        load(path)
    assert f"{key}={REFUSED[key]!r}" in str(refusal.value)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    "key",
    [
        "llama.context_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_a_key_that_is_missing_is_named_and_not_made_up(tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "key.gguf", tiny_llama(), keys={key: None})
    with pytest.raises(ConfigError, match=f"lacks the key {key}"):
        load(path)


def test_keys_with_a_meaning_by_default_may_be_missing(tmp_path: Path) -> None:
    written = tiny_llama()
    absent = ("rope.freq_base", "rope.dimension_count", "vocab_size")
    path = write_gguf(tmp_path / "few.gguf", written, keys=dict.fromkeys(f"llama.{key}" for key in absent))
    assert_same_model(path, written)


IDLE: dict[str, Any] = {
    "llama.attention.sliding_window": 128,
    "llama.attention.causal": True,
    "llama.attention.key_length": DIM,
    "llama.attention.value_length": DIM,
    "llama.attention.layer_norm_epsilon": 1e-3,
    "llama.attn_logit_softcapping": 0.0,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.tensor_data_layout": "Meta AI original pth",
    "general.quantization_version": 2,
    "quantize.imatrix.file": "calibration.dat",
    "somebody.wrote": "this",
}


def test_keys_that_do_not_change_the_model_are_let_through(tmp_path: Path) -> None:
    written = tiny_llama()
    assert_same_model(write_gguf(tmp_path / "idle.gguf", written, keys=IDLE), written)


def test_a_head_size_of_its_own_is_applied(tmp_path: Path) -> None:
    written = tiny_llama(head_dim=24)
    sizes = {"llama.attention.key_length": 24, "llama.attention.value_length": 24}
    assert_same_model(write_gguf(tmp_path / "wide.gguf", written, keys=sizes), written)


def starcoder2() -> PreTrainedModel:
    """A base that transformers drops from files of this architecture, and biases everywhere."""
    config = Starcoder2Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
    )
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


@pytest.mark.parametrize(
    ("arch", "make"),
    [("qwen2", lambda: build("qwen2")), ("qwen3", lambda: build("qwen3")), ("starcoder2", starcoder2)],
)
def test_other_architectures_come_back_as_written(tmp_path: Path, arch: str, make: Any) -> None:
    written = make()
    size = head_dim(written)
    keys = {f"{arch}.attention.key_length": size, f"{arch}.attention.value_length": size}
    assert_same_model(write_gguf(tmp_path / "other.gguf", written, arch=arch, keys=keys), written)


# ------------------------------------------------------------------ what ends a text
def test_generation_stops_at_the_ends_of_text_turn_and_message(tmp_path: Path) -> None:
    written = tiny_llama()
    prompt = [[7, 8, 9]]
    endless = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    with LLM(
        str(write_gguf(tmp_path / "a.gguf", written)), device="cpu", kv_cache_memory_bytes=1 << 20
    ) as llm:
        tokens = llm.generate(prompt, endless)[0].outputs[0].token_ids
    expected = written.generate(torch.tensor(prompt), max_new_tokens=12, do_sample=False, eos_token_id=[])
    assert list(tokens) == expected[0, 3:].tolist()
    for role in ("eot", "eom"):
        path = write_gguf(
            tmp_path / f"{role}.gguf", written, keys={f"tokenizer.ggml.{role}_token_id": tokens[5]}
        )
        with LLM(str(path), device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
            output = llm.generate(prompt, greedy)[0].outputs[0]
        assert output.finish_reason == "stop"
        assert list(output.token_ids) == list(tokens[: tokens.index(tokens[5]) + 1])


def test_a_file_that_names_no_end_has_none_and_one_beyond_the_vocabulary_does_not_count(
    tmp_path: Path,
) -> None:
    for eos in (None, 9999):
        keys = {"tokenizer.ggml.eos_token_id": eos, "tokenizer.ggml.eot_token_id": 9999}
        path = write_gguf(tmp_path / f"{eos}.gguf", tiny_llama(), keys=keys)
        assert load(path).eos_token_ids == frozenset()
