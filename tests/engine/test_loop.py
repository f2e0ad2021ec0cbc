"""One thread owns the engine: what clients of `LLM` see of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engines import loaded, make_llm, random_prompts
from tests.models.tiny import VOCAB
from vattn import LLM, KVCacheConfig, SamplingParams, SchedulerConfig
from vattn.engine.listener import StepListener
from vattn.engine.scheduler import Batch
from vattn.errors import ConfigError, RequestError, StepError

NAME = "llama"


def greedy(n: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


class Steps(StepListener):
    """How many steps there were, and whose tokens were computed in each."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def scheduled(self, batch: Batch) -> None:
        self.batches.append([item.request.request_id for item in batch.items if item.samples])


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something that must happen has happened; the test's own timeout ends it otherwise."""
    while not condition():
        time.sleep(0.001)


# ---------------------------------------------------------------------- streams
def test_every_stream_gets_its_token_in_each_step() -> None:
    """However many threads wait, nobody steps for the others: as many steps as the longest request needs."""
    count, tokens = 12, 20
    prompts = random_prompts(2, [6] * count, VOCAB)
    steps = Steps()
    with make_llm(NAME, "virtual-interleaved", max_model_len=64, max_num_seqs=count) as llm:
        llm.listen(steps)
        gate = threading.Event()
        llm.sleep()  # all of them arrive before the first step
        streams = [llm.stream(prompt, greedy(tokens)) for prompt in prompts]
        moments: dict[str, list[int]] = {}

        def read(stream: Any) -> None:
            gate.wait()
            moments[stream.request_id] = [len(moment.outputs[0].token_ids) for moment in stream]

        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        gate.set()
        llm.wake_up()
        for thread in threads:
            thread.join()
    assert all(lengths == list(range(1, tokens + 1)) for lengths in moments.values())
    assert len(moments) == count and len(steps.batches) == tokens
    assert all(len(batch) == count for batch in steps.batches)


def test_requests_that_arrive_while_the_engine_sleeps_wait() -> None:
    with make_llm(NAME, "paged-16", max_model_len=64) as llm:
        [expected] = llm.generate([1, 2, 3], greedy(5), use_tqdm=False)
        llm.sleep()
        stream = llm.stream([1, 2, 3], greedy(5))
        assert llm.memory_usage().physical == 0
        llm.wake_up()
        assert list(stream)[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_deltas_joined_are_the_whole() -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=12, ignore_eos=True, logprobs=2)
    with make_llm(NAME, "virtual-interleaved", max_model_len=64) as llm:
        [whole] = llm.generate([1, 2, 3], params, use_tqdm=False)
        joined: list[list[int]] = [[], []]
        entries: list[list[Any]] = [[], []]
        for moment in llm.stream([1, 2, 3], replace(params, output_kind="delta")):
            for output in moment.outputs:
                joined[output.index] += output.token_ids
                entries[output.index] += output.logprobs or []
        assert joined == [output.token_ids for output in whole.outputs]
        assert entries == [output.logprobs for output in whole.outputs]


def test_a_streamed_token_costs_what_is_new_whatever_there_was_before() -> None:
    """Counted, not timed: Python calls of the client per output, with log-probabilities."""
    with make_llm(NAME, "static-interleaved", max_model_len=500) as llm:
        stream = llm.stream([1, 2, 3], greedy(480, logprobs=1))
        calls: list[int] = []
        for _ in range(480):
            count = 0

            def profile(frame: Any, event: str, argument: Any) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            sys.setprofile(profile)
            try:
                next(stream)
            finally:
                sys.setprofile(None)
            calls.append(count)
    early, late = sorted(calls[50:150]), sorted(calls[380:480])
    assert late[50] <= 1.5 * early[50] + 20, (early[50], late[50])


# ---------------------------------------------------------------------- clients that go away
def interrupting(line: int) -> Callable[..., Any]:
    """A trace function that interrupts at the `line`-th line of the package's code, and two lines later."""
    seen = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "line" and "vattn" in frame.f_code.co_filename:
            seen += 1
            if seen in (line, line + 2):
                raise KeyboardInterrupt
        return trace

    return trace


