"""What a request may ask of the engine beside tokens: priority, tenant, timeout; abort; admission control."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engines import make_llm, random_prompts, stepped
from tests.engine.test_scheduler import Traffic, make_request
from tests.models.tiny import VOCAB
from vattn import LLM, SamplingParams
from vattn.engine.deadlines import Deadlines
from vattn.engine.service import Service
from vattn.errors import CapacityError, ConfigError, QueueFull, RequestError

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = random_prompts(3, [9, 5, 30, 12], VOCAB)


@pytest.fixture(
    params=["virtual-interleaved", "virtual-overlap", "paged-16", "paged-overlap", "static-per_layer"]
)
def llm(request: pytest.FixtureRequest) -> Any:
    with make_llm("llama", request.param, max_num_seqs=2, max_waiting=2) as engine:
        yield engine
        engine.check()
        assert engine.memory_usage().in_use == 0, "whatever ended gave its memory back"


class Clock:
    """Stands in for the engine's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("vattn.engine.torch_executor.TorchExecutor.clock", lambda _: self.now)


# ---------------------------------------------------------------------- timeouts
def test_requests_end_when_their_time_is_up_running_or_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for i, (prompt, timeout) in enumerate(zip(PROMPTS, [5.0, None, 3.0, 50.0], strict=True)):
        stepped(llm).add_request(f"r{i}", prompt, LONG, service=Service(timeout_s=timeout))
    ended = {}
    for _ in range(400):
        for output in stepped(llm).step():
            ended[output.request_id] = (output, clock.now)
        clock.now += 0.5
    assert set(ended) == {"r0", "r1", "r2", "r3"}
    reasons = {name: output.outputs[0].finish_reason for name, (output, _) in ended.items()}
    assert reasons == {"r0": "timeout", "r1": "length", "r2": "timeout", "r3": "timeout"}
    assert [ended[name][1] - 100.0 for name in ("r0", "r2", "r3")] == [5.0, 3.0, 50.0]
    waited = ended["r2"][0]
    assert waited.outputs[0].token_ids == [] and waited.metrics.first_scheduled_time is None
    cut = ended["r0"][0]
    assert 0 < len(cut.outputs[0].token_ids) < 200, "what it has by then is given out"
    assert llm.metrics().timed_out_requests == 3


