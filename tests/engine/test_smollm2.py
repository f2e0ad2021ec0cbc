"""The demo model: every backend and layout gives the tokens of transformers' `generate`."""

from __future__ import annotations

import pytest

from tests.engine.engines import hf_greedy
from vattn import LLM, SamplingParams
from vattn.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.smollm2

CHOICES = {
    "virtual-per_layer": {"kv_backend": "virtual", "kv_layout": "per_layer"},
    "virtual-interleaved": {"kv_backend": "virtual", "kv_layout": "interleaved"},
    "paged": {"kv_backend": "paged"},
    "static-per_layer": {"kv_backend": "static", "kv_layout": "per_layer"},
    "static-interleaved": {"kv_backend": "static", "kv_layout": "interleaved"},
}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):",
    "List three reasons why the sky is blue, and explain each of them to a child in simple words. " * 3,
]
OUTPUTS = [12, 24, 18, 8]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("smollm2", device="cpu")


def test_every_backend_equals_transformers(demo: LoadedModel) -> None:
    reference = load_model("smollm2", device="cpu", attn_implementation="sdpa", prepare=False).model
    prompts = [demo.tokenizer(text)["input_ids"] for text in PROMPTS]
    expected = hf_greedy(reference, prompts, OUTPUTS)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUTS]
    for name, options in CHOICES.items():
        # 160 tokens (or one page in each range) of KV for 210: somebody has to yield, except on static.
        with LLM(
            demo, max_model_len=120, max_num_batched_tokens=64, kv_cache_memory_bytes=8 << 20, **options
        ) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected, name
            texts = [
                demo.tokenizer.decode(e, skip_special_tokens=True)
                for p, e in zip(prompts, expected, strict=True)
            ]
            assert [o.outputs[0].text for o in outputs] == texts
            llm.check()


def test_chat_answers(demo: LoadedModel) -> None:
    with LLM(demo, kv_cache_memory_bytes=64 << 20, max_model_len=256) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop", "the chat template's end token ends the answer"


def test_stop_strings_and_streaming_agree(demo: LoadedModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=["answer"])
    with LLM(demo, kv_cache_memory_bytes=64 << 20, max_model_len=256) as llm:
        [whole] = llm.generate("The capital of France is", params, use_tqdm=False)
        texts = [moment.outputs[0].text for moment in llm.stream("The capital of France is", params)]
    assert whole.outputs[0].stop_reason == "answer" and "answer" not in whole.outputs[0].text
    assert texts[-1] == whole.outputs[0].text
    assert all(whole.outputs[0].text.startswith(t) for t in texts), "nothing shown is taken back"
