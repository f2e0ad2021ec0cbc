"""The examples of docs/extending.md, run as they are written there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engine.engines import hf_greedy, make_llm, random_prompts, reference_model
from vattn import LLM, SamplingParams
from vattn.attention import factory
from vattn.errors import ConfigError
from vattn.kv.base import ContiguousInputs

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
NAME = "llama"


def blocks(heading: str) -> list[str]:
    """The Python code under a heading of the page."""
    [section] = [s for s in PAGE.read_text(encoding="utf-8").split("\n## ") if s.startswith(f"{heading}\n")]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def run(code: list[str], **names: Any) -> dict[str, Any]:
    for block in code:
        exec(block, names)
    return names


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def expected(prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return hf_greedy(reference_model(NAME), prompts, [tokens] * len(prompts))


def outputs(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    found = llm.generate(prompts, greedy(tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in found]


def test_a_policy_decides_who_runs_first() -> None:
    """The longest prompt arrives first and finishes last."""
    prompts = random_prompts(1, [40, 20, 5], 100)
    with make_llm(NAME, "paged-16", max_num_seqs=1, max_model_len=64) as llm:
        run(blocks("Change the scheduling policy"), llm=llm)
        found = llm.generate(prompts, greedy(8), use_tqdm=False)
        finished = [output.metrics.finished_time for output in found]
        assert finished == sorted(finished, reverse=True)
        assert [list(output.outputs[0].token_ids) for output in found] == expected(prompts, 8)
        llm.check()


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`my_attention.py` and the line that makes it known; both are gone after the test."""
    implementation, line = blocks("Add an attention kernel")
    module = ModuleType("my_attention")
    exec(implementation, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_attention", module)
    known = dict(factory.CHOICES[ContiguousInputs])
    monkeypatch.setitem(factory.CHOICES, ContiguousInputs, known)
    run([line])


@pytest.mark.parametrize("backend", ["virtual-interleaved", "static-per_layer"])
def test_an_attention_kernel_gives_the_tokens_of_transformers(plain_attention: None, backend: str) -> None:
    prompts = random_prompts(2, [5, 33, 18], 100)
    options = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with make_llm(NAME, backend, attention="plain", **options) as llm:
        assert outputs(llm, prompts, 12) == expected(prompts, 12)


def test_an_attention_kernel_is_refused_where_it_cannot_read(plain_attention: None) -> None:
    with pytest.raises(ConfigError, match="'plain' can't read the KV memory of this backend"):
        make_llm(NAME, "paged-16", attention="plain", max_model_len=64)
    with pytest.raises(ConfigError, match="'plain' reads no quantised KV"):
        make_llm(NAME, "virtual-interleaved", attention="plain", kv_cache_dtype="int8", max_model_len=64)


def test_an_executor_drives_a_real_engine() -> None:
    answers = run(blocks("Add an executor"))["answers"]
    assert answers == {"a": [11, 12, 13, 11, 12, 13], "b": [21, 22, 23, 24, 21, 22]}


def test_a_listener_sees_each_step_until_it_is_stopped() -> None:
    prompts = random_prompts(3, [5, 9], 100)
    with make_llm(NAME, "paged-16", max_model_len=64) as llm:
        sizes = run(blocks("Listen to an engine"), llm=llm, prompts=prompts)["sizes"].sizes
        assert max(sizes) == 2
        seen = len(sizes)
        llm.generate(prompts, use_tqdm=False)
        assert len(sizes) == seen