def test_a_request_that_is_done_in_time_does_not_time_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [output] = llm.generate(PROMPTS[0], params, timeout_s=1.0, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    clock.now += 10
    assert stepped(llm).step() == []
    assert llm.metrics().timed_out_requests == 0


def test_a_stream_ends_with_what_it_has(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    moments = []
    for moment in llm.stream(PROMPTS[0], LONG, timeout_s=10.0):
        moments.append(moment)
        clock.now += 1.0
    assert moments[-1].finished and moments[-1].outputs[0].finish_reason == "timeout"
    assert moments[-1].outputs[0].token_ids == moments[-2].outputs[0].token_ids
    assert not any(moment.finished for moment in moments[:-1])


@given(
    times=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20),
    looks=st.lists(st.integers(0, 60), max_size=6),
)
def test_deadlines_come_up_once_and_in_order(times: list[tuple[int, bool]], looks: list[int]) -> None:
    deadlines = Deadlines()
    due = {}
    for i, (deadline, finished) in enumerate(times):
        request = make_request(i, Traffic(1, 1, 0, None))
        deadlines.add(request, float(deadline))
        if finished:
            request.status = request.status.FINISHED
        else:
            due[request] = deadline
    for now in sorted(looks):
        expired = list(deadlines.expired(float(now)))
        assert expired == sorted((r for r, t in due.items() if t <= now), key=lambda r: (due[r], r.arrival))
        for request in expired:
            del due[request]
    assert len(deadlines) >= len(due)


# ---------------------------------------------------------------------- abort
def test_an_aborted_stream_ends_with_what_it_has(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream)
    assert llm.abort(stream.request_id) is True
    rest = list(stream)
    *before, last = rest
    assert not any(moment.finished for moment in before)
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids[:1] == first.outputs[0].token_ids
    assert len(last.outputs[0].token_ids) < 200
    assert llm.abort(stream.request_id) is False
    assert llm.abort("no such request") is False


def test_generate_returns_when_another_thread_aborts_its_request(llm: LLM) -> None:
    started = threading.Event()
    step = llm.engine.step

    def watched() -> Any:
        started.set()
        return step()

    llm.engine.step = watched  # type: ignore[method-assign]
    aborted: list[bool] = []

    def abort() -> None:
        started.wait(60)
        aborted.append(llm.abort("0"))

    thread = threading.Thread(target=abort)
    thread.start()
    outputs = llm.generate(
        PROMPTS[:2], [LONG, SamplingParams(max_tokens=200, ignore_eos=True)], use_tqdm=False
    )
    thread.join()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert aborted == [reasons[0] == "abort"]
    assert reasons[1] == "length", "the other one is unharmed"


# ---------------------------------------------------------------------- admission control
def test_what_would_wait_beyond_the_limit_is_refused_whole(llm: LLM) -> None:
    # Two may run, two may wait.
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    with pytest.raises(QueueFull, match=r"3 requests of tenant 'default' would have to wait.*max_waiting=2"):
        llm.generate([PROMPTS[0]] * 5, short, use_tqdm=False)
    assert not llm.engine.has_work and llm.metrics().refused_requests == 5
    assert len(llm.generate([PROMPTS[0]] * 4, short, use_tqdm=False)) == 4
    assert issubclass(QueueFull, CapacityError)


def test_a_full_queue_refuses_at_once_and_takes_more_when_there_is_room(llm: LLM) -> None:
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS]
    with pytest.raises(QueueFull):
        llm.stream(PROMPTS[0], LONG)
    with pytest.raises(QueueFull):
        stepped(llm).add_request("mine", PROMPTS[0], LONG)
    # Another tenant has a queue of its own: who floods the engine does not shut others out.
    other = llm.stream(PROMPTS[0], LONG, tenant="other")
    other.close()
    streams[0].close()
    again = llm.stream(PROMPTS[0], LONG)
    for stream in (*streams, again):
        stream.close()


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"priority": True}, "priority must be a whole number"),
        ({"priority": [0, 1]}, "1 prompts came with 2 values of priority"),
        ({"tenant": ""}, "tenant must be a name"),
        ({"tenant": 3}, "tenant must be a name"),
        ({"tenant": ["a", "b"]}, "2 values of tenant"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a positive number"),
        ({"timeout_s": "soon"}, "timeout_s must be a positive number"),
    ],
)
def test_terms_that_are_none_are_refused(llm: LLM, terms: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPTS[0]], LONG, use_tqdm=False, **terms)
    assert not llm.engine.has_work


def test_each_prompt_may_have_its_own_terms(llm: LLM) -> None:
    seen = []
    schedule = llm.engine.scheduler.add
    llm.engine.scheduler.add = lambda r: (seen.append(r.service), schedule(r))  # type: ignore
    terms: dict[str, Any] = {"priority": [3, 1], "tenant": ["a", "b"], "timeout_s": [None, 60.0]}
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=1), use_tqdm=False, **terms)
    assert seen == [Service(3, "a", None), Service(1, "b", 60.0)]


def test_priority_decides_who_goes_first() -> None:
    with make_llm("llama", "paged-16", max_num_seqs=1, scheduling_policy="priority") as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, priority=[2, 0, 3, 1], use_tqdm=False)
        finished = [output.metrics.finished_time or 0.0 for output in outputs]
        assert sorted(range(4), key=finished.__getitem__) == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is unknown"),
        ({"priority_ageing_tokens": 0}, "priority_ageing_tokens"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_waiting": 2.5}, "max_waiting"),
        ({"fair_shares": {"a": 0}}, "fair_shares"),
        ({"fair_shares": {"a": float("nan")}}, "fair_shares"),
        ({"fair_shares": {"a": True}}, "fair_shares"),
        ({"fair_shares": {1: 1.0}}, "fair_shares"),
        ({"fair_shares": ["a"]}, "fair_shares"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm("llama", "paged-16", **options)