def test_a_client_that_is_gone_leaves_nothing_behind_wherever_it_was_interrupted_twice() -> None:
    """KeyboardInterrupt at a line of `generate`, and another one while the first is being handled."""
    with make_llm(NAME, "virtual-interleaved", max_model_len=64) as llm:
        [expected] = llm.generate([1, 2, 3], greedy(6), use_tqdm=False)
        interrupted = 0
        for first in range(1, 200, 4):
            sys.settrace(interrupting(first))
            try:
                llm.generate([[1, 2, 3], [4, 5]], greedy(40), use_tqdm=False)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            llm.check()
            assert not llm.engine.requests(), f"left behind after line {first}"
            assert llm.memory_usage().in_use == 0
        [again] = llm.generate([1, 2, 3], greedy(6), use_tqdm=False)
    assert interrupted > 20
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_stream_that_is_dropped_ends() -> None:
    with make_llm(NAME, "paged-16", max_model_len=500) as llm:
        stream = llm.stream([1, 2, 3], greedy(490))
        next(stream)
        del stream
        gc.collect()
        wait_for(lambda: not llm.engine.requests())
        llm.check()


def test_an_llm_that_is_dropped_gives_everything_back_and_its_thread_ends() -> None:
    before = threading.active_count()
    llm = make_llm(NAME, "virtual-interleaved", max_model_len=64)
    llm.generate([1, 2], greedy(2), use_tqdm=False)
    kv = llm.engine.kv
    del llm
    gc.collect()
    wait_for(lambda: threading.active_count() == before)
    with pytest.raises(RuntimeError, match="closed"):
        kv.tensor  # noqa: B018


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_that_generates_while_the_interpreter_exits_does_no_harm(daemon: bool) -> None:
    code = f"""
import threading, time
from tests.engine.engines import make_llm
from vattn import SamplingParams
llm = make_llm("llama", "virtual-interleaved", max_model_len=500)
started = threading.Event()
def work():
    params = SamplingParams(temperature=0, max_tokens=50 if not {daemon} else 490, ignore_eos=True)
    started.set()
    llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False)
thread = threading.Thread(target=work, daemon={daemon})
thread.start()
started.wait()
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr


# ---------------------------------------------------------------------- failures
def test_who_is_not_in_a_failed_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(NAME, "paged-16", max_model_len=400, max_num_seqs=1) as llm:
        [expected] = llm.generate([4, 5, 6], greedy(5), use_tqdm=False)
        llm.sleep()
        first, second = llm.stream([1, 2, 3], greedy(300)), llm.stream([4, 5, 6], greedy(5))
        run, failed = llm.runner.run, []

        def once(*args: Any) -> Any:
            if not failed:
                failed.append(True)
                raise RuntimeError("planted")
            return run(*args)

        monkeypatch.setattr(llm.runner, "run", once)
        llm.wake_up()
        with pytest.raises(StepError, match="planted"):
            list(first)
        assert list(second)[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        llm.check()


def test_a_closed_engine_refuses_in_every_way() -> None:
    llm = make_llm(NAME, "paged-16", max_model_len=64)
    llm.close()
    for use in (
        lambda: llm.generate([1], greedy(1)),
        lambda: llm.stream([1], greedy(1)),
        lambda: llm.abort("0"),
        lambda: llm.resize_kv_cache(1 << 20),
        llm.sleep,
        llm.wake_up,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(RequestError, match="closed"):
            use()
    llm.check()
    assert llm.metrics().steps == 0


# ---------------------------------------------------------------------- configuration objects
def test_configurations_stand_for_their_single_options() -> None:
    kv = KVCacheConfig(backend="paged", block_size=8, memory_bytes=1 << 20)
    with LLM(loaded(NAME), kv_config=kv, scheduler_config=SchedulerConfig(3, 32), max_model_len=64) as llm:
        assert llm.describe_kv()["block_size"] == 8
        assert llm.engine.scheduler.max_num_seqs == 3
    with pytest.raises(ConfigError, match="KVCacheConfig or its single options"):
        LLM(loaded(NAME), kv_config=kv, block_size=4)
    with pytest.raises(ConfigError, match="must be a SchedulerConfig, not int"):
        LLM(loaded(NAME), scheduler_config=3)  # type: ignore[arg-type]
