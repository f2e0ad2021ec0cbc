"""The engine on the Triton kernels: graphs' padded buffers, overlap, block tables, split decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engines import hf_greedy, loaded, make_llm, random_prompts, reference_model
from vattn import SamplingParams
from vattn.lab.bench.probe import Probe
from vattn.lab.quality import calibrate

NAME = "llama_mqa"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


# The interpreter takes its time for every layer and KV head: all but two cases have few of them.
@pytest.mark.parametrize(
    ("name", "backend", "enforce_eager"),
    [
        pytest.param("llama", "virtual-interleaved", False, id="virtual-interleaved, graphs, GQA"),
        pytest.param("llama", "paged-16", True, id="paged-16, eager, GQA"),
        pytest.param("llama_mqa", "virtual-interleaved", True, id="virtual-interleaved, eager"),
        pytest.param("llama_mqa", "virtual-overlap", True, id="virtual-overlap, eager"),
        pytest.param("llama_mqa", "virtual-overlap", False, id="virtual-overlap, graphs"),
        pytest.param("llama_mqa", "paged-16", False, id="paged-16, graphs"),
        pytest.param("llama_mqa", "static-per_layer", True, id="static-per_layer, eager"),
        pytest.param("llama_mqa", "static-per_layer", False, id="static-per_layer, graphs"),
    ],
)
def test_tokens_equal_transformers(name: str, backend: str, enforce_eager: bool) -> None:
    prompts = random_prompts(1, [3, 9, 5], loaded(name).spec.vocab_size)
    lengths = [6, 3, 3]  # chunks, then a step in which all three decode
    expected = hf_greedy(reference_model(name), prompts, lengths)
    with make_llm(
        name,
        backend,
        attention="triton",
        enforce_eager=enforce_eager,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=8,
    ) as llm:
        outputs = llm.generate(prompts, [replace(GREEDY, max_tokens=n) for n in lengths], use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        graphs = llm.runner.graphs
        assert (graphs is None) == enforce_eager
        if graphs is not None:
            assert set(graphs._graphs) == {1, 2, 4}, "a batch of 3 decodes in a graph of 4"
        llm.check()


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        ("virtual-interleaved", {"kv_cache_dtype": "int8"}),
        ("paged-16", {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "calibrate"}),
    ],
    ids=["int8 token", "fp8 static"],
)
def test_quantised_kv_gives_the_tokens_of_pytorch_s_attention(backend: str, way: dict[str, str]) -> None:
    vocab = loaded(NAME).spec.vocab_size
    prompts = random_prompts(1, [2, 11], vocab)
    options: dict[str, Any] = dict(way)
    if "kv_scales" in way:
        options["kv_scales"] = calibrate(loaded(NAME), random_prompts(5, [100], vocab))
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    answers = []
    for kernel in ("gather" if backend == "paged-16" else "sdpa", "triton"):
        eager = None if kernel != "triton" else False  # padded as a captured graph is
        with make_llm(NAME, backend, attention=kernel, enforce_eager=eager, **limits, **options) as llm:
            outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3), use_tqdm=False)
            answers.append([o.outputs[0].token_ids for o in outputs])
            llm.check()
    assert answers[0] == answers[1]


def test_a_probed_engine_keeps_its_graphs_when_the_cache_is_resized() -> None:
    token = 2048
    options = {"attention": "triton", "enforce_eager": False, "max_model_len": 64, "max_num_seqs": 2}
    with make_llm(NAME, "paged-16", kv_cache_memory_bytes=256 * token, **options) as llm:
        probe = Probe(llm, 0.0)
        llm.resize_kv_cache(llm.memory_usage().physical // 2)
        llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=3), use_tqdm=False)
        columns = probe.finish().columns
    prompt, *decodes = zip(columns["decodes"], columns["attention_s"], strict=True)
    assert prompt[0] == 0 and prompt[1] > 0, "the prompt runs without a graph and is timed"
    assert decodes == [(1, None)] * 2, "decodes run from a graph, which times nothing"
