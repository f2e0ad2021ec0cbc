"""The promise of the product: every backend gives the tokens of transformers' `generate`."""

from __future__ import annotations

import pytest

from tests.engine.engines import BACKENDS, hf_greedy, kv_shape, make_llm, random_prompts, reference_model
from tests.models.tiny import TINY
from vattn import SamplingParams

PROMPTS = [1, 5, 37, 16, 60, 2, 17, 33]
OUTPUTS = [24, 12, 20, 9, 16, 30, 1, 18]


@pytest.mark.parametrize("name", TINY)
def test_every_backend_equals_transformers(name: str) -> None:
    """Mixed lengths, prompts cut into chunks of at most 24 tokens, a budget that forces preemption."""
    model = reference_model(name)
    prompts = random_prompts(1, PROMPTS, model.config.get_text_config().vocab_size)
    expected = hf_greedy(model, prompts, OUTPUTS)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUTS]
    preempted = {}
    for backend in BACKENDS:
        # The requests want about 400 tokens at once; there is room for 160 (virtual: in whole pages).
        with make_llm(
            name,
            backend,
            max_num_batched_tokens=24,
            max_num_seqs=6,
            max_model_len=96,
            kv_cache_memory_bytes=160 * kv_shape(name).token_bytes,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected, f"{name} on {backend}"
            llm.check()
            assert llm.memory_usage().in_use == 0
            preempted[backend] = llm.metrics().preemptions
            assert llm.metrics().output_tokens == sum(OUTPUTS)
    assert preempted["paged-16"] > 0 and preempted["virtual-interleaved"] > 0, preempted
    assert preempted["static-per_layer"] == 0, "a static row never has to grow"
