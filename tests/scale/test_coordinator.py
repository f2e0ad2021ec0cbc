"""The coordinator file: who is in it, what it refuses, what survives crashes and garbage."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vattn.errors import CapacityError, ConfigError
from vattn.scale.coordinator import Coordinator, default_path, find, targets
from vattn.scale.file_lock import locked
from vattn.scale.ledger import CoordinatorError, Ledger
from vattn.scale.member import Member, Report

FLOOR = 100


class Engine:
    """Stands in for an engine: has a budget, obeys `resize`."""

    def __init__(self, path: Path, asked: int, floor: int = FLOOR, name: str = "engine") -> None:
        self.budget = asked
        self.refuses = False
        self.now = 0.0
        self.member = Member(
            Coordinator(path),
            name=name,
            device="cpu",
            asked=asked,
            floor=floor,
            resize=self.resize,
            report=lambda: Report(min(self.budget, 7), {"running": 1}),
            clock=lambda: self.now,
        )

    def resize(self, nbytes: int) -> None:
        if self.refuses:
            raise CapacityError("the device has not so much")
        self.budget = nbytes

    def step(self) -> None:
        self.now += 1.0
        self.member.beat()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engines.json"


# ---------------------------------------------------------------------- coming, going, obeying
def test_an_engine_alone_keeps_what_it_asked_for(path: Path) -> None:
    engine = Engine(path, 1000)
    [entry] = Coordinator(path).read().engines
    assert (entry.budget, entry.floor, entry.pid) == (1000, FLOOR, os.getpid())
    engine.step()
    assert engine.budget == 1000
    engine.member.leave()
    engine.member.leave()
    assert Coordinator(path).read().engines == []


def test_a_limit_is_obeyed_at_the_next_beat_and_lifted_again(path: Path) -> None:
    engine, coordinator = Engine(path, 1000), Coordinator(path)
    coordinator.limit("engine", 300)
    engine.member.beat()  # the first beat after joining is due at once
    assert engine.budget == 300
    assert coordinator.read().engines[0].budget == 300
    coordinator.limit(str(os.getpid()), None)
    engine.member.beat()
    assert engine.budget == 300, "no more than twice a second"
    engine.step()
    assert engine.budget == 1000


def test_a_limit_below_the_longest_request_is_refused(path: Path) -> None:
    Engine(path, 1000)
    with pytest.raises(CoordinatorError, match=r"engine needs 100 bytes .* limit of 99 is too low"):
        Coordinator(path).limit("engine", 99)


def test_two_engines_of_a_process_share_a_total(path: Path) -> None:
    Coordinator(path).set_total("cpu", 1000)
    first = Engine(path, 900)
    second = Engine(path, 900)
    assert (first.budget, second.budget) == (900, FLOOR), "who comes gets what is left, or its floor"
    second.step()
    assert second.budget == FLOOR, "nothing is free before the first has shrunk"
    first.step()
    second.step()
    assert (first.budget, second.budget) == (500, 500)
    first.member.leave()
    second.step()
    assert second.budget == 900


def test_engines_on_other_devices_do_not_count(path: Path) -> None:
    Coordinator(path).set_total("cuda-7", 50)
    assert Engine(path, 900).budget == 900


def test_a_total_that_cannot_hold_all_is_refused_and_changes_nothing(path: Path) -> None:
    Coordinator(path).set_total("cpu", 150)
    first = Engine(path, 900)
    with pytest.raises(CoordinatorError, match="2 engines need 200 bytes at least; the total is 150"):
        Engine(path, 900)
    with pytest.raises(CoordinatorError, match="1 engines need 100 bytes at least; the total is 99"):
        Coordinator(path).set_total("cpu", 99)
    ledger = Coordinator(path).read()
    assert ledger.totals == {"cpu": 150}
    assert [entry.id for entry in ledger.engines] == [first.member.entry.id]


def test_names_are_made_unique_and_ambiguity_is_refused(path: Path) -> None:
    engines = [Engine(path, 1000) for _ in range(3)]
    assert [e.member.entry.name for e in engines] == ["engine", "engine-2", "engine-3"]
    ledger = Coordinator(path).read()
    assert find(ledger, "engine-2").id == engines[1].member.entry.id
    with pytest.raises(CoordinatorError, match="several engines are called"):
        find(ledger, str(os.getpid()))
    with pytest.raises(CoordinatorError, match=r"no engine is called 'x'; running: engine \("):
        find(ledger, "x")


def test_an_engine_that_cannot_follow_says_why_and_tries_again(path: Path) -> None:
    engine, coordinator = Engine(path, 1000), Coordinator(path)
    coordinator.limit("engine", 2000)
    engine.refuses = True
    engine.step()
    [entry] = coordinator.read().engines
    assert (entry.budget, engine.budget, entry.error) == (1000, 1000, "the device has not so much")
    engine.refuses = False
    engine.step()
    [entry] = coordinator.read().engines
    assert (entry.budget, engine.budget, entry.error) == (2000, 2000, None)


def test_an_engine_that_cannot_take_its_first_budget_is_not_entered(path: Path) -> None:
    Coordinator(path).set_total("cpu", 500)

    def refuse(nbytes: int) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        Member(
            Coordinator(path),
            name="x",
            device="cpu",
            asked=900,
            floor=1,
            resize=refuse,
            report=lambda: Report(0),
        )
    assert Coordinator(path).read().engines == []


def test_rest_tells_once_that_no_work_is_left(path: Path) -> None:
    engine = Engine(path, 1000)
    reports = 0

    def report() -> Report:
        nonlocal reports
        reports += 1
        return Report(0)

    engine.member._report = report
    engine.member.rest()
    engine.member.rest()
    assert reports == 1
    engine.step()
    engine.member.rest()
    assert reports == 3


# ---------------------------------------------------------------------- any order of events
class Sharing(RuleBasedStateMachine):
    """Engines join, step and leave, people set limits and totals."""

    folder: Path

    @initialize(number=st.integers(0, 10**9))
    def open(self, number: int) -> None:
        self.path = Sharing.folder / f"{number}-{os.urandom(4).hex()}.json"
        self.coordinator = Coordinator(self.path)
        self.engines: list[Engine] = []

    @rule(asked=st.integers(1, 1000), floor=st.integers(1, 200))
    def join(self, asked: int, floor: int) -> None:
        try:
            self.engines.append(Engine(self.path, max(asked, floor), floor))
        except CoordinatorError:
            floors = sum(e.floor for e in self.coordinator.read().engines)
            assert floors + floor > self.coordinator.read().totals["cpu"]

    @precondition(lambda self: getattr(self, "engines", None))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.engines)).step()

    @precondition(lambda self: getattr(self, "engines", None))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        engine.member.leave()
        self.engines.remove(engine)

    @precondition(lambda self: getattr(self, "engines", None))
    @rule(data=st.data(), nbytes=st.none() | st.integers(0, 1500))
    def limit(self, data: st.DataObject, nbytes: int | None) -> None:
        entry = data.draw(st.sampled_from(self.engines)).member.entry
        try:
            self.coordinator.limit(entry.id, nbytes)
        except CoordinatorError:
            assert nbytes is not None and nbytes < entry.floor

    @rule(nbytes=st.none() | st.integers(0, 3000))
    def total(self, nbytes: int | None) -> None:
        try:
            self.coordinator.set_total("cpu", nbytes)
        except CoordinatorError:
            assert nbytes is not None and nbytes < sum(e.floor for e in self.coordinator.read().engines)

    @rule()
    def all_step_until_they_agree(self) -> None:
        for _ in range(2):
            for engine in self.engines:
                engine.step()
        ledger = self.coordinator.read()
        goals = targets(ledger, "cpu")
        assert {e.member.entry.id: e.budget for e in self.engines} == goals
        if "cpu" in ledger.totals:
            assert sum(goals.values()) <= ledger.totals["cpu"]

    @invariant()
    def nobody_holds_more_than_the_file_says_nor_less_than_its_floor(self) -> None:
        for engine in getattr(self, "engines", ()):
            [entry] = [e for e in self.coordinator.read().engines if e.id == engine.member.entry.id]
            assert entry.floor <= engine.budget <= entry.budget


def test_any_order_of_events(tmp_path: Path) -> None:
    Sharing.folder = tmp_path
    run_state_machine_as_test(
        Sharing,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_threads_and_a_process_lose_no_change(path: Path) -> None:
    def work(number: int) -> None:
        coordinator = Coordinator(path, lock_timeout_s=60)
        for i in range(20):
            coordinator.set_total(f"device-{number}-{i}", i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    work(4)
    for thread in threads:
        thread.join()
    assert len(Coordinator(path).read().totals) == 5 * 20


# ---------------------------------------------------------------------- crashes
CHILD = """
import sys
from vattn.scale.coordinator import Coordinator
from vattn.scale.member import Member, Report
budget = [800]
member = Member(Coordinator(sys.argv[1]), name="child", device="cpu", asked=800, floor=100,
                resize=lambda n: budget.__setitem__(0, n), report=lambda: Report(0), clock=lambda: 0.0)
