"""The engine with 8-bit KV: every backend stores and reads the same numbers, and so gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import BACKENDS, loaded, make_llm, random_prompts
from tests.models.tiny import build
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError
from vattn.lab.quality import KVRanges, calibrate

NAME = "llama"
PROMPTS = [1, 5, 37, 16, 60, 2, 17, 33]
OUTPUTS = [24, 12, 20, 9, 16, 30, 1, 18]
TIGHT = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "max_model_len": 96}

WAYS: dict[str, dict[str, Any]] = {
    "int8 token": {"kv_cache_dtype": "int8"},
    "fp8 token": {"kv_cache_dtype": "fp8_e4m3"},
    "int8 static": {"kv_cache_dtype": "int8", "kv_scales": "static"},
    "fp8 static": {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "static"},
}


def ranges() -> KVRanges:
    return calibrate(loaded(NAME), random_prompts(5, [200, 200], loaded(NAME).spec.vocab_size))


def options(way: str) -> dict[str, Any]:
    chosen = dict(WAYS[way])
    if chosen.get("kv_scales") == "static":
        chosen["kv_scales"] = ranges()
    return chosen


def greedy(llm: LLM) -> list[list[int]]:
    prompts = random_prompts(1, PROMPTS, loaded(NAME).spec.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUTS]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("way", WAYS)
def test_every_backend_gives_the_same_tokens(way: str) -> None:
    """Chunked prompts in batches of mixed lengths."""
    answers = {}
    for backend in BACKENDS:
        with make_llm(NAME, backend, kv_cache_memory_bytes=49152, **TIGHT, **options(way)) as llm:
            answers[backend] = greedy(llm)
            llm.check()
            assert llm.memory_usage().in_use == 0
    first = answers["virtual-interleaved"]
    assert all(tokens == first for tokens in answers.values())
    with make_llm(NAME, "static-per_layer", **TIGHT) as llm:
        exact = greedy(llm)
    same = sum(a == b for x, y in zip(exact, first, strict=True) for a, b in zip(x, y, strict=True))
    assert same < sum(OUTPUTS), "something was rounded"


def test_preempted_requests_end_as_undisturbed_ones_do() -> None:
    with make_llm(NAME, "paged-7", **TIGHT, kv_cache_dtype="int8") as llm:
        undisturbed, token_bytes = greedy(llm), llm.kv_shape.token_bytes
        assert llm.metrics().preemptions == 0
    for backend in ("paged-7", "virtual-interleaved"):
        memory = 110 * token_bytes
        with make_llm(NAME, backend, kv_cache_memory_bytes=memory, **TIGHT, kv_cache_dtype="int8") as llm:
            assert greedy(llm) == undisturbed
            assert llm.metrics().preemptions > 0
            llm.check()


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer", "paged-7"])
def test_shared_prefixes_change_no_token(backend: str) -> None:
    """Requests that begin alike, in memory for a few of them: shared keys come with their scales."""
    vocab = loaded(NAME).spec.vocab_size
    [start] = random_prompts(4, [40], vocab)
    prompts = [start + tail for tail in random_prompts(6, [3, 9, 1, 17, 5, 12], vocab)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    way = {"kv_cache_dtype": "int8", "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 96}
    with make_llm(NAME, backend, enable_prefix_caching=False, **way) as llm:
        exact = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    memory = 65536 if backend == "virtual-per_layer" else 160 * llm.kv_shape.token_bytes
    with make_llm(NAME, backend, kv_cache_memory_bytes=memory, **way) as llm:
        shared = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert llm.metrics().kv_stats.prefix_hit_tokens > 0
        llm.check()
    assert shared == exact


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_counted_while_requests_run(backend: str) -> None:
    with make_llm(NAME, backend, **TIGHT, kv_cache_dtype="int8") as llm:
        [prompt] = random_prompts(2, [33], loaded(NAME).spec.vocab_size)
        for _ in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)):
            usage = llm.memory_usage()
            usage.check()
            llm.check()
            assert usage.logical % llm.kv_shape.token_bytes == 0
        assert llm.describe_kv()["kv_cache_dtype"] == "int8" and llm.describe_kv()["kv_scales"] == "token"


def test_a_chunked_prompt_reads_what_it_stored() -> None:
    """In one chunk or in many, a prompt's last logits come from the same stored keys."""
    [prompt] = random_prompts(3, [90], loaded(NAME).spec.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = []
    for tokens in (96, 7):
        limits = {"max_num_batched_tokens": tokens, "max_num_seqs": 4, "max_model_len": 128}
        with make_llm(NAME, "virtual-per_layer", kv_cache_dtype="fp8_e4m3", **limits) as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].logprobs is not None
            found.append({t: e.logprob for t, e in output.outputs[0].logprobs[0].items()})
    assert found[0].keys() == found[1].keys()
    assert all(found[0][t] == pytest.approx(found[1][t], abs=2e-3) for t in found[0])


@pytest.mark.parametrize(("attention", "backend"), [("flex", "virtual-per_layer"), ("flex", "paged-16")])
def test_attention_that_reads_no_scales_is_refused(attention: str, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"attention='flex' reads no quantised KV.*use 'triton' or"):
        make_llm(NAME, backend, attention=attention, kv_cache_dtype="int8")


def test_ranges_of_another_model_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    build(NAME).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    other = KVRanges(torch.ones(9, 2), torch.ones(9, 2))
    with pytest.raises(ConfigError, match="are of 9 layers with 2 KV heads; the model has 3 layers with 2"):
        LLM(tmp_path, kv_cache_dtype="int8", kv_scales=other)


def test_unknown_types_are_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4' is unknown"):
        LLM("no/such-model", kv_cache_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such file"):
        LLM("no/such-model", kv_cache_dtype="int8", kv_scales="missing.safetensors")
