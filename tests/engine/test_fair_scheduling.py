"""Priorities, ageing and fair shares: laws that hold for any traffic, on real caches, without a model."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.test_scheduler import CACHES, MAX_LEN, SHAPE, Harness, Traffic
from vattn.engine.levels import entitled
from vattn.engine.policy import FirstComeFirstServed, Priority
from vattn.engine.request import Request, RequestStatus
from vattn.engine.service import Service
from vattn.engine.turns import FairTurns

anything = settings(deadline=None, suppress_health_check=list(HealthCheck))
services = st.builds(Service, priority=st.integers(-3, 3), tenant=st.sampled_from("abc"))
mixed = st.lists(
    st.builds(
        Traffic,
        prompt=st.integers(1, 40),
        output=st.integers(1, 24),
        arrives=st.integers(0, 20),
        aborted_at=st.one_of(st.none(), st.integers(1, 40)),
        service=services,
    ),
    min_size=1,
    max_size=16,
)
ROOMY = 10_000 * SHAPE.token_bytes


def drive(harness: Harness, items: list[Traffic], max_steps: int = 5_000) -> None:
    """Feed the traffic and step until all is done; the harness checks every step."""
    items = sorted(items, key=lambda item: item.arrives)
    step = 0
    while len(harness.requests) < len(items) or harness.has_work:
        while len(harness.requests) < len(items) and items[len(harness.requests)].arrives <= step:
            harness.add(items[len(harness.requests)])
        for request, item in zip(harness.requests, items, strict=False):
            if item.aborted_at == step and not request.finished:
                harness.scheduler.finish(request)
        harness.step()
        step += 1
        assert step < max_steps, "livelock"
    for request, item in zip(harness.requests, items, strict=True):
        assert request.finished
        if item.aborted_at is None:
            assert len(request.output_token_ids) == item.output
    assert harness.kv.usage().in_use == 0


# ---------------------------------------------------------------------- anything at all
@pytest.mark.parametrize("kind", CACHES)
@settings(anything, max_examples=75)
@given(
    items=mixed,
    seqs=st.integers(1, 6),
    tokens=st.integers(6, 48),
    slack=st.integers(0, 3),
    ageing=st.one_of(st.none(), st.integers(1, 200)),
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.1, 0.5, 2.0, 7.0])),
    overlap=st.booleans(),
)
def test_any_mix_finishes(
    kind: str,
    items: list[Traffic],
    seqs: int,
    tokens: int,
    slack: int,
    ageing: int | None,
    weights: dict[str, float],
    overlap: bool,
) -> None:
    ranges = 2 * SHAPE.num_layers if kind == "virtual-per_layer" else 1
    budget = max(MAX_LEN * SHAPE.token_bytes, 4096 * ranges * 3) + slack * 4096 * ranges
    policy = FirstComeFirstServed() if ageing is None else Priority(ageing)
    drive(Harness(kind, budget, seqs, tokens, policy=policy, weights=weights, overlap=overlap), items)


@settings(anything, max_examples=40)
@given(items=mixed, tokens=st.integers(6, 48), seqs=st.integers(1, 6))
def test_with_one_tenant_weights_do_not_matter(items: list[Traffic], tokens: int, seqs: int) -> None:
    def order(weights: dict[str, float]) -> list[list[tuple[str, int]]]:
        harness = Harness("paged", 12 * 8 * SHAPE.token_bytes, seqs, tokens, weights=weights)
        for item in items:
            harness.add(item._replace(service=Service(tenant="a")))
        batches = []
        while harness.has_work:
            batches.append([(i.request.request_id, i.length) for i in harness.step().items])
        return batches

    assert order({}) == order({"a": 0.01}) == order({"a": 50.0})


# ---------------------------------------------------------------------- priority and ageing
@settings(anything, max_examples=40)
@given(items=mixed, ageing=st.integers(1, 100), seqs=st.integers(1, 4))
def test_nobody_is_overtaken_beyond_the_ageing_bound(items: list[Traffic], ageing: int, seqs: int) -> None:
    harness = Harness("paged", ROOMY, seqs, 16, policy=Priority(ageing))
    items = [i._replace(service=Service(i.service.priority), aborted_at=None) for i in items]
    items.sort(key=lambda item: item.arrives)
    arrived: dict[Request, int] = {}
    step = 0
    while len(harness.requests) < len(items) or harness.has_work:
        while len(harness.requests) < len(items) and items[len(harness.requests)].arrives <= step:
            arrived[harness.add(items[len(harness.requests)])] = harness.scheduler.clock
        batch = harness.step()
        step += 1
        for winner, _ in batch.admitted:
            for loser in harness.scheduler.waiting:
                gained = (loser.service.priority - winner.service.priority) * ageing
                assert arrived[winner] - arrived[loser] <= gained


@pytest.mark.parametrize("ageing", [50, 10**9])
def test_ageing_ends_starvation(ageing: int) -> None:
    # Urgent requests come faster than they are served; one that is not urgent waits among them.
    harness = Harness("paged", ROOMY, 2, 16, policy=Priority(ageing))
    humble = harness.add(Traffic(20, 2, 0, None, Service(priority=5)))
    while harness.scheduler.clock < 2_000:
        harness.add(Traffic(20, 2, 0, None, Service(priority=0)))
        harness.step()
        if humble.status is not RequestStatus.WAITING:
            break
    if ageing == 50:
        # Who came before 5 x 50 tokens were scheduled goes first: 23 tokens each, one a step of <= 16 tokens.
        assert 250 < harness.scheduler.clock < 1_000
    else:
        assert humble.status is RequestStatus.WAITING


def test_a_smaller_priority_goes_first_and_yields_last() -> None:
    harness = Harness("paged", 16 * 8 * SHAPE.token_bytes, 3, 48, policy=Priority(10**6))
    late, middle, urgent = (harness.add(Traffic(38, 24, 0, None, Service(p))) for p in (2, 1, 0))
    assert list(harness.scheduler.waiting) == [urgent, middle, late]
    victims = []
    while harness.scheduler.has_work:
        victims += [victim.request for victim in harness.step().preempted]
    assert late in victims and urgent not in victims


# ---------------------------------------------------------------------- fair turns
@settings(anything, max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=8), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=4, max_size=4),
    tokens=st.integers(8, 64),
)
def test_backlogged_tenants_are_never_a_round_apart(
    sizes: list[list[int]], weights: list[float], tokens: int
) -> None:
    names = "abcd"[: len(sizes)]
    shares = dict(zip(names, weights, strict=False))
    harness = Harness("paged", ROOMY, 128, tokens, weights=shares)
    served = dict.fromkeys(names, 0)
    sent = dict.fromkeys(names, 0)
    for _ in range(25):
        for name, lengths in zip(names, sizes, strict=True):
            while sum(r.num_tokens for r in harness.scheduler.waiting if r.service.tenant == name) < tokens:
                length = lengths[sent[name] % len(lengths)]
                sent[name] += 1
                harness.add(Traffic(length, 1, 0, None, Service(tenant=name)))
        batch = harness.step()
        assert batch.num_tokens == tokens, "no token of the budget is left lying"
        for request, length in batch.items:
            served[request.service.tenant] += length
        rounds = {name: served[name] / harness.scheduler.turns.quantum(name) for name in names}
        for one, other in combinations(names, 2):
            # Within a round nobody is more than its quantum ahead. The last token of a prompt goes like a
            # decode, which is never held back, and is owed.
            slack = 1 / min(harness.scheduler.turns.quantum(name) for name in names)
            assert abs(rounds[one] - rounds[other]) <= 1 + slack + 1e-9


@settings(anything, max_examples=200)
@given(
    uses=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-20, 50)), max_size=60),
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.01, 0.5, 2.0, 30.0])),
)
def test_credits_stay_within_a_quantum(uses: list[tuple[str, int]], weights: dict[str, float]) -> None:
    turns = FairTurns(weights, 32)
    for tenant, tokens in uses:
        turns.charge(tenant, tokens)
        turns.check()
        chosen = turns.turn(["a", "b", "c"])
        assert 0 < turns.credit(chosen) <= turns.quantum(chosen)
        turns.check()


@given(
    holds=st.lists(st.integers(0, 100), min_size=2, max_size=2),
    needs=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_what_was_taken_is_not_taken_back(holds: list[int], needs: tuple[int, int]) -> None:
    mine, others = holds  # the other's holdings without the request that would yield
    if entitled(mine, needs[0], others):
        assert not entitled(others, needs[1], mine)


# ---------------------------------------------------------------------- one tenant floods the engine
def first_token_delays(kind: str, heavy: bool, budget_tokens: int) -> tuple[list[int], list[int], int]:
    """Of the light tenant's requests: steps and scheduled tokens from arrival to first token, by request.

    It sends one request every 12 steps; the heavy tenant 20 at a time, as often, far more than is served.
    """
    harness = Harness(kind, budget_tokens * SHAPE.token_bytes, seqs=8, tokens=32)
    light: dict[Request, tuple[int, int]] = {}
    steps, tokens = [], []
    for step in range(400):
        if step % 12 == 0:
            # Prompts of 24 to 56 tokens: one or two steps of 32 when alone.
            item = Traffic(24 + 8 * (step // 12 % 5), 8, 0, None, Service(tenant="light"))
            light[harness.add(item)] = (step, harness.scheduler.clock)
            for i in range(20 if heavy else 0):
                harness.add(Traffic(16 + 2 * i, 8, 0, None, Service(tenant="heavy")))
        harness.step()
        for request in [r for r in light if r.output_token_ids]:
            arrived, clock = light.pop(request)
            steps.append(step + 1 - arrived)
            tokens.append(harness.scheduler.clock - clock)
    assert len(light) <= 1
    return steps, tokens, harness.scheduler.num_preemptions


def p99(values: list[int]) -> int:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("budget_tokens", [1024, 512])
def test_a_light_tenant_hardly_feels_one_that_sends_twenty_times_as_much(
    kind: str, budget_tokens: int
) -> None:
    alone_steps, alone_tokens, _ = first_token_delays(kind, False, budget_tokens)
    steps, tokens, _ = first_token_delays(kind, True, budget_tokens)
    assert p99(steps) <= 2 * p99(alone_steps)
    assert p99(tokens) <= 2 * p99(alone_tokens)
