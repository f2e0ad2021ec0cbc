"""Odd arguments, to every public entry: refused with an error of ours, or accepted; the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inputs.odd import foreign, parameters
from tests.inputs.written import loaded, make_llm
from vattn import LLM, BeamSearchParams, SamplingParams
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.service import Service
from vattn.errors import RequestError
from vattn.hf import VirtualCache
from vattn.kv.ranges import KVRanges
from vattn.vmm.growable import GrowableTensor

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return tokens(llm)


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_beam_width_that_is_missing_is_asked_for() -> None:
    with pytest.raises(RequestError, match="beam_width"):
        BeamSearchParams()


# ---------------------------------------------------------------------- what is made beforehand
@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, Service, KVCacheConfig, SchedulerConfig])
def test_every_field_of_every_object_is_checked(kind: Any) -> None:
    base = {"beam_width": 2} if kind is BeamSearchParams else {}
    found = {
        name: wrong
        for name in parameters(kind)
        if (wrong := foreign(lambda value, name=name: kind(**{**base, name: value})))
    }
    assert not found


def test_ranges_are_checked() -> None:
    good = torch.ones(3, 2)
    for call in (
        lambda value: KVRanges(value, good),
        lambda value: KVRanges(good, value),
        lambda value: KVRanges.of({"k": value, "v": value}),
        KVRanges.of,
        KVRanges.load,
    ):
        assert not foreign(call)


# ---------------------------------------------------------------------- the engine
def accepted_params(llm: LLM, name: str, value: Any) -> None:
    """What is accepted as a parameter must also run."""
    params = SamplingParams(**{"max_tokens": 2, "temperature": 0, name: value})
    llm.generate(PROMPT, params, use_tqdm=False)


@pytest.mark.parametrize("name", parameters(SamplingParams))
def test_a_sampling_parameter_that_is_accepted_also_runs(llm: LLM, expected: list[int], name: str) -> None:
    assert not foreign(lambda value: accepted_params(llm, name, value))
    llm.check()
    assert tokens(llm) == expected


ENTRIES: dict[str, Callable[..., Any]] = {
    "generate": lambda llm, **a: llm.generate(
        **{"prompts": PROMPT, "sampling_params": GREEDY, "use_tqdm": False, **a}
    ),
    "chat": lambda llm, **a: llm.chat(
        **{"messages": HELLO, "sampling_params": GREEDY, "use_tqdm": False, **a}
    ),
    "stream": lambda llm, **a: list(llm.stream(**{"prompt": PROMPT, "sampling_params": GREEDY, **a})),
    "beam_search": lambda llm, **a: llm.beam_search(
        **{"prompts": PROMPT, "params": BEAMS, "use_tqdm": False, **a}
    ),
    "abort": lambda llm, **a: llm.abort(**a),
    "resize_kv_cache": lambda llm, **a: llm.resize_kv_cache(**a),
}
ARGUMENTS = [(entry, name) for entry in ENTRIES for name in parameters(getattr(LLM, entry))]


@pytest.mark.parametrize(("entry", "name"), ARGUMENTS)
def test_every_argument_of_every_method_is_checked(
    llm: LLM, expected: list[int], entry: str, name: str
) -> None:
    assert not foreign(lambda value: ENTRIES[entry](llm, **{name: value}))
    assert not llm.engine.has_work
    llm.check()
    assert tokens(llm) == expected


@pytest.mark.parametrize("place", ["prompt", "prompt_token_ids", "cache_salt", "role", "content", "text"])
def test_odd_values_inside_prompts_and_messages_are_refused(
    llm: LLM, expected: list[int], place: str
) -> None:
    def ask(value: Any) -> None:
        if place in ("role", "content"):
            llm.chat([{**HELLO[0], place: value}], GREEDY, use_tqdm=False)
        elif place == "text":
            llm.chat([{"role": "user", "content": [{"type": "text", "text": value}]}], GREEDY, use_tqdm=False)
        else:
            llm.generate({"prompt": "hello", place: value}, GREEDY, use_tqdm=False)

    assert not foreign(ask)
    assert not foreign(lambda value: llm.generate([PROMPT, value], GREEDY, use_tqdm=False))
    assert not foreign(lambda value: llm.generate([5, value, 6], GREEDY, use_tqdm=False))
    llm.check()
    assert tokens(llm) == expected


def test_methods_that_take_nothing_leave_the_engine_as_it_was(llm: LLM, expected: list[int]) -> None:
    for call in (llm.reset_prefix_cache, llm.sleep, llm.sleep, llm.wake_up, llm.wake_up, llm.snapshot):
        call()
    llm.check()
    assert tokens(llm) == expected


# ---------------------------------------------------------------------- memory by itself
@pytest.mark.parametrize("name", parameters(GrowableTensor))
def test_every_argument_of_a_growable_tensor_is_checked(name: str) -> None:
    def build(value: Any) -> None:
        with GrowableTensor(
            **{"shape_tail": (2,), "dtype": torch.float32, "max_rows": 100, name: value}
        ) as t:
            t.grow(1)
            t.check()

    assert not foreign(build)


@pytest.mark.parametrize("method", ["grow", "shrink", "append"])
def test_what_does_not_fit_a_growable_tensor_is_refused(method: str) -> None:
    with GrowableTensor((2,), torch.float32, 100) as tensor:
        tensor.grow(50)
        tensor.view()[:] = 7
        assert not foreign(getattr(tensor, method))
        tensor.check()
        assert bool((tensor.view()[:40] == 7).all())


@pytest.mark.parametrize("name", parameters(VirtualCache))
def test_every_argument_of_a_virtual_cache_is_checked(name: str) -> None:
    def build(value: Any) -> None:
        cache = VirtualCache(**{"config": loaded().config, "max_len": 100, name: value})
        states = torch.ones(1, 2, 3, 16)
        keys, _ = cache.update(states, states, 0)
        assert bool((keys == 1).all())
        cache.check()

    assert not foreign(build)


# ---------------------------------------------------------------------- the constructor
OPTIONS = parameters(LLM, "model")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_engine_is_checked(
    name: str, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some values name a file

    def build(value: Any) -> None:
        with make_llm(**{"max_model_len": 64, name: value}) as llm:
            llm.check()
            assert tokens(llm) == expected

    assert not foreign(build)


def test_what_is_no_model_is_refused() -> None:
    assert not foreign(lambda value: LLM(value, kv_cache_memory_bytes=8 << 20).close())


def test_a_shared_model_is_unharmed_by_all_that(expected: list[int]) -> None:
    with LLM(loaded(), kv_cache_memory_bytes=8 << 20, max_model_len=np.int64(64)) as llm:
        assert tokens(llm) == expected
