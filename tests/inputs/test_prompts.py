"""Prompts: what is one, what is refused, and how little refusing costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from tests.inputs.written import VOCAB, make_llm
from tests.names import name_of
from vattn import LLM, SamplingParams
from vattn.errors import CapacityError, RequestError, VattnError

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def tokens(llm: LLM, prompts: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def refusal(llm: LLM, prompts: Any) -> VattnError:
    with pytest.raises(VattnError) as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    llm.check()
    return caught.value


class Token(IntEnum):
    FIVE = 5
    SIX = 6


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        range(5, 9),
        np.array(IDS),
        np.array(IDS, np.uint8),
        np.array(IDS, object),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int16),
        [np.int64(5), 6, np.uint8(7), 8],
        [Token.FIVE, Token.SIX, 7, 8],
        [torch.tensor(5), 6, torch.tensor(7), 8],
        {"prompt_token_ids": np.array(IDS)},
        {"prompt": "text that belongs to them", "prompt_token_ids": IDS},
        [IDS],
        [np.array(IDS)],
        np.array([IDS]),
    ],
    ids=name_of,
)
def test_token_ids_may_come_in_any_container_of_whole_numbers(llm: LLM, ids: Any) -> None:
    [output] = llm.generate(ids, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == IDS
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert [output.outputs[0].token_ids] == tokens(llm, [IDS])


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    rows = [[5, 6, 7], [8, 9, 10]]
    assert tokens(llm, np.array(rows)) == tokens(llm, torch.tensor(rows)) == tokens(llm, rows)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([5, True], "prompt token 1 is True"),
        ([True, 5], "prompt token 0 is True"),
        ([5, np.True_], "prompt token 1 is"),
        ([5, 6.0], "prompt token 1 is 6.0"),
        ([5.0], "prompt token 0 is 5.0"),
        ([5, [6]], r"prompt token 1 is \[6\]"),
        ([5, "6"], "prompt token 1 is '6'"),
        ([5, None], "prompt token 1 is None"),
        ([5, torch.tensor([6])], "prompt token 1 is tensor"),
        ([5, -1], "prompt token 1 is -1: the model's vocabulary is 0 to 299"),
        ([5, VOCAB], "prompt token 1 is 300: the model's vocabulary"),
        ([5, 10**30], "prompt token 1 is 1000"),
        (np.array([5, 300]), "prompt token 1 is 300: the model's"),
        (np.array([5, 2**64 - 1], np.uint64), "prompt token 1 is 18446744073709551615"),
        (torch.tensor([5, -3]), "prompt token 1 is -3"),
        (np.array([5.0, 6.0]), "whole numbers"),
        (torch.tensor([True, False]), "whole numbers"),
        (torch.tensor([5.0], dtype=torch.bfloat16), "can't be read"),
        (np.zeros((2, 2, 2), int), "shape"),
        (np.array(5), "shape"),
        ([], None),
        ([[]], "empty"),
        ([[5], [5, -1]], r"prompts\[1\]: prompt token 1 is -1"),
        (["fine", 5], r"prompts\[1\]: a prompt is text"),
        ({"prompt_token_ids": [5, "x"]}, "prompt token 1 is 'x'"),
        ({"prompt_token_ids": "text"}, "a prompt is text"),
        ({"prompt": ["not", "text"]}, "'prompt' is text"),
        ({}, "needs 'prompt'"),
        ({"prompt": "x", "cache_slat": "me"}, "'cache_slat'.*did you mean 'cache_salt'"),
        ({"prompts": "x"}, "did you mean 'prompt'"),
        ({"prompt": "x", "multi_modal_data": {}}, "no key 'multi_modal_data'"),
        ({"prompt": "x", 5: 6}, "no key 5"),
        ({"prompt": "x", "cache_salt": 5}, "'cache_salt' is text"),
        ({"prompt": "x", "cache_salt": "\udcff"}, "'cache_salt' has '.udcff' at character 0"),
        ("half an emoji: \ud83d", "the prompt has '.ud83d' at character 15"),
        ({"prompt": "\udce9", "prompt_token_ids": [5]}, "'prompt' has '.udce9' at character 0"),
        ("", None),
    ],
    ids=name_of,
)
def test_what_is_no_prompt_is_refused_with_its_place(llm: LLM, prompt: Any, says: str | None) -> None:
    if says is None:  # no prompts, or a beginning-of-text token alone
        llm.generate(prompt, GREEDY, use_tqdm=False)
        return
    error = refusal(llm, prompt)
    assert isinstance(error, RequestError)
    with pytest.raises(RequestError, match=says):
        raise error


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_a_character_is_refused_in_parameters_too(field: str) -> None:
    with pytest.raises(RequestError, match=rf"{field}\[1\] has '.ud83d' at character 1"):
        SamplingParams(**{field: ["fine", "x\ud83d"]})


# ---------------------------------------------------------------------- what refusing costs


class CountingList(list[int]):
    """Counts how many of its items anybody looks at."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            CountingList.seen += 1
            yield item

    def __getitem__(self, at: Any) -> Any:
        CountingList.seen += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("entry", ["generate", "stream", "beam_search"])
def test_a_prompt_that_is_too_long_is_refused_by_its_length_alone(llm: LLM, entry: str) -> None:
    from vattn import BeamSearchParams

    CountingList.seen = 0
    prompt = CountingList([5] * 100_000)
    params: Any = BeamSearchParams(beam_width=2) if entry == "beam_search" else GREEDY
    for asked in (prompt, {"prompt_token_ids": prompt}):
        with pytest.raises(CapacityError, match="100,000 tokens"):
            getattr(llm, entry)(asked, params)
    assert CountingList.seen <= 4


def test_a_range_longer_than_any_memory_is_refused(llm: LLM) -> None:
    assert isinstance(refusal(llm, range(10**30)), CapacityError)


def python_calls(work: Any) -> int:
    """How many Python functions run, and C functions that Python calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor], ids=lambda m: m.__name__)
def test_reading_token_ids_calls_nothing_for_each_of_them(llm: LLM, make: Any) -> None:
    """A refused prompt is read like one that is accepted, up to its last token."""

    def read(length: int) -> int:
        prompt = make([5] * (length - 1) + [VOCAB])
        return python_calls(lambda: refusal(llm, prompt))

    read(16)
    assert abs(read(500) - read(100)) < 50


def test_a_text_that_can_not_fit_is_refused_without_reading_it(llm: LLM, monkeypatch: Any) -> None:
    tokenizer = type(llm.get_tokenizer())
    monkeypatch.setattr(tokenizer, "__call__", lambda *a, **k: pytest.fail("it was tokenised"))
    for text in ("x" * 200_000, "é" * 200_000):
        error = refusal(llm, text)
        assert isinstance(error, CapacityError) and "200,000 characters, so at least" in str(error)


def test_a_long_text_of_few_tokens_is_read(llm: LLM) -> None:
    """The bound must not refuse what fits: the longest tokens count with all their characters."""
    word = max(llm.get_tokenizer().get_vocab(), key=len).replace("Ġ", " ")
    text = word * (llm.max_model_len - 8)
    assert len(text) > 4 * llm.max_model_len
    [output] = llm.generate(text, GREEDY, use_tqdm=False)
    assert len(output.prompt_token_ids) < llm.max_model_len
