"""Clean-up waits for the last step submitted before it, and no longer."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vmm.events import FakeEvent
from vattn.vmm.retire import Retirement


def test_with_nothing_in_flight_clean_up_runs_at_once() -> None:
    retirement, ran = Retirement(), []
    retirement.retire(lambda: ran.append(1))
    assert ran == [1] and retirement.pending == 0
    retirement.submit(None)
    retirement.retire(lambda: ran.append(2))
    assert ran == [1, 2]


def test_clean_up_waits_for_the_last_step_submitted_before_it() -> None:
    retirement, ran = Retirement(), []
    first, second, third = FakeEvent(), FakeEvent(), FakeEvent()
    assert retirement.submit(first) == 1
    retirement.retire(lambda: ran.append("after 1"))
    assert retirement.submit(second) == 2
    retirement.retire(lambda: ran.append("after 2"))
    assert retirement.submit(third) == 3
    assert retirement.poll() == 0 and retirement.pending == 2
    first.finish()
    assert retirement.poll() == 1 and ran == ["after 1"]
    second.finish()
    assert retirement.poll() == 1 and ran == ["after 1", "after 2"]
    assert retirement.in_flight == 1
    retirement.check()


def test_a_step_is_done_only_when_every_earlier_one_is() -> None:
    retirement, ran = Retirement(), []
    first, second = FakeEvent(), FakeEvent()
    retirement.submit(first)
    retirement.submit(second)
    retirement.retire(lambda: ran.append(1))
    second.finish()
    assert retirement.poll() == 0
    first.finish()
    assert retirement.poll() == 1


def test_a_completed_step_behind_a_running_one_waits_with_it() -> None:
    retirement, ran = Retirement(), []
    event = FakeEvent()
    retirement.submit(event)
    retirement.submit(None)
    retirement.retire(lambda: ran.append(1))
    assert ran == []
    event.finish()
    retirement.poll()
    assert ran == [1]


def test_drain_waits_for_the_device_and_runs_everything() -> None:
    retirement, ran = Retirement(), []
    events = [FakeEvent() for _ in range(3)]
    for event in events:
        retirement.submit(event)
        retirement.retire(lambda: ran.append(1))
    retirement.drain()
    assert len(ran) == 3 and retirement.pending == 0 and retirement.in_flight == 0
    assert [event.waited for event in events] == [1, 1, 1]
    retirement.drain()


def test_an_error_does_not_keep_the_others_from_running() -> None:
    retirement, ran = Retirement(), []
    event = FakeEvent()
    retirement.submit(event)
    retirement.retire(lambda: ran.append(1))
    retirement.retire(lambda: 1 // 0)
    retirement.retire(lambda: ran.append(2))
    event.finish()
    with pytest.raises(ZeroDivisionError):
        retirement.poll()
    assert ran == [1, 2] and retirement.pending == 0
    retirement.check()


def test_clean_up_may_retire_more() -> None:
    retirement, ran = Retirement(), []
    event = FakeEvent()
    retirement.submit(event)
    retirement.retire(lambda: retirement.retire(lambda: ran.append(1)))
    retirement.drain()
    assert ran == [1]


def test_what_clean_up_retires_comes_after_what_waited_before() -> None:
    retirement, ran = Retirement(), []
    event = FakeEvent()
    retirement.submit(event)

    def first() -> None:
        ran.append("first")
        retirement.retire(lambda: ran.append("of the first"))

    retirement.retire(first)
    retirement.retire(lambda: ran.append("second"))
    event.finish()
    retirement.poll()
    assert ran == ["first", "second", "of the first"]


def test_drain_waits_for_every_step_though_another_thread_polls_meanwhile() -> None:
    retirement = Retirement()

    class Polled(FakeEvent):
        def synchronize(self) -> None:
            super().synchronize()
            retirement.poll()  # as another thread may: the step is taken off the list behind drain's back

    last = FakeEvent()
    retirement.submit(Polled())
    retirement.submit(last)
    retirement.drain()
    assert last.waited == 1 and retirement.in_flight == 0


def test_a_lock_held_by_the_caller_and_wanted_by_clean_up_does_not_deadlock() -> None:
    retirement, lock = Retirement(), threading.Lock()
    event = FakeEvent()
    retirement.submit(event)

    def clean_up() -> None:
        with lock:
            pass

    with lock:
        retirement.retire(clean_up)
        event.finish()
        poller = threading.Thread(target=retirement.poll)
        poller.start()
        retirement.submit(None)  # while the poller waits for our lock
        assert retirement.in_flight in (0, 1)
    poller.join(60)
    assert not poller.is_alive() and retirement.pending == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.just("submit"), st.just("retire"), st.integers(0, 9)), max_size=40))
def test_nothing_runs_early_and_everything_runs_in_order(steps: list[str | int]) -> None:
    retirement = Retirement()
    events: list[FakeEvent] = []
    ran: list[int] = []
    needs: list[int] = []  # by clean-up: how many events must be done first

    def register(number: int) -> None:
        def clean_up() -> None:
            assert all(event.done for event in events[: needs[number]])
            ran.append(number)

        retirement.retire(clean_up)

    for step in steps:
        if step == "submit":
            events.append(FakeEvent())
            retirement.submit(events[-1])
        elif step == "retire":
            needs.append(len(events))
            register(len(needs) - 1)
        elif isinstance(step, int) and step < len(events):
            events[step].finish()
            retirement.poll()
        due = [number for number, need in enumerate(needs) if all(event.done for event in events[:need])]
        retirement.poll()
        assert ran == due
        retirement.check()
    retirement.drain()
    assert ran == list(range(len(needs)))
