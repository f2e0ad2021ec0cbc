"""Look-ahead: work runs in the background, waits are counted, errors find their owner."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from vattn.vmm.mapper import Mapper


@pytest.fixture
def mapper() -> Iterator[Mapper]:
    mapper = Mapper()
    yield mapper
    mapper.close()


class Gate:
    """Work that starts, says so, and ends when told."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.open = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.started.set()
        assert self.open.wait(60)


def test_work_runs_on_the_mappers_thread(mapper: Mapper) -> None:
    gate = Gate()
    mapper.submit("a", gate)
    assert gate.started.wait(60)
    assert gate.thread is not threading.current_thread() and mapper.pending == 1
    gate.open.set()
    mapper.drain()
    assert mapper.pending == 0


def test_work_that_is_done_is_not_waited_for(mapper: Mapper) -> None:
    mapper.submit("a", lambda: None)
    mapper.drain()
    assert mapper.wait(["a", "never submitted"]) == 0.0
    assert mapper.stall_seconds == 0.0


def test_a_wait_for_running_work_is_a_counted_stall(mapper: Mapper) -> None:
    gate = Gate()
    mapper.submit("a", gate)
    assert gate.started.wait(60)
    threading.Timer(0.05, gate.open.set).start()
    stalled = mapper.wait(["a"])
    assert stalled > 0.0 and mapper.stall_seconds == stalled
    assert mapper.wait(["a"]) == 0.0 and mapper.stall_seconds == stalled


def test_stalls_add_up(mapper: Mapper) -> None:
    total = 0.0
    for _ in range(3):
        gate = Gate()
        mapper.submit("a", gate)
        assert gate.started.wait(60)
        threading.Timer(0.01, gate.open.set).start()
        total += mapper.wait(["a"])
    assert mapper.stall_seconds == pytest.approx(total)


def test_a_wait_concerns_its_own_keys_only(mapper: Mapper) -> None:
    busy = Gate()
    mapper.submit("busy", busy)
    assert busy.started.wait(60)
    assert mapper.wait(["other"]) == 0.0
    busy.open.set()


def test_who_waits_for_work_that_has_not_started_runs_it_himself(mapper: Mapper) -> None:
    busy, ran = Gate(), []
    mapper.submit("busy", busy)
    assert busy.started.wait(60)
    mapper.submit("mine", lambda: ran.append(threading.current_thread()))
    assert mapper.wait(["mine"]) > 0.0
    assert ran == [threading.current_thread()]
    busy.open.set()


def test_later_work_replaces_work_of_its_key_that_has_not_started(mapper: Mapper) -> None:
    busy, ran = Gate(), []
    mapper.submit("busy", busy)
    assert busy.started.wait(60)
    for number in range(3):
        mapper.submit("a", lambda number=number: ran.append(number))
    busy.open.set()
    mapper.drain()
    assert ran == [2]


def test_work_of_one_key_never_runs_twice_at_once(mapper: Mapper) -> None:
    gate, ran = Gate(), []
    mapper.submit("a", gate)
    assert gate.started.wait(60)
    mapper.submit("a", lambda: ran.append(gate.open.is_set()))
    mapper.submit("b", lambda: ran.append("b"))
    assert mapper.pending == 3
    threading.Timer(0.02, gate.open.set).start()
    mapper.wait(["a"])
    mapper.drain()
    assert True in ran and "b" in ran and False not in ran


def test_an_error_is_raised_once_and_only_to_its_key(mapper: Mapper) -> None:
    mapper.submit("bad", lambda: 1 // 0)
    mapper.submit("good", lambda: None)
    mapper.wait(["good"])
    with pytest.raises(ZeroDivisionError):
        mapper.wait(["good", "bad"])
    assert mapper.wait(["bad"]) == 0.0
    mapper.drain()


def test_drain_raises_what_nobody_waited_for(mapper: Mapper) -> None:
    mapper.submit("bad", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mapper.drain()
    mapper.drain()
    mapper.submit("bad", lambda: None)
    mapper.drain()


def test_close_finishes_the_work_and_stops_the_thread() -> None:
    mapper, ran = Mapper("closing-mapper"), []
    for number in range(20):
        mapper.submit(number, lambda number=number: ran.append(number))
    mapper.close()
    mapper.close()
    assert sorted(ran) == list(range(20))
    assert "closing-mapper" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        mapper.submit("late", lambda: None)


def test_a_forgotten_mapper_takes_its_thread_with_it() -> None:
    mapper = Mapper("forgotten-mapper")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "forgotten-mapper"]
    gone = weakref.ref(mapper)
    del mapper
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_many_threads_submit_and_wait(mapper: Mapper) -> None:
    counts = [0] * 4
    errors: list[BaseException] = []

    def step(key: int) -> None:
        counts[key] += 1

    def work(key: int) -> None:
        try:
            for turn in range(200):
                mapper.submit(key, lambda: step(key))
                mapper.wait([key])
                assert counts[key] == turn + 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and counts == [200] * 4
