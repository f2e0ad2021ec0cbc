"""`LLM` as users meet it: prompts in every form, streams, aborts, bad input, closing."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.engines import (
    BACKENDS,
    hf_greedy,
    kv_shape,
    loaded,
    make_llm,
    random_prompts,
    reference_model,
    stepped,
)
from tests.models.tiny import build
from vattn import LLM, SamplingParams
from vattn.errors import CapacityError, ConfigError, ModelNotFound, RequestError, StepError, VattnError
from vattn.outputs import RequestOutput
from vattn.vmm.host import HostDriver

NAME = "llama"


def running(llm: LLM) -> int:
    """Requests that run, after all that this thread did before was seen."""
    llm.check()
    return len(llm.engine.scheduler.running)


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
backends = pytest.mark.parametrize("backend", BACKENDS)


def test_prompt_forms_are_one_prompt_each() -> None:
    with make_llm(NAME, "virtual-per_layer") as llm:
        ids = [5, 6, 7]
        forms = [ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [ids, ids]]
        outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
        assert [len(o) for o in outputs] == [1, 1, 1, 1, 2]
        assert len({tuple(x.outputs[0].token_ids) for o in outputs for x in o}) == 1
        arrays = [np.array(ids), torch.tensor([ids, ids]), [np.int64(5), 6, 7], (5, 6, 7)]
        again = [llm.generate(form, GREEDY, use_tqdm=False) for form in arrays]
        assert [len(o) for o in again] == [1, 2, 1, 1]
        assert all(x.outputs[0].token_ids == outputs[0][0].outputs[0].token_ids for o in again for x in o)
        assert llm.generate([], GREEDY, use_tqdm=False) == []


@backends
def test_requests_join_and_abort_while_others_run(backend: str) -> None:
    prompts = random_prompts(3, [9, 30, 4, 21], loaded(NAME).spec.vocab_size)
    expected = hf_greedy(reference_model(NAME), prompts, [20, 20, 20, 20])
    params = replace(GREEDY, max_tokens=20)
    with make_llm(NAME, backend, max_model_len=96, max_num_batched_tokens=8, max_num_seqs=3) as llm:
        first, second = (llm.stream(p, params) for p in prompts[:2])
        for _ in range(3):
            next(first)
        third = llm.stream(prompts[2], params)
        for _ in range(2):
            next(third)
        second.close()
        llm.check()
        outputs = {
            0: list(first)[-1],
            2: list(third)[-1],
            3: llm.generate(prompts[3], params, use_tqdm=False)[0],
        }
        for i, output in outputs.items():
            assert output.outputs[0].token_ids == expected[i]
            assert output.finished and output.outputs[0].finish_reason == "length"
        llm.check()
        assert llm.memory_usage().in_use == 0
        assert not llm.engine.has_work


def test_a_stream_shows_every_token_and_leaving_it_aborts() -> None:
    with make_llm(NAME, "virtual-per_layer") as llm:
        moments = list(llm.stream([1, 2, 3], GREEDY))
        assert [len(m.outputs[0].token_ids) for m in moments] == list(range(1, 9))
        assert [m.finished for m in moments] == [False] * 7 + [True]
        with llm.stream([1, 2, 3], GREEDY) as stream:
            next(stream)
            assert running(llm) == 1
        assert running(llm) == 0
        unread = llm.stream([1, 2, 3], GREEDY)
        assert running(llm) == 1
        del unread
        assert running(llm) == 0
        llm.check()


def test_a_stream_collected_in_the_middle_of_a_step_ends_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(NAME, "paged-16", max_model_len=96) as llm:
        streams = [llm.stream([1, 2, 3], GREEDY), llm.stream([4, 5], GREEDY)]
        next(streams[0])
        run = llm.runner.run

        def collecting(*args: object) -> torch.Tensor:
            if len(streams) == 2:
                streams.pop()
                assert len(llm.engine.scheduler.running) == 2, "the step it is in goes on"
            return run(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(llm.runner, "run", collecting)
        next(streams[0])
        assert running(llm) == 1
        assert len(list(streams[0])[-1].outputs[0].token_ids) == 8


@backends
def test_seeded_sampling_ignores_company_and_preemption(backend: str) -> None:
    prompts = random_prompts(4, [12, 20, 7, 33, 15], loaded(NAME).spec.vocab_size)
    params = [
        SamplingParams(temperature=1.0, top_k=20, seed=i, max_tokens=30, ignore_eos=True) for i in range(5)
    ]
    with make_llm(NAME, backend, max_model_len=96) as llm:
        alone = [
            llm.generate(p, q, use_tqdm=False)[0].outputs[0].token_ids
            for p, q in zip(prompts, params, strict=True)
        ]
    budget = 160 * kv_shape(NAME).token_bytes
    with make_llm(
        NAME,
        backend,
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=budget,
    ) as llm:
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        if not backend.startswith("static"):
            assert llm.metrics().preemptions > 0
    assert together == alone


@backends
def test_logprobs_survive_chunks_and_preemption(backend: str) -> None:
    """Against log_softmax of the reference model's logits over the whole sequence."""
    prompts = random_prompts(5, [25, 40, 18, 30], loaded(NAME).spec.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with make_llm(
        NAME,
        backend,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=160 * kv_shape(NAME).token_bytes,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    model = reference_model(NAME)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt + output.outputs[0].token_ids
        with torch.no_grad():
            want = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
        got = output.prompt_logprobs + output.outputs[0].logprobs
        assert len(got) == len(tokens) and got[0] is None
        for i in range(1, len(tokens)):
            assert got[i][tokens[i]].logprob == pytest.approx(float(want[i - 1, tokens[i]]), abs=1e-4)
        total = sum(
            entry[t].logprob
            for entry, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        )
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_metrics_tell_what_happened() -> None:
    with make_llm(NAME, "paged-16", max_num_batched_tokens=64) as llm:
        [output] = llm.generate([1] * 20, GREEDY, use_tqdm=False)
        m, r = llm.metrics(), output.metrics
        assert (m.output_tokens, m.computed_tokens, m.finished_requests, m.steps) == (8, 27, 1, 8)
        assert m.peak_running == 1 and 0 < m.kv_utilization <= 1
        assert r.num_prompt_tokens == 20 and r.num_output_tokens == 8
        assert 0 <= r.queue_time <= r.ttft <= r.e2e_latency and r.tpot > 0


@backends
def test_similar_requests_make_no_driver_call_after_the_first(backend: str) -> None:
    caching = None if backend.startswith("static") else False  # cached prompts keep their pages
    with make_llm(NAME, backend, max_model_len=96, enable_prefix_caching=caching) as llm:
        llm.generate([[3] * 30] * 4, GREEDY, use_tqdm=False)
        before = llm.metrics().kv_stats
        llm.generate([[4] * 29, [5] * 30, [6] * 25, [7] * 28], GREEDY, use_tqdm=False)
        after = llm.metrics().kv_stats
    assert after.driver_calls == before.driver_calls
    if backend.startswith("virtual"):
        assert after.rows_adopted == before.rows_adopted + 4


# ---------------------------------------------------------------------- bad input

BAD_REQUESTS = {
    "empty prompt": ([], GREEDY, RequestError, "empty"),
    "not a token": ([1, "two"], GREEDY, RequestError, "whole number"),
    "negative token": ([1, -1], GREEDY, RequestError, "vocabulary"),
    "token out of range": ([1, 10**6], GREEDY, RequestError, "vocabulary"),
    "dict without prompt": ({"text": "x"}, GREEDY, RequestError, "prompt_token_ids"),
    "no tokenizer": ("text", GREEDY, RequestError, "tokenizer"),
    "too long": ([1] * 96, GREEDY, CapacityError, "max_model_len=96"),
    "nothing": (None, GREEDY, RequestError, "NoneType"),
    "bytes": (b"abc", GREEDY, RequestError, "bytes"),
    "a set": ({1, 2}, GREEDY, RequestError, "set"),
    "text that is none": ({"prompt": 5}, GREEDY, RequestError, "'prompt' is text"),
    "params of another kind": ([1], {"temperature": 0}, RequestError, "SamplingParams"),
    "stop token out of range": ([1], replace(GREEDY, stop_token_ids=[10**6]), RequestError, "stop_token_ids"),
    "stop string without tokenizer": ([1], replace(GREEDY, stop="x"), RequestError, "tokenizer"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_refused_request_changes_nothing(case: str) -> None:
    prompt, params, error, says = BAD_REQUESTS[case]
    with make_llm(NAME, "virtual-per_layer", max_model_len=96) as llm:
        running = llm.stream([1, 2, 3], GREEDY)
        next(running)
        with pytest.raises(error, match=says):
            llm.generate([[1, 2], prompt], params, use_tqdm=False)
        assert len(llm.engine.scheduler.running) == 1 and not llm.engine.scheduler.waiting
        llm.check()
        assert len(list(running)[-1].outputs[0].token_ids) == 8


def test_nan_temperature_is_refused_when_it_is_written() -> None:
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=float("nan"))


BAD_CONFIGS = {
    "unknown backend": ({"kv_backend": "magic"}, "kv_backend='magic'"),
    "unknown layout": ({"kv_layout": "diagonal"}, "kv_layout='diagonal'"),
    "zero pages": ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes=100"),
    "zero bytes": ({"kv_cache_memory_bytes": 0}, "positive"),
    "page not a multiple": ({"kv_backend": "virtual", "page_bytes": 5000}, "granularity"),
    "budget over memory": ({"kv_cache_memory_bytes": 1 << 50}, "free"),
    "longer than the model": ({"max_model_len": 10**6}, "positions"),
    "longer than the cache": ({"kv_cache_memory_bytes": 65536, "max_model_len": 512}, "max_model_len=512"),
    "no room for output": ({"max_model_len": 1}, "output token"),
    "step too small": ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4"),
    "block of nothing": ({"kv_backend": "paged", "block_size": 0}, "block_size"),
    "length in words": ({"max_model_len": "5"}, "max_model_len"),
    "seed of nothing": ({"seed": None}, "seed"),
    "half overlap": ({"overlap": "yes"}, "overlap"),
    "device of a loaded model": ({"device": "cuda"}, "device"),
    "utilization": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_wrong_option_is_named(case: str) -> None:
    options, says = BAD_CONFIGS[case]
    with pytest.raises(ConfigError, match=says):
        LLM(loaded(NAME), **{"driver": HostDriver(granularity=4096), **options})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        LLM("./no-such-model")


# ---------------------------------------------------------------------- the end


def test_close_is_idempotent_and_ends_running_requests() -> None:
    driver = HostDriver(granularity=4096)
    llm = make_llm(NAME, "virtual-interleaved", driver=driver)
    stream = llm.stream([1, 2, 3], replace(GREEDY, max_tokens=5000))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    with pytest.raises(RequestError, match="closed"):
        llm.generate([1], GREEDY)
    assert llm.memory_usage().physical == 0
    driver.close()


def test_overlap_launches_each_step_before_the_last_is_settled() -> None:
    with make_llm(NAME, "paged-overlap", max_model_len=96) as llm:
        [output] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert llm.metrics().steps == 8 and llm.metrics().computed_tokens == 3 + 7
        # Penalties need the token itself: the step before is settled first, and nothing is computed twice.
        llm.generate([1, 2, 3], replace(GREEDY, repetition_penalty=1.2), use_tqdm=False)
        assert llm.metrics().steps == 16


def test_threads_share_the_batch() -> None:
    prompts = random_prompts(6, [8, 13, 5, 22], loaded(NAME).spec.vocab_size)
    expected = hf_greedy(reference_model(NAME), prompts, [8] * 4)
    got: dict[int, list[int]] = {}
    with make_llm(NAME, "virtual-per_layer", max_model_len=96) as llm:

        def work(i: int) -> None:
            got[i] = llm.generate(prompts[i], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        llm.check()
    assert [got[i] for i in range(4)] == expected


def test_an_error_in_the_model_leaves_requests_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompts(7, [10], loaded(NAME).spec.vocab_size)[0]
    [expected] = hf_greedy(reference_model(NAME), [prompt], [8])
    with make_llm(NAME, "virtual-interleaved", max_model_len=96) as llm:
        stepped(llm).add_request("r", prompt, GREEDY)
        stepped(llm).step()
        run = llm.runner.run

        def broken(*args: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(llm.runner, "run", broken)
        with pytest.raises(RuntimeError, match="planted"):
            stepped(llm).step()
        llm.check()
        monkeypatch.setattr(llm.runner, "run", run)
        assert stepped(llm).run()["r"].outputs[0].token_ids == expected


def test_a_failed_step_is_told_to_its_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = random_prompts(7, [10], loaded(NAME).spec.vocab_size)[0]
    [expected] = hf_greedy(reference_model(NAME), [prompt], [8])
    with make_llm(NAME, "virtual-interleaved", max_model_len=96) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
            with pytest.raises(StepError, match="planted") as caught:
                llm.generate([prompt, prompt[:4]], GREEDY, use_tqdm=False)
            assert isinstance(caught.value.__cause__, RuntimeError)
            with pytest.raises(StepError, match="planted"):
                next(llm.stream(prompt, GREEDY))
        assert running(llm) == 0 and llm.memory_usage().in_use == 0
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected


def test_logits_that_are_not_finite_fail_their_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(NAME, "paged-16", max_model_len=96) as llm:
        run = llm.runner.run

        def poisoned(*args: object) -> torch.Tensor:
            logits = run(*args).clone()  # type: ignore[arg-type]
            logits[-1] = float("nan")
            return logits

        monkeypatch.setattr(llm.runner, "run", poisoned)
        good, bad = llm.generate([[1, 2], [3, 4]], replace(GREEDY, max_tokens=1), use_tqdm=False)
        assert good.outputs[0].finish_reason == "length" and good.error is None
        assert bad.outputs[0].finish_reason == "error" and "finite" in bad.error
        llm.check()


# ---------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("backend", ["virtual-overlap", "paged-overlap", "virtual-interleaved"])
def test_what_settled_before_an_error_is_reported_after_it(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With penalties a step is settled before the next is launched; its launch then fails."""
    params = replace(GREEDY, repetition_penalty=1.3)
    with make_llm(NAME, backend, max_model_len=96) as llm:
        by_hand = stepped(llm)
        by_hand.add_request("short", [5, 6, 7], replace(params, max_tokens=2))
        by_hand.add_request("long", [5, 6, 8], params)
        runner, count = llm.runner, 0
        run = runner.run

        def fails_once(*args: object) -> torch.Tensor:
            nonlocal count
            count += 1
            if count == 3:
                raise RuntimeError("planted")
            return run(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(runner, "run", fails_once)
        outputs: dict[str, RequestOutput] = {}
        with pytest.raises(RuntimeError, match="planted"):
            while llm.engine.has_work:
                outputs |= {output.request_id: output for output in by_hand.step()}
        llm.check()
        outputs |= by_hand.run()
        assert len(outputs["short"].outputs[0].token_ids) == 2
        assert len(outputs["long"].outputs[0].token_ids) == 8
        llm.check()


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-overlap", "paged-16"])
def test_ctrl_c_at_any_moment_leaves_the_engine_whole(backend: str) -> None:
    """Real signals, from every few hundred microseconds of a run on."""
    prompts = random_prompts(8, [20, 9, 33], loaded(NAME).spec.vocab_size)
    interrupted = 0
    with make_llm(NAME, backend, max_model_len=96) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for i in range(40):
            timer = threading.Timer(0.0004 * (i + 1), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                llm.generate(prompts, GREEDY, use_tqdm=False)
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            llm.check()
            assert not llm.engine.has_work
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
    assert interrupted > 20


def test_a_model_that_was_lent_comes_back_as_it_was() -> None:
    model = build(NAME)
    model.set_attn_implementation("sdpa")
    [expected] = hf_greedy(model, [[4, 5, 6]], [5])
    with LLM(model, kv_cache_memory_bytes=1 << 22, max_model_len=64) as llm:
        [output] = llm.generate([4, 5, 6], replace(GREEDY, max_tokens=5), use_tqdm=False)
        with pytest.raises(VattnError, match="close the LLM"):
            model(torch.tensor([[1, 2]]))
    assert output.outputs[0].token_ids == expected
    assert hf_greedy(model, [[4, 5, 6]], [5]) == [expected]
