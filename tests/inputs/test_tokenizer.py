"""`tokenizer=`: which objects are one."""

from __future__ import annotations

import pytest

from tests.inputs.odd import foreign
from tests.inputs.written import byte_level, fast, loaded, model
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError


def test_a_tokenizer_of_the_tokenizers_library_reads_and_writes_as_transformers_does() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=["never seen"])
    seen = []
    for tokenizer in (byte_level(), fast()):
        with LLM(model(), tokenizer=tokenizer, kv_cache_memory_bytes=8 << 20) as llm:
            [output] = llm.generate("the user", params, use_tqdm=False)
            seen.append((output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text))
    assert seen[0] == seen[1] and seen[0][0][0] == 1, "its post-processor adds the first token"


def test_what_is_no_tokenizer_is_refused() -> None:
    def build(value: object) -> None:
        with LLM(model(), tokenizer=value, kv_cache_memory_bytes=8 << 20):
            pass

    assert not foreign(build)
    with pytest.raises(ConfigError, match="tokenizer must be a name"):
        build(5)


def test_a_tokenizer_for_a_model_that_is_loaded_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer belongs to load_model"):
        LLM(loaded(), tokenizer=fast(), kv_cache_memory_bytes=8 << 20)
