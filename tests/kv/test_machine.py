"""Any interleaving of admit, grow, write and free, on every backend: the books balance after every
step and every request reads back exactly what it wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.caches import BACKENDS, MAX_ROWS, MAX_TOKENS, SHAPE, make_cache
from vattn.kv.base import Chunk, ContiguousInputs, KVCache, PagedInputs


def read_back(cache: KVCache, request_id: str, tokens: int) -> torch.Tensor:
    """`[layers, 2, tokens, heads, dim]` of one request, read the way a kernel would."""
    inputs = cache.begin_step([Chunk(request_id, tokens - 1, 1)])
    if isinstance(inputs, ContiguousInputs):
        return inputs.kv[:, :, inputs.slots[0], :tokens].clone()
    assert isinstance(inputs, PagedInputs)
    return inputs.kv[:, :, inputs.block_tables[0]].flatten(2, 3)[:, :, :tokens]


class CacheMachine(RuleBasedStateMachine):
    backend: str

    @initialize(budget_tokens=st.integers(MAX_TOKENS, 4 * MAX_TOKENS))
    def open(self, budget_tokens: int) -> None:
        self.cache = make_cache(self.backend, budget_tokens)
        self.expected: dict[str, torch.Tensor] = {}
        self.count = 0

    def write(self, request_id: str, start: int, end: int) -> None:
        """Compute tokens start..end: store random K and V, remember them."""
        inputs = self.cache.begin_step([Chunk(request_id, start, end - start)])
        new = torch.randn(
            SHAPE.num_layers,
            2,
            end - start,
            SHAPE.num_kv_heads,
            SHAPE.head_dim,
            generator=torch.Generator().manual_seed(self.count),
        )
        self.count += 1
        inputs.kv.flatten(2, 3)[:, :, inputs.slot_mapping] = new
        self.expected[request_id] = torch.cat([self.expected[request_id][:, :, :start], new], dim=2)

    @rule(tokens=st.integers(1, MAX_TOKENS))
    def admit(self, tokens: int) -> None:
        request_id, before = f"r{self.count}", self.cache.usage()
        could = self.cache.can_admit(tokens)
        cached = self.cache.attach(request_id, list(range(tokens)))
        if cached is None:
            assert not could, "can_admit promised room"
            assert self.cache.usage().in_use == before.in_use
            return
        assert cached == 0
        self.expected[request_id] = torch.empty(SHAPE.num_layers, 2, 0, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.write(request_id, 0, tokens)

    @precondition(lambda self: getattr(self, "expected", None))
    @rule(data=st.data(), extra=st.integers(1, 12))
    def grow(self, data: st.DataObject, extra: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        have = self.expected[request_id].shape[2]
        before = self.cache.usage()
        if self.cache.grow(request_id, have + extra):
            self.write(request_id, have, have + extra)
        else:
            assert self.cache.usage().in_use == before.in_use, "a refused growth changed something"

    @precondition(lambda self: getattr(self, "expected", None))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.cache.free(request_id)
        del self.expected[request_id]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        page_map = self.cache.page_map()
        page_map.check()
        assert page_map.usage == self.cache.usage() or "background" in self.backend
        assert set(self.cache.live()) == set(self.expected)
        logical = sum(t.shape[2] for t in self.expected.values()) * SHAPE.token_bytes
        assert self.cache.usage().logical == logical

    @invariant()
    def contents_survive(self) -> None:
        for request_id, want in getattr(self, "expected", {}).items():
            assert torch.equal(read_back(self.cache, request_id, want.shape[2]), want)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for request_id in list(self.expected):
                self.cache.free(request_id)
            self.cache.check()
            assert self.cache.usage().in_use == 0
            self.cache.close()
            self.cache.close()
            assert self.cache.usage().physical == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_interleaving(backend: str) -> None:
    machine: Callable[[], RuleBasedStateMachine] = type(
        f"{backend}Machine", (CacheMachine,), {"backend": backend}
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_rows_limit_requests_not_only_bytes() -> None:
    for backend in BACKENDS:
        cache = make_cache(backend, 100 * MAX_TOKENS)
        admitted = [cache.attach(f"r{i}", [0]) is not None for i in range(MAX_ROWS + 1)]
        assert admitted == [True] * MAX_ROWS + [backend.startswith("paged")]
        cache.check()
        cache.close()
