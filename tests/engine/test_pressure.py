"""Under pressure: preemption by swap or by choice, memory that shrinks and grows, sleep; equal tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from vattn import LLM, SamplingParams
from vattn.errors import ConfigError
from vattn.outputs import RequestOutput

NAME = "llama"
backends = pytest.mark.parametrize("backend", BACKENDS)
LENGTHS = [40, 12, 33, 25, 7, 48]
MAX_LEN = 96


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def prompts() -> list[list[int]]:
    return random_prompts(21, LENGTHS, loaded(NAME).spec.vocab_size)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return hf_greedy(reference_model(NAME), prompts(), [40] * len(LENGTHS))


def tight(backend: str, tokens: int) -> int:
    """A budget for about `tokens` tokens, and for one request of MAX_LEN in any case."""
    shape = kv_shape(NAME)
    if backend != "virtual-per_layer":
        return tokens * shape.token_bytes
    sets = 2 * shape.num_layers
    page_tokens = 4096 * sets // shape.token_bytes
    return max(-(-tokens // page_tokens), -(-MAX_LEN // page_tokens)) * 4096 * sets


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    for _ in range(5000):
        if not llm.engine.has_work:
            return done
        for output in stepped(llm).step():
            if output.finished:
                done[output.request_id] = output
        llm.check()
    raise AssertionError("it does not end")


def add_all(llm: LLM, n: int = 40) -> None:
    for i, prompt in enumerate(prompts()):
        stepped(llm).add_request(str(i), prompt, greedy(n))


@backends
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_all_finish_with_a_fraction_of_the_memory_they_need(
    backend: str, mode: str, expected: list[list[int]]
) -> None:
    need = sum(LENGTHS) + 40 * len(LENGTHS)
    with make_llm(
        NAME,
        backend,
        kv_cache_memory_bytes=tight(backend, max(need // 4, MAX_LEN)),
        max_model_len=MAX_LEN,
        preemption=mode,
        enable_prefix_caching=None if backend.startswith("static") else False,
    ) as llm:
        add_all(llm)
        done = finish(llm)
        assert [done[str(i)].outputs[0].token_ids for i in range(len(LENGTHS))] == expected
        m, stats = llm.metrics(), llm.metrics().kv_stats
        contended = not backend.startswith("static")  # a static slot is reserved whole: nobody runs short
        assert (m.preemptions > 0) == contended
        assert m.computed_tokens == need - len(LENGTHS) + m.recomputed_tokens
        if mode == "swap":
            assert m.swapped_requests == m.preemptions and m.recomputed_tokens <= m.preemptions
            assert (stats.swap_out_bytes >= stats.swap_in_bytes > 0) == contended
        elif mode == "recompute":
            assert m.swapped_requests == 0 and stats.swap_out_bytes == 0
            assert (m.recomputed_tokens > 0) == contended
        else:
            assert (m.swapped_requests > 0 or m.recomputed_tokens > 0) == contended
        assert llm.engine.kv.swap is None or llm.engine.kv.swap.used_bytes == 0
        records = llm.engine.scheduler.preemption.records
        assert len(records) == m.preemptions
        for record in records:
            assert record.tokens >= record.shared >= 0 and record.actual_s is not None


def test_auto_takes_what_is_predicted_to_be_cheaper() -> None:
    for faster, how in ((1e-12, "recompute"), (1e3, "swap")):
        with make_llm(
            NAME, "paged-16", kv_cache_memory_bytes=tight("", 128), max_model_len=MAX_LEN, preemption="auto"
        ) as llm:
            speed = llm.engine.scheduler.preemption.speed
            speed._prompt_s = faster  # seconds of a prompt token
            speed.observe = lambda *_: None  # type: ignore[method-assign]
            add_all(llm)
            finish(llm)
            records = llm.engine.scheduler.preemption.records
            assert records and {r.how for r in records} == {how}
            for r in records:
                assert r.predicted_recompute_s == pytest.approx((r.tokens - r.shared) * faster)
                assert (r.predicted_swap_s or 0) > 0


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-7", "static-interleaved"])
def test_quantised_memory_is_swapped_with_its_scales(backend: str) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "max_model_len": MAX_LEN, "preemption": "swap"}
    found = []
    for share in (1, 4):
        with make_llm(NAME, backend, **options) as llm:
            need = (sum(LENGTHS) + 40 * len(LENGTHS)) * llm.kv_shape.token_bytes
            llm.resize_kv_cache(
                2 * need if share == 1 else max(need // share, MAX_LEN * llm.kv_shape.token_bytes)
            )
            add_all(llm)
            found.append({name: output.outputs[0].token_ids for name, output in finish(llm).items()})
            m = llm.metrics()
            assert (m.swapped_requests > 0) == (share > 1 and m.preemptions > 0)
    assert found[0] == found[1]


def test_little_swap_space_takes_what_fits() -> None:
    space = 60 * kv_shape(NAME).token_bytes
    with make_llm(
        NAME,
        "virtual-interleaved",
        kv_cache_memory_bytes=tight("", 128),
        max_model_len=MAX_LEN,
        preemption="swap",
        swap_space_bytes=space,
        enable_prefix_caching=False,
    ) as llm:
        add_all(llm)
        finish(llm)
        m = llm.metrics()
        assert 0 < m.swapped_requests < m.preemptions and m.recomputed_tokens > 0


@backends
def test_the_cache_shrinks_and_grows_while_requests_run(backend: str, expected: list[list[int]]) -> None:
    big, small = tight(backend, 600), tight(backend, 120)
    options: dict[str, Any] = {"kv_cache_memory_bytes": big, "max_model_len": MAX_LEN, "preemption": "swap"}
    with make_llm(NAME, backend, **options) as llm:
        add_all(llm)
        done: dict[str, RequestOutput] = {}
        for step in range(60):
            if step % 12 == 6:
                llm.resize_kv_cache(small)
                llm.check()
                assert llm.memory_usage().held <= small
            elif step % 12 == 0 and step:
                llm.resize_kv_cache(big)
            done |= {output.request_id: output for output in stepped(llm).step() if output.finished}
            llm.check()
        done |= finish(llm)
        assert [done[str(i)].outputs[0].token_ids for i in range(len(LENGTHS))] == expected
        assert llm.metrics().preemptions > 0
        with pytest.raises(ConfigError, match="max_model_len"):
            llm.resize_kv_cache(tight("", 20))
        with pytest.raises(ConfigError, match="free"):
            llm.resize_kv_cache(1 << 50)
        assert llm.memory_usage().held <= big


@pytest.mark.parametrize(
    "backend", ["virtual-interleaved", "virtual-overlap", "paged-16", "static-per_layer"]
)
def test_sleep_gives_all_memory_back(backend: str, expected: list[list[int]]) -> None:
    with make_llm(NAME, backend, max_model_len=MAX_LEN, kv_cache_memory_bytes=tight(backend, 600)) as llm:
        add_all(llm)
        for _ in range(5):
            stepped(llm).step()
        llm.sleep()
        llm.sleep()
        llm.check()
        assert llm.memory_usage().physical == 0
        assert llm.engine.has_work and stepped(llm).step() == []
        stepped(llm).add_request("late", prompts()[0], greedy(3))  # it waits
        assert stepped(llm).step() == []
        llm.wake_up()
        done = finish(llm)
        assert done["late"].outputs[0].token_ids == expected[0][:3]
        assert [done[str(i)].outputs[0].token_ids for i in range(len(LENGTHS))] == expected


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens between steps."""
    kinds = ["step", "step", "step", "add", "add", "abort", "resize", "sleep"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 30)), min_size=3, max_size=25))


