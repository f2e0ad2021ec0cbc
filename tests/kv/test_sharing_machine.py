"""Any interleaving of admit, hit, chunked compute, fork, grow, free, eviction, swap and resize, on every
backend.

K and V of a token are a function of the text up to it and of the salt, as of a model and its adapter; so
every request, however its memory came about, must hold exactly what a plain copy of its own would.
`mutants` are caches that this notices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
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

from tests.kv.caches import BACKENDS, GRANULARITY, MAX_TOKENS, SHAPE, make_cache
from tests.kv.test_machine import read_back
from vattn.kv.base import Chunk
from vattn.kv.memory.swap import SwapSpace

TEXTS = [
    [1] * MAX_TOKENS,
    [1] * 16 + [2] * (MAX_TOKENS - 16),
    [1] * 31 + [3] * (MAX_TOKENS - 31),
    [4, 5] * (MAX_TOKENS // 2),
]
"""Texts with common beginnings; requests take pieces of them."""


@lru_cache(maxsize=100_000)
def token_kv(text: tuple[int, ...], salt: str = "") -> torch.Tensor:
    """`[layers, 2, heads, dim]` of the last token of a text."""
    generator = torch.Generator().manual_seed(hash((text, len(salt))) % 2**31)
    return torch.randn(SHAPE.num_layers, 2, SHAPE.num_kv_heads, SHAPE.head_dim, generator=generator)


@lru_cache(maxsize=20_000)
def _text_kv(text: tuple[int, ...], start: int, salt: str) -> torch.Tensor:
    return torch.stack([token_kv(text[: i + 1], salt) for i in range(start, len(text))], 2)


def text_kv(text: list[int], start: int, end: int, salt: str | None = "") -> torch.Tensor:
    """`[layers, 2, end - start, heads, dim]`."""
    return _text_kv(tuple(text[:end]), start, salt or "")


class SharingMachine(RuleBasedStateMachine):
    backend: str
    unit: int

    @initialize(budget_tokens=st.integers(MAX_TOKENS, 4 * MAX_TOKENS))
    def open(self, budget_tokens: int) -> None:
        self.cache = make_cache(self.backend, budget_tokens, fingerprint="model", unit=self.unit)
        self.texts: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.cache.swap = SwapSpace(3 * MAX_TOKENS * SHAPE.token_bytes // 2, torch.device("cpu"))
        self.swapped: dict[str, tuple[list[int], int, str | None]] = {}
        self.salts: dict[str, str | None] = {}
        self.waiting: dict[str, tuple[list[int], str | None]] = {}
        """Requests that have asked for room and wait."""
        self.said = [list(text) for text in TEXTS]
        """Texts to go on with."""
        self.budget = self.cache.budget_bytes
        self.count = 0

    def compute(self, request_id: str, end: int) -> None:
        text, start = self.texts[request_id], self.written[request_id]
        inputs = self.cache.begin_step([Chunk(request_id, start, end - start)])
        inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = text_kv(text, start, end, self.salts[request_id])
        self.written[request_id] = end
        self.cache.computed(request_id, text, end)

    @rule(
        data=st.data(),
        near=st.sampled_from([*range(0, MAX_TOKENS, 16), *(GRANULARITY * n // 384 for n in range(1, 9))]),
        off=st.integers(-2, 2) | st.integers(-16, 16),
        extra=st.lists(st.sampled_from([1, 2, 6]), max_size=9),
        share=st.just(1.0) | st.floats(0, 1),
        salt=st.sampled_from(["", "", "", "", "", "other", None]),
    )
    def admit(
        self, data: st.DataObject, near: int, off: int, extra: list[int], share: float, salt: str | None
    ) -> None:
        """A text that begins as another one did, up to near a border, and ends otherwise."""
        request_id = f"r{self.count}"
        self.count += 1
        base = self.said[data.draw(st.integers(0, len(self.said) - 1))]
        mine = [*base[: min(max(near + off, 0), len(base))], *extra][:MAX_TOKENS] or [1]
        self.enter(request_id, mine, salt, share)

    @rule(data=st.data(), salt=st.sampled_from(["", "", "other"]))
    def wait(self, data: st.DataObject, salt: str) -> None:
        """A request asks for room, and asks again later: what was found for it may be gone by then."""
        if not self.waiting or data.draw(st.booleans()):
            base = self.said[data.draw(st.integers(0, len(self.said) - 1))]
            self.waiting[f"r{self.count}"] = [*base[: MAX_TOKENS - 3], 6, 6, 6], salt
            self.count += 1
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        text, salted = self.waiting[request_id]
        self.cache.can_admit(len(text), text, salt=salted, request_id=request_id)
        asked = self.cache.awaits(text, salt=salted, request_id=request_id)
        assert asked == self.cache.awaits(list(text), salt=salted), "who has asked before is told otherwise"

    @precondition(lambda self: getattr(self, "waiting", None))
    @rule(data=st.data())
    def admit_waiting(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        text, salt = self.waiting.pop(request_id)
        self.enter(request_id, text, salt, 1.0)
        self.cache.discard(request_id)

    def enter(self, request_id: str, mine: list[int], salt: str | None, share: float) -> None:
        tokens, before = len(mine), self.cache.usage()
        could = self.cache.can_admit(tokens, mine, salt=salt)
        cached = self.cache.attach(request_id, mine, salt=salt)
        if cached is None:
            assert not could, "can_admit promised room"
            assert self.cache.usage().in_use == before.in_use
            return
        assert 0 <= cached < tokens
        assert cached == 0 or salt is not None
        self.texts[request_id], self.written[request_id] = mine, cached
        self.salts[request_id] = salt
        self.said = [*self.said[-8:], mine]
        self.compute(request_id, max(cached + 1, int(tokens * share)))

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.texts)))

    @precondition(lambda self: getattr(self, "texts", None))
    @rule(data=st.data(), n=st.integers(1, MAX_TOKENS))
    def go_on(self, data: st.DataObject, n: int) -> None:
        """Compute more of the prompt, or generate."""
        request_id = self.pick(data)
        text, written = self.texts[request_id], self.written[request_id]
        if written == len(text):
            if not self.cache.grow(request_id, written + 1):
                return
            text.append(data.draw(st.sampled_from([1, 2, 6])))
        self.compute(request_id, min(len(text), written + n))

    @precondition(lambda self: getattr(self, "texts", None))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if not self.written[parent]:
            return
        tokens = data.draw(st.integers(1, self.written[parent]))
        child, before = f"r{self.count}", self.cache.usage()
        self.count += 1
        if not self.cache.fork(parent, child, tokens):
            assert self.cache.usage().in_use == before.in_use
            return
        self.texts[child], self.written[child] = self.texts[parent][:tokens], tokens
        self.salts[child] = self.salts[parent]

    @precondition(lambda self: getattr(self, "texts", None))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.cache.free(request_id)
        del self.texts[request_id], self.written[request_id]

    @precondition(lambda self: getattr(self, "texts", None))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        assert self.cache.swap is not None
        nbytes = self.written[request_id] * SHAPE.token_bytes
        room = nbytes and self.cache.swap.used_bytes + nbytes <= self.cache.swap.budget_bytes
        assert self.cache.swap_out(request_id) == bool(room)
        if room:
            text, written = self.texts.pop(request_id), self.written.pop(request_id)
            self.swapped[request_id] = (text, written, self.salts[request_id])

    @precondition(lambda self: getattr(self, "swapped", None))
    @rule(data=st.data(), drop=st.booleans())
    def swap_in(self, data: st.DataObject, drop: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.swapped)))
        text, written, salt = self.swapped[request_id]
        if drop:
            self.cache.discard(request_id)
        else:
            cached = self.cache.swap_in(request_id, text, salt=salt)
            if cached is None:
                assert self.cache.swapped(request_id)
                return
            assert cached >= min(written, len(text) - 1)
            self.texts[request_id], self.written[request_id] = text, self.cache.written(request_id)
        del self.swapped[request_id]
        assert not self.cache.swapped(request_id)

    @rule(percent=st.integers(20, 150))
    def resize(self, percent: int) -> None:
        budget, in_use = self.budget * percent // 100, self.cache.usage().in_use
        if not self.cache.resize(budget):
            assert in_use > 0.9 * budget - 20 * SHAPE.token_bytes * 16, "it would have fitted"
            assert self.cache.usage().in_use == in_use
        assert self.cache.usage().held <= self.cache.budget_bytes

    @rule()
    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        assert self.cache.usage().cached == 0

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        page_map = self.cache.page_map()
        page_map.check()
        assert page_map.usage == self.cache.usage() or "background" in self.backend
        assert set(self.cache.live()) == set(self.texts)
        assert self.cache.usage().logical == sum(map(len, self.texts.values())) * SHAPE.token_bytes

    @invariant()
    def contents_are_those_of_a_private_copy(self) -> None:
        for request_id, written in getattr(self, "written", {}).items():
            if written:
                want = text_kv(self.texts[request_id], 0, written, self.salts[request_id])
                assert torch.equal(read_back(self.cache, request_id, written), want), request_id

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for request_id in list(self.texts):
                self.cache.free(request_id)
            for request_id in self.swapped:
                self.cache.discard(request_id)
            assert self.cache.swap is not None and self.cache.swap.used_bytes == 0
            self.cache.check()
            assert self.cache.resize(0)
            assert self.cache.usage().physical == 0
            assert self.cache.resize(self.budget)
            self.cache.check()
            assert self.cache.usage().in_use == 0
            self.cache.close()
            assert self.cache.usage().physical == 0


CASES = [(backend, 5) for backend in BACKENDS if backend.startswith("virtual")]
CASES += [("virtual-interleaved", 16), ("paged-16", 16), ("paged-1", 1), ("static-interleaved", 16)]


@pytest.mark.parametrize(("backend", "unit"), CASES)
def test_any_interleaving(backend: str, unit: int) -> None:
    machine: Callable[[], RuleBasedStateMachine] = type(
        f"{backend}Machine", (SharingMachine,), {"backend": backend, "unit": unit}
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
