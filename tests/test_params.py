"""SamplingParams: vLLM's names and defaults, and what is refused, with which words."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from vattn.errors import RequestError
from vattn.params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.logprobs, params.prompt_logprobs, params.logit_bias) == (None, None, None)
    assert params.skip_special_tokens and params.spaces_between_special_tokens and params.detokenize
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert params.stop_strings == () and params.stop_ids == () and not params.bad_words
    assert not params.greedy and not params.penalised


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n": 0}, "n must be an integer from 1 to 16384, got 0"),
        ({"n": 1.0}, "n must be an integer"),
        ({"n": True}, "got True"),
        ({"temperature": float("nan")}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"temperature": -0.1}, "got -0.1"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"temperature": True}, "got True"),
        ({"temperature": None}, "got None"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.01}, "got 1.01"),
        ({"top_p": float("nan")}, "got nan"),
        ({"top_k": -2}, r"top_k must be an integer of at least -1 \(0 or -1 = all tokens\), got -2"),
        ({"top_k": 5.0}, "got 5.0"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": 1.5}, "got 1.5"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\], got -2.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"repetition_penalty": float("inf")}, "got inf"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": 2**64}, "got 18446744073709551616"),
        (
            {"max_tokens": 0},
            r"max_tokens must be an integer of at least 1 \(None = up to the model's length\)",
        ),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
        ({"min_tokens": 17}, "min_tokens=17 must not exceed max_tokens=16"),
        ({"logprobs": -2}, r"logprobs must be an integer of at least -1 \(-1 = the whole vocabulary\)"),
        ({"logprobs": True}, "got True"),
        ({"prompt_logprobs": 2.5}, "prompt_logprobs must be an integer"),
        ({"stop": ""}, "stop must not hold an empty string"),
        ({"stop": ["a", ""]}, "stop must not hold an empty string"),
        ({"stop": [1]}, "stop must hold strings, got 1"),
        ({"stop": 7}, "stop must be a list of strings, got 7"),
        ({"stop": "x", "detokenize": False}, "set detokenize=True"),
        ({"bad_words": "word"}, "bad_words must be a list of strings"),
        ({"bad_words": [""]}, "bad_words must not hold an empty string"),
        ({"stop_token_ids": [1.0]}, "a token id in stop_token_ids must be an integer of at least 0, got 1.0"),
        ({"stop_token_ids": [-1]}, "got -1"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
        ({"stop_token_ids": "12"}, "got '12'"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"a": 1.0}}, "a token id in logit_bias must be an integer of at least 0, got 'a'"),
        ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\] must be in"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
    ],
)
def test_wrong_values_are_refused_with_value_and_range(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_refusal_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


@pytest.mark.parametrize(
    "right",
    [
        {"top_p": 1.0, "min_p": 1.0, "temperature": 0.0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 5, "min_tokens": 5},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"n": 4},
        {"logprobs": 0, "prompt_logprobs": -1},
        {"temperature": np.float32(0.5), "top_k": np.int64(3)},
    ],
)
def test_values_at_the_edges_are_taken(right: dict[str, object]) -> None:
    params = SamplingParams(**right)  # type: ignore[arg-type]
    for name, value in right.items():
        assert getattr(params, name) == value


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(top_k=-1, seed=-1, stop="end", temperature=1, stop_token_ids=[3, 3])
    assert params.top_k == 0
    assert params.seed is None
    assert params.stop_strings == ("end",)
    assert isinstance(params.temperature, float)
    assert params.stop_ids == (3, 3)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_one_object_may_serve_many_requests() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 9.0
    assert params.logit_bias == {5: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    assert dataclasses.replace(params, temperature=0.0).logit_bias == {5: 1.0}
    with pytest.raises(RequestError):
        dataclasses.replace(params, temperature=-1.0)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop_token_ids=[9, 10]), "stop_token_ids holds token id 10; the model's .* 0 … 9"),
        (SamplingParams(logit_bias={12: 1.0}), "logit_bias holds token id 12"),
        (SamplingParams(logprobs=11), "logprobs=11 is more than the vocabulary's 10 tokens"),
        (SamplingParams(prompt_logprobs=11), "prompt_logprobs=11"),
    ],
)
def test_verify_checks_against_the_vocabulary(params: SamplingParams, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        params.verify(vocab_size=10)


def test_verify_takes_what_fits_and_checks_bad_words() -> None:
    params = SamplingParams(stop_token_ids=[9], logit_bias={0: 1.0}, logprobs=10, prompt_logprobs=-1)
    params.verify(10, bad_words_token_ids=[[1, 2], [9]])
    with pytest.raises(RequestError, match="bad_words holds token id 10"):
        params.verify(10, bad_words_token_ids=[[1, 10]])
    with pytest.raises(RequestError, match="no tokens at all"):
        params.verify(10, bad_words_token_ids=[[1], []])