print("joined", flush=True)
for line in sys.stdin:
    if line.strip() == "loop":
        print("looping", flush=True)
        while True:
            member.exchange()
    member.exchange()
    print(budget[0], flush=True)
"""


def start_child(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "joined\n"
    return child


def ask(child: subprocess.Popen[str], word: str = "step") -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(word + "\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_two_processes_share_a_total_and_a_killed_one_gives_its_share_back(path: Path) -> None:
    Coordinator(path).set_total("cpu", 1000)
    mine = Engine(path, 900)
    child = start_child(path)
    try:
        mine.step()
        assert ask(child) == "500"
        mine.step()
        assert mine.budget == 500
        Coordinator(path).limit("child", 200)
        assert ask(child) == "200"
        mine.step()
        assert mine.budget == 800
        Coordinator(path).limit("child", None)
        assert ask(child, "loop") == "looping"
        for _ in range(50):  # killed somewhere between lock, write and replace
            mine.step()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    mine.step()
    assert [entry.name for entry in Coordinator(path).read().engines] == ["engine"]
    mine.step()
    assert mine.budget == 900


def test_a_process_killed_while_it_holds_the_lock_holds_it_no_more(path: Path) -> None:
    mine = Engine(path, 900)
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with locked(path, 1.0):
            ready.set()
            signal.pause()

    child = context.Process(target=hold)
    child.start()
    assert ready.wait(30)
    Coordinator(path)
    with pytest.raises(CoordinatorError, match=r"is locked by another process for 0.05 s"):
        Coordinator(path, lock_timeout_s=0.05).limit("engine", 500)
    mine.step()  # does not wait
    assert mine.budget == 900
    child.kill()
    child.join()
    Coordinator(path).limit("engine", 500)
    mine.step()
    assert mine.budget == 500


def test_a_pid_that_is_another_process_by_now_is_dropped(path: Path) -> None:
    Engine(path, 900)
    record = json.loads(path.read_text())
    record["engines"][0]["started"] += 1
    path.write_text(json.dumps(record))
    assert Coordinator(path).read().engines == []


# ---------------------------------------------------------------------- garbage
GARBAGE = [
    '{"format": "vattn-coordinator-1", "totals": {}, "eng',
    "not json",
    "[]",
    '{"format": "other"}',
    '{"format": "vattn-coordinator-1", "totals": {"cpu": -1}, "engines": []}',
    '{"format": "vattn-coordinator-1", "totals": {}, "engines": [{"id": "x"}]}',
    '{"format": "vattn-coordinator-1", "totals": [], "engines": []}',
]


@pytest.mark.parametrize("text", GARBAGE)
def test_people_are_told_of_a_damaged_file_and_engines_write_it_anew(path: Path, text: str) -> None:
    Coordinator(path).set_total("cpu", 1000)
    engine = Engine(path, 900)
    Coordinator(path).limit("engine", 300)
    engine.step()
    path.write_text(text)
    for action in (lambda c: c.read(), lambda c: c.limit("engine", None), lambda c: c.set_total("cpu", 1)):
        with pytest.raises(CoordinatorError, match=r"coordinator file"):
            action(Coordinator(path))
    assert path.read_text() == text, "nobody who looks or is refused changes it"
    with pytest.raises(CoordinatorError, match="coordinator file"):
        Engine(path, 900)
    engine.step()
    ledger = Coordinator(path).read()
    assert [(e.name, e.limit, e.budget) for e in ledger.engines] == [("engine", 300, 300)]
    assert ledger.totals == {"cpu": 1000}


def test_a_file_of_another_version_is_left_alone(path: Path) -> None:
    engine = Engine(path, 900)
    text = '{"format": "vattn-coordinator-2"}'
    path.write_text(text)
    with pytest.raises(CoordinatorError, match="this version reads 'vattn-coordinator-1'"):
        Engine(path, 900)
    engine.step()
    assert path.read_text() == text
    assert engine.member.entry.error is not None and engine.budget == 900


def test_a_file_that_is_gone_is_written_anew(path: Path) -> None:
    engine = Engine(path, 900)
    path.unlink()
    engine.step()
    assert [entry.name for entry in Coordinator(path).read().engines] == ["engine"]


def test_a_ledger_reads_back_as_it_was_written(path: Path) -> None:
    Engine(path, 900)
    ledger = Coordinator(path).read()
    assert Ledger.from_json(ledger.to_json(), path) == ledger


# ---------------------------------------------------------------------- where it is
def test_the_default_file_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = default_path()
    assert path == tmp_path / "vattn" / "engines.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.parent.symlink_to(elsewhere)
    with pytest.raises(CoordinatorError, match="not this user's own folder"):
        default_path()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorError, match="there is no folder"):
        Coordinator(tmp_path / "no" / "file.json")
    with pytest.raises(CoordinatorError, match="is a folder: name a file"):
        Coordinator(tmp_path)
