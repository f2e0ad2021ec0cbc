"""A stop string that is a special token, through `LLM`: text, streams, several outputs."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import VOCAB, build
from vattn import LLM, SamplingParams

NAME = "llama"
PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def greedy() -> list[int]:
    """What the model writes; the token that is to be special comes first at place 4 or later."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(build(NAME), kv_cache_memory_bytes=1 << 22, max_model_len=64) as llm:
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_special_token_as_stop_string(greedy: list[int], include: bool, eos: bool, overlap: bool) -> None:
    place = next(at for at in range(4, len(greedy)) if greedy[at] not in greedy[:at])
    end = f"<{greedy[place]}>"
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(VOCAB)}, unk_token="<0>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    words.add_special_tokens([end])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end if eos else None)
    text = "".join(f"<{token}>" for token in greedy[:place]) + (end if include else "")

    params = SamplingParams(temperature=0, max_tokens=30, stop=[end], include_stop_str_in_output=include)
    options = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 64, "overlap": overlap}
    model = build(NAME)
    model.generation_config.eos_token_id = None
    with LLM(model, tokenizer=tokenizer, **options) as llm:
        several = SamplingParams(
            n=2, temperature=0, max_tokens=30, stop=[end], include_stop_str_in_output=include
        )
        outputs = [
            *llm.generate(PROMPT, params, use_tqdm=False)[0].outputs,
            *llm.generate(PROMPT, several, use_tqdm=False)[0].outputs,
            list(llm.stream({"prompt_token_ids": PROMPT}, params))[-1].outputs[0],
        ]
    assert len(outputs) == 4
    for output in outputs:
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", end)
        assert output.token_ids == greedy[: place + 1]
