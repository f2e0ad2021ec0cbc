"""What requests share in a cache, case by case: where a plain copy of their own would differ, it fails."""

from __future__ import annotations

import pytest
import torch

from tests.kv.caches import GRANULARITY, MAX_TOKENS, SHAPE, make_cache
from tests.kv.test_machine import read_back
from tests.kv.test_sharing_machine import text_kv
from vattn.kv.base import Chunk, KVCache
from vattn.kv.books.operations import Grant
from vattn.kv.memory.swap import SwapSpace
from vattn.vmm.driver import OutOfMemory

SHARING = ["virtual-interleaved", "virtual-per_layer", "paged-16"]
sharing = pytest.mark.parametrize("backend", SHARING)


def compute(kv: KVCache, request_id: str, text: list[int], start: int, end: int | None = None) -> None:
    end = len(text) if end is None else end
    inputs = kv.begin_step([Chunk(request_id, start, end - start)])
    inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = text_kv(text, start, end)
    kv.computed(request_id, text, end)


def run(kv: KVCache, request_id: str, text: list[int], salt: str | None = "") -> int:
    """Admit a request and compute what is missing; how much was there."""
    cached = kv.attach(request_id, text, salt=salt)
    assert cached is not None
    compute(kv, request_id, text, cached)
    assert torch.equal(read_back(kv, request_id, len(text)), text_kv(text, 0, len(text)))
    kv.check()
    return cached


# ---------------------------------------------------------------------------- forged collisions
@pytest.mark.parametrize("hasher", [lambda data: b"", lambda data: bytes([sum(data) % 2])])
@sharing
def test_a_forged_collision_costs_hits_and_nothing_else(backend: str, hasher: object) -> None:
    """Running, finished, adopted, continued: the text of another is never found."""
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    assert kv.books.prefix is not None
    kv.books.prefix._hash = hasher  # type: ignore[assignment]
    texts = [[v] * 40 for v in (2, 4, 6)] + [[2] * 16 + [v] * 40 for v in (3, 4)]
    for salt in ("", "a", ""):
        for i, text in enumerate(texts):
            cached = run(kv, f"{salt}{i}", text, salt)
            assert cached <= 16 or text[:cached] == [2] * cached
            if i % 2:
                kv.free(f"{salt}{i}")
        for i in range(0, len(texts), 2):
            kv.free(f"{salt}{i}")
    kv.close()


# ---------------------------------------------------------------------------- reset
@sharing
@pytest.mark.parametrize("swapped", ["not swapped", "before", "after"])
def test_what_was_computed_before_a_reset_is_never_found_again(backend: str, swapped: str) -> None:
    """Although the request that computed it lives on and grows: the weights may have changed."""
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    kv.swap = SwapSpace(4 * MAX_TOKENS * SHAPE.token_bytes, torch.device("cpu"))
    text = [1] * 40
    run(kv, "a", text)
    assert kv.fork("a", "child", 33)
    if swapped == "before":
        assert kv.swap_out("a")
    kv.reset_prefix_cache()
    if swapped == "after":
        assert kv.swap_out("a")
    if swapped != "not swapped":
        assert kv.swap_in("a", text, salt="") == 39
    for request_id, grown in (("a", text), ("child", text[:33])):
        grown += [2] * 30
        assert kv.grow(request_id, len(grown))
        compute(kv, request_id, grown, 33)
    assert kv.fork("a", "late", 64)
    kv.computed("late", text, 64)
    for request_id in ("a", "child", "late"):
        kv.free(request_id)
    kv.check()
    assert kv.usage().cached == 0
    assert run(kv, "b", [1] * 40) == 0
    assert run(kv, "c", [1] * 40) > 0, "what is computed afterwards is found"
    kv.close()


@sharing
def test_nobody_waits_for_what_a_reset_forgot(backend: str) -> None:
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    assert kv.attach("a", [1] * 64, salt="") == 0
    assert kv.awaits([1] * 40, salt="")
    compute(kv, "a", [1] * 64, 0, 20)
    kv.reset_prefix_cache()
    assert not kv.awaits([1] * 40, salt=""), "its owner leaves nothing any more"
    kv.check()
    kv.close()


