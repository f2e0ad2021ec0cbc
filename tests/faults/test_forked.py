"""A forked child shares its parent's mapped memory: it may use nothing that belongs to the parent."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.tiny import build
from vattn import LLM, BeamSearchParams, SamplingParams, VirtualCache
from vattn.errors import WrongProcess
from vattn.vmm.driver import Access
from vattn.vmm.growable import GrowableTensor
from vattn.vmm.host import HostDriver


def in_a_child(*acts: Callable[[], object]) -> list[str]:
    """What each act does in a forked child, one after the other: the name of its error, or "no error"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = []
            for act in acts:
                try:
                    act()
                    found.append("no error")
                except BaseException as error:
                    found.append(type(error).__name__)
            os.write(writer, pickle.dumps(found))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pickle.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return list(found)


def refused(*acts: Callable[[], object]) -> bool:
    names = in_a_child(*acts)
    assert names == [WrongProcess.__name__] * len(acts), names
    return True


# ---------------------------------------------------------------------- GrowableTensor
def test_a_growable_tensor_is_refused_in_a_child_and_stays_whole() -> None:
    tensor = GrowableTensor((4,), torch.float32, 10_000)
    tensor.append(torch.arange(4000.0).view(1000, 4))
    expected = tensor.view().clone()

    def drop() -> None:
        nonlocal tensor
        del tensor
        gc.collect()

    assert refused(
        lambda: tensor.append(torch.zeros(1, 4)),
        lambda: tensor.grow(1),
        lambda: tensor.shrink(900),
        lambda: tensor.view(),
        lambda: tensor.data_ptr(),
        lambda: tensor.check(),
        lambda: tensor.__enter__(),
    )
    assert in_a_child(lambda: tensor.close(), gc.collect, drop) == ["no error"] * 3
    assert torch.equal(tensor.view(), expected)
    tensor.check()
    tensor.append(torch.ones(1, 4))
    assert torch.equal(tensor.view()[:-1], expected)


# ---------------------------------------------------------------------- VirtualCache
@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = build("llama")
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_a_virtual_cache_is_refused_in_a_child_and_stays_whole(model: PreTrainedModel, layout: Any) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])

    def go_on(cache: VirtualCache, tokens: int) -> list[int]:
        out = model.generate(
            prompt, past_key_values=cache, max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
        return list(out[0].tolist())

    expected = go_on(VirtualCache(model.config, layout=layout), 12)
    cache = VirtualCache(model.config, layout=layout)
    with torch.no_grad():
        model(prompt[:, :3], past_key_values=cache)

    def drop() -> None:
        nonlocal cache
        del cache
        gc.collect()

    assert refused(
        lambda: go_on(cache, 12),
        lambda: cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0),
        lambda: cache.crop(1),
        lambda: cache.reset(),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0, 0])),
        lambda: cache.layers[0].keys,
        lambda: cache.check(),
        lambda: pickle.dumps(cache),
    )
    assert in_a_child(gc.collect, drop) == ["no error"] * 2
    cache.check()
    assert go_on(cache, 12) == expected


# ---------------------------------------------------------------------- drivers
def test_every_call_of_a_host_driver_is_refused_in_a_child() -> None:
    with_pages = HostDriver(granularity=4096)
    va, handle = with_pages.reserve(8192), with_pages.create(4096)
    with_pages.map(va, 4096, handle)
    with_pages.set_access(va, 4096, Access.READ_WRITE)
    memory = with_pages.tensor(va, (1024,), (1,), torch.int32)
    memory.fill_(7)
    assert refused(
        lambda: with_pages.reserve(4096),
        lambda: with_pages.create(4096),
        lambda: with_pages.map(va + 4096, 4096, handle),
        lambda: with_pages.set_access(va, 4096, Access.NONE),
        lambda: with_pages.unmap(va, 4096),
        lambda: with_pages.release(handle),
        lambda: with_pages.free(va, 8192),
    )
    assert in_a_child(with_pages.close, lambda: with_pages.defer(with_pages.close)) == ["no error"] * 2
    assert memory.eq(7).all()
    with_pages.check()
    with_pages.close()


def test_a_child_is_refused_even_if_a_thread_of_the_parent_held_the_lock() -> None:
    driver = HostDriver(granularity=4096)
    with driver._lock:
        assert refused(lambda: driver.create(4096))


# ---------------------------------------------------------------------- LLM
@pytest.mark.parametrize("backend", ["virtual", "paged", "static"])
def test_an_llm_is_refused_in_a_child_while_the_parent_generates(backend: Any) -> None:
    """Children are made in the middle of running requests; they may close, drop and collect at will."""
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 96, "kv_backend": backend}
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    llm = LLM(build("llama"), **options)
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    streams = [llm.stream({"prompt_token_ids": prompt}, greedy) for prompt in prompts]
    first = [next(stream) for stream in streams]
    beams = BeamSearchParams(beam_width=2, max_tokens=4)

    def drop() -> None:
        nonlocal llm
        del llm
        gc.collect()

    assert refused(
        lambda: llm.generate(prompts, greedy, use_tqdm=False),
        lambda: next(llm.stream({"prompt_token_ids": [5, 6]}, greedy)),
        lambda: llm.beam_search([5, 6], beams, use_tqdm=False),
        lambda: llm.abort(first[0].request_id),
        lambda: llm.resize_kv_cache(1 << 21),
        lambda: llm.sleep(),
        lambda: llm.wake_up(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.memory_usage(),
        lambda: llm.metrics(),
        lambda: llm.snapshot(),
        lambda: llm.check(),
        lambda: list(streams[0]),
    )

    def another() -> None:
        with LLM(build("llama"), **options) as own:
            got = [o.outputs[0].token_ids for o in own.generate(prompts, greedy, use_tqdm=False)]
        assert got == expected

    acts = (lambda: llm.close(), gc.collect, lambda: streams[1].close(), drop, another)
    assert in_a_child(*acts) == ["no error"] * 5
    outputs = [list(stream)[-1] for stream in streams]
    assert [o.outputs[0].token_ids for o in outputs] == expected
    again = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
    assert again == expected
    llm.check()
    llm.close()
