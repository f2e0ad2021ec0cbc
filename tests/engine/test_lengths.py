"""Sequences as long as rotary scaling allows, with the tokens of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel

from tests.engine.engines import hf_greedy, random_prompts
from tests.models.tiny import build, randomize
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError, ModelNotFound
from vattn.models.loader import load_model

M = 64
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def with_rope(**parameters: Any) -> PreTrainedModel:
    config = copy.deepcopy(build("llama").config)
    config.max_position_embeddings = M
    config.rope_parameters = {"rope_theta": 1e4, **parameters}
    model = randomize(type(build("llama"))(config))
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, M),
        ({"rope_type": "linear", "factor": 4.0}, 4 * M),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": M}, 4 * M),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": M // 2}, M),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": M // 4,
            },
            M,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("backend", ["virtual", "paged", "static"])
def test_sequences_are_as_long_as_the_positions_reach(rope: Any, longest: int, backend: Any) -> None:
    model = with_rope(**rope)
    prompts = random_prompts(1, [longest - 8, 5], 100)
    expected = hf_greedy(model, prompts, [8, 8])
    with pytest.raises(ConfigError, match=f"is more than the model's {longest:,} positions"):
        LLM(model, kv_backend=backend, max_model_len=longest + 1, **SMALL)
    with LLM(model, kv_backend=backend, **SMALL) as llm:
        assert llm.max_model_len == longest
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_a_window_no_sequence_noticed_before_scaling_is_never_noticed() -> None:
    config = build("mistral").config
    config.max_position_embeddings, config.sliding_window = M, 2 * M
    config.rope_parameters = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
    with LLM(randomize(type(build("mistral"))(config)), **SMALL) as llm:
        assert llm.max_model_len == 2 * M


def test_dynamic_scaling_is_that_of_the_longest_sequence_if_more_than_the_trained_is_asked_for() -> None:
    factor, theta = 4.0, 1e4
    model = with_rope(rope_type="dynamic", factor=factor)
    dim = model.config.head_dim
    base = theta * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    stretched = with_rope(rope_type="default", rope_theta=base)
    long = random_prompts(1, [4 * M - 8, 5], 100)
    expected = hf_greedy(stretched, long, [8, 8])
    short = random_prompts(2, [M - 8, 5], 100)
    unscaled = hf_greedy(model, short, [8, 8])
    with LLM(model, **SMALL) as llm:
        assert llm.max_model_len == M
        outputs = llm.generate(short, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == unscaled
    with LLM(model, max_model_len=4 * M, **SMALL) as llm:
        outputs = llm.generate(long, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
    assert hf_greedy(model, short, [8, 8]) == unscaled
    assert model.model.rotary_emb.rope_type == "dynamic"
    with pytest.raises(ConfigError, match="more than the model's 256 positions"):
        LLM(model, max_model_len=4 * M + 1, **SMALL)
    loaded = load_model(model)
    with LLM(loaded, **SMALL), pytest.raises(ConfigError, match="must all have, or all not have"):
        LLM(loaded, max_model_len=4 * M, **SMALL)


# ---------------------------------------------------------------------- generation config
def test_requests_without_parameters_get_the_models(tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.25, top_k=7, top_p=0.5, repetition_penalty=1.5, max_new_tokens=3,
        eos_token_id=2,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0.25, top_k=7, top_p=0.5, repetition_penalty=1.5, max_tokens=3)
    prompt = [5, 6, 7]
    with LLM(model, max_model_len=M, **SMALL) as llm:
        assert llm.get_default_sampling_params() == wanted
        default = llm.generate(prompt, use_tqdm=False)[0].outputs[0]
        assert len(default.token_ids) == 3
        assert (
            len(llm.generate(prompt, SamplingParams(ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids)
            == 16
        )
        assert len(list(llm.stream({"prompt_token_ids": prompt}))[-1].outputs[0].token_ids) == 3
    with LLM(model, max_model_len=M, generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    GenerationConfig(do_sample=True, temperature=0.75).save_pretrained(tmp_path)
    with LLM(model, max_model_len=M, generation_config=tmp_path, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.75)


def test_a_generation_config_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    with pytest.raises(ConfigError, match="neither 'auto' nor 'vllm' nor a folder"):
        LLM(model, generation_config=tmp_path / "nowhere", **SMALL)
    with pytest.raises(ConfigError, match="must be 'auto', 'vllm' or a folder, got 7"):
        LLM(model, generation_config=7, **SMALL)  # type: ignore[arg-type]
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 3.0}))
    with pytest.raises(ConfigError, match=r"top_p must be in \(0, 1\], got 3"):
        LLM(model, generation_config=tmp_path, **SMALL)


# ---------------------------------------------------------------------- adapters
def test_a_folder_with_an_adapter_alone_names_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base-7b"}))
    with pytest.raises(ModelNotFound, match=r"an adapter of 'org/base-7b': load that with transformers"):
        LLM(str(tmp_path))
