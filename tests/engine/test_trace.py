"""The event log of a whole engine, and its replay."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engine.engines import BACKENDS, make_llm, random_prompts, stepped
from tests.models.tiny import VOCAB
from vattn import LLM, SamplingParams
from vattn.cli import app
from vattn.engine.replay import replay
from vattn.engine.service import Service
from vattn.errors import ConfigError, QueueFull

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # of the tiny llama
LENGTHS = [5, 40, 17, 60, 33, 8, 50, 21, 70, 12]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def run(llm: LLM) -> None:
    """Mixed traffic: tenants, priorities, waves of arrivals, an abort, a stop by token."""
    prompts = random_prompts(1, LENGTHS, VOCAB)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=10 + 3 * i, ignore_eos=True, stop_token_ids=[7])
        service = Service(priority=i % 3, tenant="ab"[i % 2])
        stepped(llm).add_request(f"r{i}", prompt, params, service=service)
        if i % 3 == 2:
            stepped(llm).step()
            stepped(llm).step()
        if i == 6:
            llm.engine.abort("r4")
    while llm.engine.has_work:
        stepped(llm).step()


def logged(path: Path, backend: str = "paged-16", **options: Any) -> Path:
    options = {
        "kv_cache_memory_bytes": 150 * TOKEN_BYTES,
        "max_model_len": 120,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "scheduling_policy": "priority",
        "priority_ageing_tokens": 64,
        "fair_shares": {"a": 2.0},
        **options,
    }
    with make_llm("llama", backend, trace=path, **options) as llm:
        run(llm)
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_decision_comes_out_again(backend: str, tmp_path: Path) -> None:
    memory = 300 if backend == "virtual-per_layer" else 150
    path = logged(tmp_path / "log.jsonl", backend, kv_cache_memory_bytes=memory * TOKEN_BYTES)
    done = replay(path)
    assert done.divergence is None
    kinds = Counter(event["event"] for event in read(path))
    assert (done.requests, done.steps) == (10, kinds["step"])
    assert done.preemptions == kinds["preempt"]
    assert done.decisions == kinds["admit"] + kinds["preempt"] + kinds["step"]
    assert (kinds["header"], kinds["arrive"], kinds["abort"], kinds["finish"]) == (1, 10, 1, 9)


def test_the_log_tells_each_request_whole(tmp_path: Path) -> None:
    events = read(logged(tmp_path / "log.jsonl"))
    assert any(e["event"] == "preempt" for e in events), "memory is short enough here"
    for i, length in enumerate(LENGTHS):
        mine = [e for e in events if e.get("id") == f"r{i}"]
        assert (mine[0]["event"], len(mine[0]["prompt"]), mine[0]["tenant"]) == (
            "arrive",
            length,
            "ab"[i % 2],
        )
        assert mine[-1]["event"] == ("abort" if i == 4 else "finish")
        scheduled = sum(n for e in events if e["event"] == "step" for r, n in e["tokens"] if r == f"r{i}")
        sampled = sum(r == f"r{i}" for e in events if e["event"] == "tokens" for r, _ in e["tokens"])
        if i != 4:  # all but the last token computed once, more after preemptions
            lost = any(e["event"] == "preempt" for e in mine)
            assert scheduled > length + sampled - 1 if lost else scheduled == length + sampled - 1
    assert [e["t"] for e in events[1:]] == sorted(e["t"] for e in events[1:])
    assert [e["step"] for e in events[1:]] == sorted(e["step"] for e in events[1:])


@pytest.mark.parametrize("kind", ["step", "admit", "preempt"])
def test_a_log_that_was_changed_differs_where_it_was_changed(kind: str, tmp_path: Path) -> None:
    events = read(logged(tmp_path / "log.jsonl"))
    at = max(i for i, event in enumerate(events) if event["event"] == kind and event.get("tokens") != [])
    if kind == "step":
        events[at]["tokens"][0][1] += 1
    else:
        events[at]["id"] = "r99"
    done = replay(write(tmp_path / "other.jsonl", events))
    assert done.divergence is not None
    assert f"step {events[at]['step']}:" in done.divergence
    assert f"'{kind}'" in done.divergence


def test_other_limits_give_other_decisions(tmp_path: Path) -> None:
    events = read(logged(tmp_path / "log.jsonl"))
    events[0]["scheduler"]["max_num_batched_tokens"] = 32
    assert replay(write(tmp_path / "other.jsonl", events)).divergence is not None


def test_a_step_whose_forward_pass_failed_is_replayed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm("llama", "paged-16", trace=path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        run_model = llm.runner.run
        calls = 0

        def flaky(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 3, 9):
                raise RuntimeError("no luck")
            return run_model(*args)

        monkeypatch.setattr(llm.runner, "run", flaky)
        for i, prompt in enumerate(random_prompts(2, [20, 30, 5], VOCAB)):
            stepped(llm).add_request(f"r{i}", prompt, SamplingParams(max_tokens=6, ignore_eos=True))
        while llm.engine.has_work:
            try:
                stepped(llm).step()
            except RuntimeError as error:
                assert "no luck" in str(error)
    assert sum(event["event"] == "step_failed" for event in read(path)) == 3
    assert replay(path).divergence is None


@pytest.mark.parametrize("backend", ["paged-16", "paged-overlap"])
def test_branches_that_end_before_their_prompt_is_computed_are_replayed(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm("llama", backend, trace=path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        engine = stepped(llm)
        params = SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True)
        for name in ("a", "b"):
            engine.add_request(name, random_prompts(3, [30], VOCAB)[0], params)
        engine.step()
        assert llm.engine.abort("a")
        engine.run()
    ends = Counter(e["event"] for e in read(path))
    assert (ends["abort"], ends["finish"], ends["fork"]) == (3, 3, 2)
    assert replay(path).divergence is None


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-overlap", "static-interleaved"])
def test_a_smaller_cache_and_sleep_are_replayed(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    options = {"max_model_len": 120, "max_num_seqs": 6, "kv_cache_memory_bytes": 900 * TOKEN_BYTES}
    with make_llm("llama", backend, trace=path, **options) as llm:
        engine = stepped(llm)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for i, prompt in enumerate(random_prompts(4, [60, 50, 40, 30], VOCAB)):
            engine.add_request(f"r{i}", prompt, params)
        for change in (
            lambda: llm.engine.resize_kv(200 * TOKEN_BYTES),
            llm.engine.sleep,
            lambda: llm.engine.resize_kv(700 * TOKEN_BYTES),
            llm.engine.wake_up,
        ):
            engine.step()
            engine.step()
            change()
        engine.run()
    kinds = Counter(event["event"] for event in read(path))
    assert (kinds["resize"], kinds["reset"]) == (3, 1) and kinds["preempt"] > 0
    done = replay(path)
    assert done.divergence is None and done.preemptions == kinds["preempt"]


def test_a_driver_that_refused_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm("llama", "virtual-interleaved", trace=path) as llm:
        grow, calls = llm.engine.kv.grow, 0

        def refused_once(request_id: str, tokens: int) -> bool:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("none left")
            return grow(request_id, tokens)

        monkeypatch.setattr(llm.engine.kv, "grow", refused_once)
        stepped(llm).add_request("r", [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        stepped(llm).run()
    assert sum(event["event"] == "fail" for event in read(path)) == 1
    with pytest.raises(ConfigError, match=r"refused memory to 'r'.*none left"):
        replay(path)


def test_refusals_and_timeouts_are_logged(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm("llama", "paged-16", trace=path, max_num_seqs=1, max_waiting=1) as llm:
        with pytest.raises(QueueFull):
            llm.generate([[1, 2, 3]] * 3, use_tqdm=False)
        llm.generate([[1, 2, 3]] * 2, timeout_s=1e-9, use_tqdm=False)
    events = read(path)
    assert [e["event"] for e in events if e["event"] != "step"] == [
        "header",
        "begin",
        "refuse",
        "arrive",
        "arrive",
        "timeout",
        "timeout",
    ]
    assert (events[2]["waiting"], events[2]["max_waiting"]) == (2, 1)
    assert replay(path).divergence is None


def test_lines_are_in_the_file_when_a_request_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with make_llm("llama", "paged-16", trace=path) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert read(path)[-1]["event"] == "finish"


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    with (
        pytest.warns(RuntimeWarning, match="ends early"),
        make_llm("llama", "paged-16", trace="/dev/full") as llm,
    ):
        [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header"),
        ('{"event": "step"}\n', "header"),
        ("not json\n", "line 1 is not JSON"),
        ('{"event":"header","format":"vattn-trace-2","scheduler":{},"kv":{}}\n', "KV cache"),
        (b"\xff\xfe", "can't be read"),
    ],
)
def test_what_is_no_log_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        replay(path)


def test_events_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    events = read(logged(tmp_path / "log.jsonl"))
    events.insert(3, {"event": "teleport", "step": 0, "t": 0})
    with pytest.raises(ConfigError, match="newer version"):
        replay(write(tmp_path / "other.jsonl", events))
    unknown = [*events[:1], {"event": "finish", "step": 0, "t": 0, "id": "r77"}]
    with pytest.raises(ConfigError, match="line 2: there is no 'r77'"):
        replay(write(tmp_path / "other.jsonl", unknown))


def test_a_log_in_no_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        LLM("no such model", trace=tmp_path / "nowhere" / "log.jsonl")
    with pytest.raises(ConfigError, match="can't be written"):
        make_llm("llama", "paged-16", trace=tmp_path)


def test_the_command_says_what_came_out(tmp_path: Path) -> None:
    path = logged(tmp_path / "log.jsonl")
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 0 and "decisions came out the same" in result.output
    events = read(path)
    events[0]["scheduler"]["max_num_seqs"] = 2
    result = CliRunner().invoke(app, ["replay", str(write(tmp_path / "other.jsonl", events))])
    assert result.exit_code == 1 and "then they differ: line" in result.output
