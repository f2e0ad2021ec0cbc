"""Sizes of models: the table, configs, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.tiny import MORE, TINY
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.errors import ConfigError
from vattn.lab.simulator.gpus import GPUS, find_gpu
from vattn.lab.simulator.known_models import MODELS, find_model
from vattn.lab.simulator.setup import SimulationConfig

BILLIONS = {
    "smollm2-135m": 0.135,
    "smollm2-1.7b": 1.71,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3.1-405b": 406,
    "llama-3.2-1b": 1.24,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "qwen2.5-7b": 7.62,
    "qwen3-4b": 4.02,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "phi-4": 14.7,
}
"""As the model cards have them."""


@pytest.mark.parametrize("name", BILLIONS)
def test_the_table_has_the_published_number_of_parameters(name: str) -> None:
    assert find_model(name).num_params / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_of_a_mixture_only_the_active_experts_are_multiplied() -> None:
    mixtral = find_model("mixtral-8x7b")
    assert (mixtral.active_params + 2 * mixtral.head_params) / 1e9 == pytest.approx(12.9, rel=0.01)
    everything = mixtral.attention_params + 8 * mixtral.expert_params
    one, many = mixtral.layer_params_read(1), mixtral.layer_params_read(1000)
    assert one == pytest.approx(mixtral.active_params)
    assert many == pytest.approx(everything)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "mixtral"])
def test_a_config_file_gives_the_sizes_of_its_model(name: str, tmp_path: Path) -> None:
    config = {**TINY, **MORE}[name]()
    config.save_pretrained(tmp_path)
    model = find_model(str(tmp_path / "config.json"))
    assert model == find_model(str(tmp_path)), "the folder does as well"
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for n, p in built.named_parameters() if p.dim() >= 2 and "router" not in n)
    matrices -= sum(p.numel() for n, p in built.named_parameters() if n.endswith("mlp.gate.weight"))
    assert model.num_params == matrices


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "phi3"])
def test_a_config_that_says_every_size_reads_the_same_without_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**TINY, **MORE}[name]()
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    by_transformers = find_model(str(file))
    fields = {**json.loads(file.read_text()), "tie_word_embeddings": config.tie_word_embeddings}
    file.write_text(json.dumps({"head_dim": by_transformers.head_dim, **fields}))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    assert find_model(str(file)) == by_transformers


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpt-9' is not in the table.*" + ".*".join(MODELS)):
        find_model("gpt-9")
    with pytest.raises(ConfigError, match="'abacus' is not in the table.*" + ".*".join(GPUS)):
        find_gpu("abacus")


def config(model: str = "llama-3-70b", gpu: str = "h200", tp: int | None = None) -> SimulationConfig:
    return SimulationConfig(find_model(model), find_gpu(gpu), tp=tp)


def test_a_model_that_does_not_fit_is_refused_with_what_is_missing() -> None:
    alone = config(tp=1)
    missing = -alone.kv_bytes(1) / (1 << 30)
    assert missing > 0
    with pytest.raises(ConfigError, match=rf"each of 1 h200 .*: {missing:.1f} GiB too much. Raise tp"):
        alone.resolved()
    wish = replace(config(tp=2), kv=KVCacheConfig(memory_bytes=100 << 30))
    with pytest.raises(ConfigError, match=r"and 100\.0 GiB of KV.*too much"):
        wish.resolved()


def test_unless_told_it_takes_as_few_devices_as_hold_the_model() -> None:
    assert config("llama-3-8b", "h100").resolved().tp == 1
    assert config("llama-3-70b", "h200").resolved().tp == 2
    assert config("llama-3-70b", "a100-40").resolved().tp == 8
    eight_bits = replace(config("llama-3-70b", "h200"), weight_dtype="fp8")
    assert eight_bits.resolved().tp == 1


def test_devices_share_kv_heads_until_there_is_one_each() -> None:
    model = find_model("llama-3-70b")
    one, eight, sixteen = (config(tp=tp).kv_shape(tp).token_bytes for tp in (1, 8, 16))
    assert one == 80 * 2 * model.num_kv_heads * 128 * 2
    assert one == 8 * eight and eight == sixteen


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3 does not divide the 64 heads"):
        config(tp=3)
    with pytest.raises(ConfigError, match="weight_dtype='fp3' is unknown"):
        replace(config(), weight_dtype="fp3")
    with pytest.raises(ConfigError, match="max_model_len=9,000 must be from 2 to llama-3-70b's 8,192"):
        replace(config(), max_model_len=9000)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=8 is less"):
        replace(config(), limits=SchedulerConfig(16, 8))
