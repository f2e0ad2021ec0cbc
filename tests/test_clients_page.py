"""The examples of docs/async.md, run as they are written there, with the demo model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vattn import LLM, SamplingParams
from vattn.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.smollm2

PAGE = Path(__file__).parents[1] / "docs" / "async.md"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("smollm2", device="cpu")


@pytest.fixture
def llm(demo: LoadedModel) -> Iterator[LLM]:
    with LLM(demo, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def run(heading: str, **names: Any) -> dict[str, Any]:
    """Run the Python code under a heading of the page."""
    [section] = [s for s in PAGE.read_text(encoding="utf-8").split("\n## ") if s.startswith(f"{heading}\n")]
    [code] = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    exec(code, names)
    return names


def chat(llm: LLM) -> str:
    return llm.chat(QUESTION, PARAMS, use_tqdm=False)[0].outputs[0].text


def complete(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].text


def test_tasks_get_the_text_that_calls_get(llm: LLM, demo: LoadedModel) -> None:
    main = run("From asyncio")["main"]
    assert asyncio.run(main(demo)) == [complete(llm, "The capital of France is"), chat(llm)]


def test_a_stream_of_a_conversation_prints_its_answer(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    run("Streams", llm=llm, SamplingParams=SamplingParams)
    assert capsys.readouterr().out == chat(llm) != ""


def test_a_session_gives_the_outputs_of_all_its_requests(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    run("Several requests of one client", llm=llm, params=PARAMS)
    printed = capsys.readouterr().out
    assert complete(llm, "One, two,") in printed and complete(llm, "Red, green,") in printed
