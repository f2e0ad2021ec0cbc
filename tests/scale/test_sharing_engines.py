"""Real engines that share a total through the file, and what they tell about themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import kv_shape, make_llm, random_prompts, stepped
from tests.models.tiny import VOCAB
from vattn import LLM, SamplingParams
from vattn.scale.coordinator import Coordinator
from vattn.scale.ledger import CoordinatorError
from vattn.scale.member import smallest_budget

MAX_LEN = 128
MIB = 1 << 20


def engine(backend: str, path: Path, **options: Any) -> LLM:
    options = {"max_model_len": MAX_LEN, "kv_cache_memory_bytes": 4 * MIB, **options}
    return make_llm("llama", backend, coordinator=path, **options)


def generate(llm: LLM, outputs: int = 12, count: int = 5) -> list[list[int]]:
    prompts = random_prompts(7, [30] * count, VOCAB)
    params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def wake(llm: LLM) -> None:
    """Let it beat at its next step, not only half a second later."""
    llm.stack.member._due = 0.0


def budgets(path: Path) -> list[int]:
    return [entry.budget for entry in Coordinator(path).read().engines]


@pytest.mark.parametrize(
    "backend", ["virtual-interleaved", "virtual-overlap", "paged-16", "static-interleaved"]
)
def test_two_engines_share_a_total_and_produce_the_same_tokens(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "engines.json"
    with make_llm("llama", backend, max_model_len=MAX_LEN) as alone:
        want = generate(alone)
    total = 8 * MAX_LEN * kv_shape("llama").token_bytes
    Coordinator(path).set_total("cpu", total)
    with engine(backend, path) as first, engine(backend, path) as second:
        floor = Coordinator(path).read().engines[0].floor
        assert budgets(path) == [total, floor]
        for llm in (first, second, first, second):
            wake(llm)
            assert generate(llm) == want
            llm.check()
            assert llm.memory_usage().physical <= llm.stack.member.entry.budget
        share = total // 2
        assert budgets(path) == [share, share]
        unit = first.engine.kv.page_map().unit_bytes
        assert share - unit < first.engine.kv.budget_bytes <= share
        first.close()
        wake(second)
        generate(second, outputs=2)
        assert budgets(path) == [min(4 * MIB, total)]
    assert budgets(path) == []


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-7", "static-per_layer"])
def test_a_limit_is_obeyed_while_requests_run(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "engines.json"
    with engine(backend, path, max_num_seqs=6) as llm:
        [entry] = Coordinator(path).read().engines
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(random_prompts(7, [30] * 6, VOCAB)):
            stepped(llm).add_request(f"r{i}", prompt, params)
        for _ in range(3):
            stepped(llm).step()
        Coordinator(path).limit(entry.name, entry.floor)
        wake(llm)
        stepped(llm).step()
        assert llm.memory_usage().physical <= entry.floor
        assert budgets(path) == [entry.floor]
        llm.check()
        Coordinator(path).limit(entry.name, None)
        wake(llm)
        while llm.engine.has_work:
            stepped(llm).step()
        assert budgets(path) == [entry.asked]
        assert llm.metrics().finished_requests == 6


def test_the_floor_holds_the_longest_request_and_not_a_byte_less(tmp_path: Path) -> None:
    for backend in ("virtual-interleaved", "virtual-per_layer", "paged-7", "static-interleaved"):
        with make_llm("llama", backend, max_model_len=MAX_LEN) as llm:
            floor = smallest_budget(llm.engine.kv, MAX_LEN)
            assert llm.engine.kv.tokens_in(floor) >= MAX_LEN > llm.engine.kv.tokens_in(floor - 1)
            llm.resize_kv_cache(floor)
            [output] = llm.generate(
                [[5] * 100], SamplingParams(max_tokens=28, ignore_eos=True), use_tqdm=False
            )
            assert output.outputs[0].finish_reason == "length"


def test_what_an_engine_tells_is_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    with engine("virtual-interleaved", path, engine_name="demo") as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        stepped(llm).add_request("r", [7] * 40, params)
        stepped(llm).step()
        wake(llm)
        usage = llm.memory_usage()
        stepped(llm).step()
        [entry] = Coordinator(path).read().engines
        assert (entry.name, entry.device, entry.in_use) == ("demo", "cpu", usage.in_use)
        assert entry.status["memory"]["in_use"] == usage.in_use
        assert (entry.status["running"], entry.status["waiting"]) == (1, 0)
        assert llm.engine.abort("r")
        stepped(llm).taken()
        generate(llm, outputs=3, count=1)
        [entry] = Coordinator(path).read().engines
        assert entry.status["running"] == 0, "an engine that rests says so"


def test_an_engine_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    Coordinator(path).set_total("cpu", 1)
    with pytest.raises(CoordinatorError, match="the total is 1 "):
        engine("paged-16", path)
    assert json.loads(path.read_text())["engines"] == []


def test_without_a_coordinator_nothing_is_written_and_nothing_is_called(tmp_path: Path) -> None:
    with make_llm("llama", "paged-16", max_model_len=MAX_LEN) as llm:
        generate(llm, outputs=2, count=1)
        assert llm.engine.listeners == [llm.engine.watch]