# ---------------------------------------------------------------------------- short of memory
def test_a_continuation_that_finds_no_memory_changes_nothing() -> None:
    """The entries hold other pages than the row: none of them goes in vain."""
    kv = make_cache("virtual-interleaved", 4 * MAX_TOKENS, fingerprint="model", unit=16)
    text = [1] * 33
    assert kv.attach("a", text, salt="") == kv.attach("b", text, salt="") == 0
    for request_id in ("a", "b"):  # both compute it; the entries hold the pages of a
        compute(kv, request_id, text, 0)
    assert kv.fork("b", "child", 33)  # so that the slot of b suits nobody but who goes on with its text
    kv.free("a")
    kv.free("b")
    for n in range(2):
        assert kv.attach(f"big{n}", range(96)) is not None
    assert kv.attach("small", [9]) == 0  # in the slot of a
    # 4 pages of b, 1 of child, 9 of each big, 1 of small, 3 of a: c would need 5 more than b has.
    assert kv.resize(27 * GRANULARITY)
    before = kv.usage()
    assert kv.attach("c", text + [1] * 60, salt="") is None
    assert set(kv.live()) == {"child", "big0", "big1", "small"} and kv.usage().in_use == before.in_use
    assert kv.stats().prefix_evictions == 0
    kv.check()
    kv.free("big0")
    run(kv, "c", text + [1] * 60)
    kv.close()


# ---------------------------------------------------------------------------- pages and units
@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer"])
@pytest.mark.parametrize("whole_page", [True, False])
def test_of_two_entries_on_one_page_the_later_ones_counts(backend: str, whole_page: bool) -> None:
    """
    text of a   | same | same | other      its page 0:  P  holds `other` at the end
    text of b   | same | same | new  |     its page 0:  Q  a copy of the tail, then `new`
    text of c   | same | same | new  | …   the first entries hold P, that of `new` holds Q: c needs Q
    """
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=5)
    on_page = GRANULARITY // kv.books.layout.token_bytes
    same = on_page // 5 * 5 - 5 * (not whole_page)
    more = 15 if whole_page else 5
    a, b = [1] * same + [3] * 5, [1] * same + [2] * more
    assert run(kv, "a", a) == 0
    assert run(kv, "b", b) == same
    assert run(kv, "c", [*b, 4]) == same + more
    kv.close()


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer"])
def test_a_finished_row_is_continued_as_far_as_its_text_goes(backend: str) -> None:
    """Behind the last whole unit token by token: what differs there is computed again."""
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    for n, (more, cached) in enumerate([([1] * 9, 40), ([1] * 5 + [2] * 9, 37), ([3] * 9, 32)]):
        kv.reset_prefix_cache()
        run(kv, f"a{n}", [1] * 40)
        kv.free(f"a{n}")
        assert run(kv, f"b{n}", [1] * 32 + more if n else [1] * 40 + more) == cached
        assert kv.stats().rows_continued == n + 1
        kv.free(f"b{n}")
    kv.close()


@sharing
def test_a_prompt_that_is_cached_whole_computes_its_last_token(backend: str) -> None:
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    run(kv, "a", [1] * 32)
    assert run(kv, "b", [1] * 32) == (16 if backend == "paged-16" else 31)
    assert run(kv, "short", [1]) == 0, "shorter than a page, a block, a unit"
    kv.close()


# ---------------------------------------------------------------------------- short of memory
def test_a_tail_is_kept_until_it_is_copied() -> None:
    """Where there is no room for the page it is on, the request computes all by itself."""
    kv = make_cache("virtual-interleaved", MAX_TOKENS, fingerprint="model", unit=5)
    text = [2] * 10 + [4] * (MAX_TOKENS - 10)
    run(kv, "a", [2] * 16)
    kv.free("a")
    run(kv, "other", [6] * 5, None)
    assert run(kv, "b", text) == 0
    assert torch.equal(read_back(kv, "other", 5), text_kv([6] * 5, 0, 5))
    kv.close()


# ---------------------------------------------------------------------------- short of mappings
@pytest.mark.parametrize("backend", SHARING[:2])
def test_a_system_short_of_mappings_shares_less(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vm.max_map_count` ends before memory does: who can't be given an alias gets pages of its own."""
    kv = make_cache(backend, 4 * MAX_TOKENS, fingerprint="model", unit=16)
    text = [2] * 90
    run(kv, "a", text)
    refused = []

    def refuse(operation: Grant) -> None:
        refused.append(operation)
        raise OutOfMemory("map")

    monkeypatch.setattr(kv.memory, "grant", refuse)
    assert run(kv, "b", text) == 0 and refused
    assert not kv.fork("a", "c", 80) and "c" not in set(kv.live())
    kv.check()
    monkeypatch.undo()
    assert run(kv, "d", text) > 0
    kv.close()
