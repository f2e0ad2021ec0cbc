"""Memory that moves while tokens are on their way: what was computed moves with it."""

from __future__ import annotations

import random

import pytest

from tests.engine.engines import kv_shape, make_llm, random_prompts
from vattn import LLM, SamplingParams

NAME = "llama"
TOKENS = 24
ROW = 64 * kv_shape(NAME).token_bytes
BACKENDS = {
    "virtual-overlap": {},
    "paged-overlap": {},
    "static-interleaved": {"overlap": True},
    "static-per_layer": {"overlap": True},
}
Result = tuple[list[int], list[float]]


def generate(llm: LLM, moves: random.Random | None = None) -> list[Result]:
    """Tokens and their logprobs of three streams taken in turns; `moves`: resize now and then."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    streams = [llm.stream(prompt, params) for prompt in random_prompts(5, [9, 21, 14], 100)]
    outputs = {}
    while len(outputs) < len(streams) or not all(output.finished for output in outputs.values()):
        for index, stream in enumerate(streams):
            outputs[index] = next(stream, outputs.get(index))
            if moves is not None and moves.random() < 0.3:
                llm.resize_kv_cache(moves.choice([2, 4, 5, 6]) * ROW)
    found: list[Result] = []
    for index in range(len(streams)):
        [completion] = outputs[index].outputs
        assert len(completion.token_ids) == TOKENS and completion.logprobs is not None
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((list(completion.token_ids), [entry[token].logprob for entry, token in pairs]))
    return found


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resize_at_any_moment_changes_no_token_and_no_logprob(backend: str, preemption: str) -> None:
    undisturbed: list[Result] = []
    for seed in range(4):
        with make_llm(
            NAME,
            backend,
            max_model_len=64,
            kv_cache_memory_bytes=6 * ROW,
            preemption=preemption,
            swap_space_bytes=8 * ROW,
            enable_prefix_caching=None if seed % 2 else False,
            **BACKENDS[backend],
        ) as llm:
            undisturbed = undisturbed or generate(llm)
            moved = generate(llm, random.Random(seed))
        for (tokens, logprobs), (want, wanted) in zip(moved, undisturbed, strict=True):
            assert tokens == want
            assert logprobs == pytest.approx(wanted, abs=1e-4)