POOL = 12


@pytest.fixture(scope="module")
def pool() -> list[tuple[list[int], list[int]]]:
    """(prompt, its greedy continuation): some begin alike."""
    vocab = loaded(NAME).spec.vocab_size
    base = random_prompts(31, [20, 33], vocab)
    texts = [base[i % 2][: 4 + 3 * i] + random_prompts(i, [1 + 2 * i], vocab)[0] for i in range(POOL)]
    return list(zip(texts, hf_greedy(reference_model(NAME), texts, [12] * POOL), strict=True))


ENGINES: dict[str, dict[str, Any]] = {
    "virtual-interleaved": {"preemption": "swap"},
    "virtual-per_layer": {"preemption": "auto"},
    "virtual-overlap": {"preemption": "auto", "scheduling_policy": "priority"},
    "paged-16": {"preemption": "swap"},
    "paged-overlap": {"preemption": "recompute"},
    "paged-7": {"preemption": "auto", "scheduling_policy": "priority"},
    "static-interleaved": {"preemption": "swap"},
    "static-per_layer": {"preemption": "recompute"},
}
EXAMPLES = 80


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_schedule_gives_the_tokens_of_an_uncontended_run(
    backend: str, pool: list[tuple[list[int], list[int]]]
) -> None:
    small, big = tight(backend, 90), tight(backend, 220)
    with make_llm(
        NAME,
        backend,
        kv_cache_memory_bytes=small,
        max_model_len=72,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        swap_space_bytes=120 * kv_shape(NAME).token_bytes,
        **ENGINES[backend],
    ) as llm:
        count = 0

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(events=schedules())
        def run(events: list[tuple[str, int]]) -> None:
            nonlocal count
            asked: dict[str, tuple[int, int]] = {}
            aborted: set[str] = set()
            done: dict[str, RequestOutput] = {}
            for kind, number in events:
                if kind == "add":
                    which, n = number % POOL, 1 + number % 12
                    request_id = f"r{count}"
                    count += 1
                    stepped(llm).add_request(request_id, pool[which][0], greedy(n), service=service(number))
                    asked[request_id] = (which, n)
                elif kind == "abort" and asked:
                    request_id = sorted(asked)[number % len(asked)]
                    if llm.engine.abort(request_id):
                        aborted.add(request_id)
                elif kind == "resize":
                    llm.resize_kv_cache(small if number % 2 else big)
                elif kind == "sleep":
                    llm.sleep()
                    llm.wake_up()
                else:
                    for output in stepped(llm).step():
                        done[output.request_id] = output
                llm.check()
            done.update(finish(llm))
            for request_id, (which, n) in asked.items():
                if request_id not in aborted:
                    assert done[request_id].outputs[0].token_ids == pool[which][1][:n]
            usage = llm.memory_usage()
            assert usage.in_use == usage.logical == 0
            assert llm.engine.kv.swap is None or llm.engine.kv.swap.used_bytes == 0

        run()


def service(number: int) -> Any:
    from vattn.engine.service import Service

    return Service(priority=number % 3, tenant="ab"[number % 2])
