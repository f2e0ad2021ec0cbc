"""Page maps of caches whose every page is known, and of engines while they run."""

from __future__ import annotations

import json

import pytest

from tests.engine.engines import BACKENDS as ENGINES
from tests.engine.engines import kv_shape, make_llm, random_prompts, stepped
from tests.kv.caches import BACKENDS, GRANULARITY, MAX_TOKENS, SHAPE, make_cache
from tests.models.tiny import VOCAB
from vattn import SamplingParams
from vattn.kv.base import Chunk, KVCache
from vattn.kv.page_map import PageState

TEXT = list(range(MAX_TOKENS))


def attach(cache: KVCache, request_id: str, text: list[int]) -> None:
    """Admit a request and compute all of its text."""
    cached = cache.attach(request_id, text, salt="")
    assert cached is not None
    cache.begin_step([Chunk(request_id, cached, len(text) - cached)])
    cache.computed(request_id, text, len(text))


def states(cache: KVCache) -> dict[str, int]:
    """Units in each state that has any."""
    page_map = cache.page_map()
    page_map.check()
    assert page_map.usage == cache.usage()
    json.dumps(page_map.to_dict())
    total = page_map.bytes_by_state()
    return {str(state): n // page_map.unit_bytes for state, n in total.items() if n}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_cache(backend: str) -> None:
    cache = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model")
    assert states(cache).keys() <= {"free"}
    assert cache.page_map().rows == ()
    cache.close()
    cache.page_map().check()


def test_rows_of_virtual_name_their_pages_and_owners() -> None:
    cache = make_cache("virtual-interleaved", 4 * MAX_TOKENS, fingerprint="model")
    page = GRANULARITY // SHAPE.token_bytes
    assert SHAPE.token_bytes == 384 and page == 10  # and two thirds
    attach(cache, "a", TEXT[:50])  # 19,200 bytes: five pages, of which four are full
    assert states(cache) == {"private": 5}
    attach(cache, "b", [*TEXT[:48], 1, 2])  # 48 tokens cached: four full pages shared, a tail of its own
    assert states(cache) == {"shared": 4, "private": 2}
    page_map = cache.page_map()
    a, b = page_map.rows
    assert (a.owner, a.tokens, b.owner, b.tokens) == ("a", 50, "b", 50)
    assert a.units[:4] == b.units[:4] and a.units[4] != b.units[4]
    assert page_map.owners()[a.units[0]] == ["a", "b"]
    assert page_map.owners()[b.units[4]] == ["b"]
    assert page_map.unit_tokens == pytest.approx(10 + 2 / 3)

    cache.free("a")  # its row is parked; the prefix cache holds all whole units of 16 tokens: five pages
    assert states(cache) == {"private": 5, "cached": 1}
    assert [row.owner for row in cache.page_map().rows] == ["b", None]
    cache.free("b")
    assert states(cache) == {"cached": 5, "parked": 1}
    cache.reset_prefix_cache()
    assert states(cache) == {"parked": 6}


def test_pages_ahead_of_need_and_surplus_of_an_adopted_row() -> None:
    cache = make_cache("virtual-interleaved", 4 * MAX_TOKENS)
    attach(cache, "a", TEXT[:50])
    cache.free("a")
    attach(cache, "b", TEXT[:12])  # takes the row over: two pages needed, three more come with it
    assert states(cache) == {"private": 2, "ahead": 3}
    cache.free("b")
    assert states(cache) == {"parked": 5}


def test_the_block_pool_of_paged() -> None:
    cache = make_cache("paged-16", 4 * MAX_TOKENS, fingerprint="model")
    blocks = 4 * MAX_TOKENS // 16
    attach(cache, "a", TEXT[:40])
    assert cache.fork("a", "b", 40)
    assert states(cache) == {"shared": 2, "private": 2, "free": blocks - 4}
    page_map = cache.page_map()
    assert sorted(page_map.states) == list(range(blocks))
    assert page_map.in_prefix_cache == set(page_map.rows[0].units[:2])
    cache.free("a")
    cache.free("b")
    assert states(cache) == {"cached": 2, "free": blocks - 2}


def test_rows_of_static() -> None:
    cache = make_cache("static-interleaved", 3 * MAX_TOKENS)
    attach(cache, "a", TEXT[:40])
    assert states(cache) == {"private": 1, "free": 2}
    [row] = cache.page_map().rows
    assert (row.owner, row.tokens, cache.page_map().unit_tokens) == ("a", 40, MAX_TOKENS)


def test_the_check_finds_a_wrong_map() -> None:
    cache = make_cache("paged-16", 4 * MAX_TOKENS)
    attach(cache, "a", TEXT[:40])
    page_map = cache.page_map()
    unit = page_map.rows[0].units[0]
    for wrong in (PageState.SHARED, PageState.FREE, PageState.CACHED):
        changed = {**page_map.states, unit: wrong}
        with pytest.raises(AssertionError):
            type(page_map)(**{**vars(page_map), "states": changed}).check()


@pytest.mark.parametrize("backend", ENGINES)
def test_maps_add_up_at_every_step_of_an_engine_under_pressure(backend: str) -> None:
    """Shared beginnings, parallel samples, swap, a shrinking and growing cache."""
    token_bytes = kv_shape("llama").token_bytes
    topic, *rest = random_prompts(6, [40, 5, 20, 9, 30, 14], VOCAB)
    budget = 400 * token_bytes * (3 if backend.startswith("virtual") else 1)
    with make_llm(
        "llama", backend, kv_cache_memory_bytes=budget, max_model_len=128, max_num_seqs=6,
        max_num_batched_tokens=64, preemption="swap", swap_space_bytes=100 * token_bytes,
    ) as llm:  # fmt: skip
        for i, own in enumerate(rest):
            params = SamplingParams(n=1 + i % 2, max_tokens=12 + i, temperature=1.0, ignore_eos=True, seed=i)
            stepped(llm).add_request(f"r{i}", topic + own if i % 3 else own, params)
        seen: set[PageState] = set()
        for step in range(1000):
            if not llm.engine.has_work:
                break
            stepped(llm).step()
            if step in (6, 12):
                llm.resize_kv_cache(budget * (2 if step == 12 else 1) * 2 // 3)
            page_map = llm.engine.kv.page_map()
            page_map.check()
            if "overlap" not in backend:
                assert page_map.usage == llm.memory_usage()
            seen.update(s for s, n in page_map.bytes_by_state().items() if n)
        assert not llm.engine.has_work
        llm.check()
    assert PageState.PRIVATE in seen
    if not backend.startswith("static"):
        assert {PageState.SHARED, PageState.CACHED} <= seen
