"""The whole engine, CPU tensors over the software CUDA driver: run by `test_engine.py` in a child process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from tests.engine.engines import (
    BACKENDS,
    hf_greedy,
    kv_shape,
    make_llm,
    random_prompts,
    reference_model,
    stepped,
)
from tests.softcuda.library import SoftCuda, Usage
from vattn import LLM, RequestOutput, SamplingParams
from vattn.vmm.cuda import CudaDriver
from vattn.vmm.driver import DriverError

NOTHING = Usage(0, 0, 0, 0)
PAGE = 4096
VIRTUAL = [name for name in BACKENDS if name.startswith("virtual")]

# Enough to grow over several pages, to wait for memory and, in the second wave, to adopt what is parked.
PROMPTS = [1, 37, 16, 60, 2, 33]
OUTPUTS = [24, 20, 9, 16, 30, 12]


@pytest.fixture
def soft() -> Iterator[SoftCuda]:
    """The library, with nothing on the device before the test nor after it."""
    soft = SoftCuda()
    assert soft.usage() == NOTHING and soft.configure(PAGE, 64 << 20)
    yield soft
    soft.fail_at(0)
    soft.check()
    assert soft.usage() == NOTHING, "something was not given back"


@lru_cache(maxsize=1)
def expected(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what transformers' own `generate` makes of them."""
    model = reference_model(name)
    prompts = random_prompts(3, PROMPTS, model.config.get_text_config().vocab_size)
    return prompts, hf_greedy(model, prompts, OUTPUTS)


def params() -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUTS]


def engine(backend: str, driver: CudaDriver, **options: Any) -> LLM:
    """Room for 120 tokens at once; the requests want more than 300."""
    return make_llm(
        "llama",
        backend,
        driver=driver,
        max_num_batched_tokens=24,
        max_num_seqs=5,
        max_model_len=96,
        kv_cache_memory_bytes=120 * kv_shape("llama").token_bytes,
        **options,
    )


AHEAD = {"background_mapping": True}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("virtual-interleaved", {}),
        ("virtual-interleaved", AHEAD),
        ("virtual-per_layer", {}),
        ("virtual-per_layer", AHEAD),
        ("virtual-overlap", {}),  # maps ahead too
    ],
)
def test_tokens_equal_transformers(soft: SoftCuda, backend: str, options: dict[str, bool]) -> None:
    """In both layouts, with pages mapped within the step or by a thread ahead of it, twice on each engine."""
    prompts, tokens = expected("llama")
    driver = CudaDriver(tensor_device="cpu")
    mapped = soft.calls("cuMemMap")
    with engine(backend, driver, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params(), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == tokens
            llm.check()
            soft.check()
            assert llm.memory_usage().in_use == 0
        usage = llm.memory_usage()
        assert soft.usage().used >= usage.parked + usage.free
        assert llm.metrics().preemptions > 0, "the requests were meant to be too many"
    assert soft.calls("cuMemMap") > mapped + 10
    driver.close()


SHORT = [18, 3, 9, 33], [5, 9, 7, 6]
"""Prompts and outputs of requests that want 90 tokens together, where there is room for about half."""


def short_engine(backend: str, driver: CudaDriver) -> LLM:
    pages = 14 if backend == "virtual-per_layer" else 8
    return make_llm(
        "llama",
        backend,
        driver=driver,
        max_num_batched_tokens=12,
        max_num_seqs=3,
        max_model_len=40,
        kv_cache_memory_bytes=pages * PAGE,
    )


def run(soft: SoftCuda, llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """Step to the end; a step that the driver failed is tried again."""
    for index, (prompt, length) in enumerate(zip(prompts, SHORT[1], strict=True)):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        stepped(llm).add_request(str(index), prompt, params)
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_work:
        try:
            done.update((output.request_id, output) for output in stepped(llm).step())
            with soft.unharmed():
                llm.check()
        except DriverError as error:  # of the step, or of mapping ahead, which the check waits for
            assert soft.last_failure == error.call
            with soft.unharmed():
                llm.check()
    return [done[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize("backend", VIRTUAL)
def test_any_driver_call_may_fail(soft: SoftCuda, backend: str) -> None:
    """Whatever call fails, the step is tried again and the tokens are right; the books always balance."""
    model = reference_model("llama")
    prompts = random_prompts(4, SHORT[0], model.config.get_text_config().vocab_size)
    tokens = hf_greedy(model, prompts, SHORT[1])
    driver = CudaDriver(tensor_device="cpu")
    failed: Counter[str] = Counter()
    for n in range(1, 400):
        llm = short_engine(backend, driver)
        before = soft.failures
        soft.fail_at(n)
        for output, whole in zip(run(soft, llm, prompts), tokens, strict=True):
            got = output.outputs[0].token_ids
            if output.error is not None:  # the only one running, and no page to be had for it
                assert soft.last_failure in ("cuMemCreate", "cuMemUnmap"), output.error
                assert got == whole[: len(got)]
            else:
                assert got == whole
        met = soft.failures > before
        soft.fail_at(0)
        soft.check()
        assert llm.memory_usage().in_use == 0
        llm.close()
        assert soft.usage() == NOTHING
        if not met:
            break
        failed[soft.last_failure] += 1
    assert {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"} <= set(failed) and not met, failed
    driver.close()


def test_memory_that_somebody_else_takes(soft: SoftCuda) -> None:
    """The device has less than the budget promised: a request may end with an error, the engine lives."""
    soft.configure(PAGE, 32 * PAGE)
    prompts, tokens = expected("llama")
    driver, somebody = CudaDriver(tensor_device="cpu"), CudaDriver(tensor_device="cpu")
    with engine("virtual-interleaved", driver) as llm:
        room = 20 * PAGE
        assert llm.kv_config.memory_bytes is not None and llm.kv_config.memory_bytes > room
        somebody.create(32 * PAGE - room)
        for output, whole in zip(llm.generate(prompts, params(), use_tqdm=False), tokens, strict=True):
            got = output.outputs[0].token_ids
            if output.error is None:
                assert got == whole
            else:
                assert "the machine" in output.error and got == whole[: len(got)]
        assert soft.usage().used == 32 * PAGE, "every page was needed"
        llm.check()
        somebody.close()
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == tokens
    driver.close()
