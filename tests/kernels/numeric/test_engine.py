"""The engine on the Triton kernels: graphs' padded buffers, overlap, block tables, split decode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engines import hf_greedy, loaded, make_llm, random_prompts, reference_model
from vattn import SamplingParams

NAME = "llama"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    "backend", ["virtual-interleaved", "virtual-overlap", "paged-16", "static-per_layer"]
)
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_tokens_equal_transformers(backend: str, enforce_eager: bool) -> None:
    prompts = random_prompts(1, [3, 21, 9], loaded(NAME).spec.vocab_size)
    lengths = [6, 3, 5]
    expected = hf_greedy(reference_model(NAME), prompts, lengths)
    with make_llm(
        NAME,
        backend,
        attention="triton",
        enforce_eager=enforce_eager,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    ) as llm:
        outputs = llm.generate(prompts, [replace(GREEDY, max_tokens=n) for n in lengths], use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected
        graphs = llm.engine.pipeline.runner.graphs
        assert (graphs is None) == enforce_eager
        if graphs is not None:
            assert set(graphs._graphs) == {1, 2, 4}, "a batch of 3 decodes in a graph of 4"
        llm.check()
