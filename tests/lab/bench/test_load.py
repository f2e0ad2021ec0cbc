"""The load generator, against an engine whose clock and speed are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.load import drive
from vattn.lab.bench.synthetic import ChatWorkload
from vattn.lab.bench.target import Finished, Target
from vattn.lab.bench.workload import WorkloadRequest


@dataclass
class Work:
    prompt: list[int]
    left: int
    times: list[float] = field(default_factory=list)


class StepTarget(Target):
    """Every step takes `step_s` and gives each running request one token: 100, 101, …"""

    def __init__(self, step_s: float = 1.0, failing: frozenset[str] = frozenset()) -> None:
        self.kv = {}
        self.now = 1000.0
        self.step_s = step_s
        self.failing = failing
        self.work: dict[str, Work] = {}
        self.prompts: dict[str, list[int]] = {}
        self.most = 0

    def clock(self) -> float:
        return self.now

    def submit(
        self, request_id: str, prompt_token_ids: list[int], output_len: int, n: int, beams: bool
    ) -> None:
        self.prompts[request_id] = list(prompt_token_ids)
        self.work[request_id] = Work(prompt_token_ids, output_len)
        self.most = max(self.most, len(self.work))

    def advance(self, wait_s: float) -> list[Finished]:
        if not self.work:
            assert math.isfinite(wait_s), "it would sleep for ever"
            self.now += wait_s
            return []
        self.now += self.step_s
        ended = []
        for request_id, work in list(self.work.items()):
            work.times.append(self.now)
            work.left -= 1
            if not work.left or request_id in self.failing:
                del self.work[request_id]
                tokens = list(range(100, 100 + len(work.times)))
                error = "broken" if request_id in self.failing else None
                ended.append(Finished(request_id, tokens, [work.times], error=error))
        return ended


def ask(output_len: int, **options: object) -> WorkloadRequest:
    return WorkloadRequest([1, 2, 3], output_len, **options)  # type: ignore[arg-type]


def test_latencies_count_from_when_a_request_was_due_not_from_when_the_engine_looked() -> None:
    """The second request falls due in the middle of a step, as it would on a server."""
    first, second = drive([ask(2), ask(1)], Arrivals("constant", rate=2.0), StepTarget())
    assert (first.arrival_s, first.token_times) == (0.0, [[1.0, 2.0]])
    assert (second.arrival_s, second.token_times) == (0.5, [[2.0]])
    assert second.ttft == 1.5


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    target = StepTarget()
    _, second = drive([ask(1), ask(1)], Arrivals("constant", rate=0.1), target)
    assert second.arrival_s == 10.0 and second.finished_s == 11.0
    assert target.now == 1011.0


def test_a_closed_loop_keeps_exactly_so_many_in_flight() -> None:
    target = StepTarget()
    timelines = drive([ask(2) for _ in range(7)], Arrivals("at-once"), target, max_concurrency=3)
    assert target.most == 3
    assert [t.arrival_s for t in timelines] == [0, 0, 0, 2, 2, 2, 4], "sent when a slot was free"
    assert {t.ttft for t in timelines} == {1.0}, "waiting for a slot is not latency, as in vLLM"


def test_a_free_slot_does_not_bring_arrivals_forward() -> None:
    timelines = drive(
        [ask(1) for _ in range(3)], Arrivals("constant", rate=0.5), StepTarget(), max_concurrency=2
    )
    assert [t.arrival_s for t in timelines] == [0.0, 2.0, 4.0]


def test_without_a_limit_everything_is_sent_when_it_is_due() -> None:
    target = StepTarget()
    drive([ask(5) for _ in range(9)], Arrivals("at-once"), target)
    assert target.most == 9


def test_static_batches_wait_for_their_slowest_request() -> None:
    target = StepTarget()
    work = [ask(5), ask(1), ask(2), ask(1), ask(3)]
    timelines = drive(work, Arrivals("at-once"), target, max_concurrency=2, barrier=True)
    assert target.most == 2
    assert [t.token_times[0][0] for t in timelines] == [1, 1, 6, 6, 8]
    assert {t.arrival_s for t in timelines} == {0.0}, "it is the engine that lets them wait"
    assert [t.finished_s for t in timelines] == [5, 1, 7, 6, 10]


def test_a_static_batch_does_not_wait_to_be_full() -> None:
    """A request alone starts alone; who comes later waits for it."""
    work = [ask(4), ask(1), ask(1)]
    timelines = drive(work, Arrivals("constant", rate=1.0), StepTarget(), max_concurrency=8, barrier=True)
    assert [t.arrival_s for t in timelines] == [0, 1, 2]
    assert [t.finished_s for t in timelines] == [4, 5, 5]


def test_turns_follow_answers_and_contain_them() -> None:
    turns = [
        WorkloadRequest([1, 2], 2, session="s"),
        WorkloadRequest([3], 1, session="s", think_s=5.0),
        WorkloadRequest([4, 5], 1, session="s", think_s=0.5),
    ]
    target = StepTarget()
    timelines = drive(turns, Arrivals("at-once"), target)
    assert target.prompts == {
        "0": [1, 2],
        "1": [1, 2, 100, 101, 3],
        "2": [1, 2, 100, 101, 3, 100, 4, 5],
    }
    assert [t.arrival_s for t in timelines] == [0.0, 7.0, 8.5], "think time after the answer"
    assert [t.prompt_len for t in timelines] == [2, 5, 8]


def test_sessions_do_not_wait_for_each_other() -> None:
    workload = ChatWorkload(4, 3, Lengths("fixed", 2, 2), Lengths("uniform", 1, 6))
    requests = workload.generate(50)
    timelines = drive(requests, Arrivals("at-once"), StepTarget())
    ends: dict[str | None, float] = {}
    for request, timeline in zip(requests, timelines, strict=True):
        assert timeline.arrival_s == ends.get(request.session, 0.0), "as soon as its own answer was there"
        assert timeline.finished_s is not None
        ends[request.session] = timeline.finished_s


def test_traced_turns_wait_for_their_time_and_for_the_answer() -> None:
    turns = [
        ask(4, session="s", arrival_s=1.0),
        ask(1, session="s", arrival_s=2.0),
        ask(1, session="s", arrival_s=20.0),
    ]
    timelines = drive(turns, Arrivals("trace", time_scale=0.5), StepTarget())
    assert [t.arrival_s for t in timelines] == [0.5, 4.5, 10.0]


def test_a_failed_turn_ends_its_session_and_nothing_else() -> None:
    requests = [ask(3, session="a"), ask(1, session="b"), ask(1, session="a"), ask(1, session="b")]
    a, b, after_a, after_b = drive(requests, Arrivals("at-once"), StepTarget(failing=frozenset("0")))
    assert a.error == "broken" and not a.success
    assert after_a.error is not None and "before it failed" in after_a.error
    assert b.success and after_b.success


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    drive([ask(1), ask(2), ask(3)], Arrivals("at-once"), StepTarget(), progress=lambda *now: seen.append(now))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_impossible_loads_are_refused() -> None:
    with pytest.raises(ConfigError, match="max-concurrency"):
        drive([ask(1)], Arrivals("at-once"), StepTarget(), max_concurrency=0)
    with pytest.raises(ConfigError, match="need a size"):
        drive([ask(1)], Arrivals("at-once"), StepTarget(), barrier=True)
    with pytest.raises(ConfigError, match="arrival times"):
        drive([ask(1)], Arrivals("trace"), StepTarget())
