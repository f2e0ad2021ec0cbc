"""The scheduler over real caches without a model: any traffic, checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.engine import Engine
from vattn.engine.events import EventLog
from vattn.engine.intake import Intake
from vattn.engine.policy import Policy
from vattn.engine.request import Request, RequestStatus
from vattn.engine.scheduler import Batch, Scheduler
from vattn.engine.service import DEFAULT_SERVICE, Service
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape
from vattn.lab.bench.engine_bench import NullExecutor
from vattn.outputs import RequestMetrics
from vattn.params import SamplingParams
from vattn.sampling.detokenize import IncrementalDetokenizer, StopChecker
from vattn.sampling.sampling_state import SamplingStates
from vattn.vmm.accounting import AccountingDriver

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, dtype=torch.float32)
MAX_LEN = 64
CACHES = {
    "virtual-interleaved": KVCacheConfig(backend="virtual", layout="interleaved", page_bytes=4096),
    "virtual-per_layer": KVCacheConfig(backend="virtual", layout="per_layer", page_bytes=4096),
    "paged": KVCacheConfig(backend="paged", block_size=8),
    "static": KVCacheConfig(backend="static"),
}


class Traffic(NamedTuple):
    prompt: int
    output: int
    arrives: int
    aborted_at: int | None
    service: Service = DEFAULT_SERVICE


traffic = st.lists(
    st.builds(
        Traffic,
        prompt=st.integers(1, 40),
        output=st.integers(1, 24),
        arrives=st.integers(0, 12),
        aborted_at=st.one_of(st.none(), st.integers(1, 30)),
        service=st.just(DEFAULT_SERVICE),
    ),
    min_size=1,
    max_size=12,
)


def make_cache(kind: str, budget_bytes: int, rows: int) -> KVCache:
    from dataclasses import replace

    return create_kv_cache(
        replace(CACHES[kind], memory_bytes=budget_bytes),
        SHAPE,
        AccountingDriver(granularity=4096),
        max_model_len=MAX_LEN,
        model_len=MAX_LEN,
        max_num_seqs=rows,
    )


def make_request(index: int, item: Traffic) -> Request:
    params = SamplingParams(temperature=0, max_tokens=item.output, ignore_eos=True)
    prompt, outputs = list(range(item.prompt)), list[int]()
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        output_token_ids=outputs,
        params=params,
        sampling=SamplingStates().new_state(params, prompt, outputs),
        stop=StopChecker(params, IncrementalDetokenizer(None, params), max_tokens=item.output),
        arrival=index,
        max_tokens=item.output,
        metrics=RequestMetrics(0.0),
        service=item.service,
    )


class Decisions(EventLog):
    """Hands every batch to `check` as soon as it is decided on."""

    def __init__(self, check: Callable[[Batch], None]) -> None:
        self._check = check

    def step(self, batch: Batch) -> None:
        self._check(batch)


class Harness:
    """The engine on an executor that computes nothing: every sampled token is 0.

    `overlap`: a step's tokens are entered after the next one is scheduled. `policy`: None: by arrival.
    """

    def __init__(
        self,
        kind: str,
        budget_bytes: int,
        seqs: int,
        tokens: int,
        *,
        overlap: bool = False,
        policy: Policy | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.kv = make_cache(kind, budget_bytes, seqs)
        self.engine = Engine(
            NullExecutor(self.kv),
            self.kv,
            Intake(vocab_size=MAX_LEN, max_model_len=MAX_LEN),
            SchedulerConfig(),
            overlap=overlap,
            trace=Decisions(self._decided),
        )
        # Its own, since it may have fewer tokens in a step than places, which SchedulerConfig refuses.
        self.scheduler = self.engine.scheduler = Scheduler(
            self.kv, max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy, weights=weights
        )
        self.requests: list[Request] = []
        self.overlap = overlap
        self._before: list[Request] = []
        self._decoding: list[Request] = []
        self._batch = Batch([])

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, item: Traffic) -> Request:
        self.requests.append(make_request(len(self.requests), item))
        self.engine.enqueue([self.requests[-1]])
        return self.requests[-1]

    def step(self) -> Batch:
        self._before = list(self.scheduler.running)
        self._decoding = [r for r in self._before if r.num_remaining == 1 and not r.ends_with_pending]
        self.engine.step()
        self.scheduler.check()
        return self._batch

    def _decided(self, batch: Batch) -> None:
        self._batch = batch
        self.check_batch(batch, self._before, self._decoding)

    def check_batch(self, batch: Batch, before: list[Request], decoding: list[Request]) -> None:
        """What holds for every step: `before` were running, `decoding` had one token to compute."""
        self.scheduler.check()
        assert not batch.starved, "a request that fits alone always gets its memory"
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        ids = [item.request.request_id for item in batch.items]
        assert len(set(ids)) == len(ids)
        lengths = [item.length for item in batch.items]
        assert all(n > 0 for n in lengths)
        # Who streams already gets a token in every step, whatever prompts are about.
        given = {item.request: item.length for item in batch.items}
        victims = [victim.request for victim in batch.preempted]
        for request in decoding:
            assert request in victims or given[request] == 1, "a decode was left out"
        admitted = {entry.request for entry in batch.admitted}
        assert all(victim in before or victim in admitted for victim in victims)
        # The most urgent request that runs is never preempted: it finishes, then the next one does.
        for victim in victims:
            assert self.scheduler.running[0].rank < victim.rank
        for victim, reason, by, _ in batch.preempted:
            if reason == "share":
                assert victim.service.tenant != by.service.tenant
                assert any(r.service.tenant == victim.service.tenant for r in self.scheduler.running)
        if len({request.service.tenant for request in self.requests}) == 1:
            # Nobody yields to a less urgent one: every running request goes before every victim.
            assert all(r.rank < victim.rank for victim in victims for r in self.scheduler.running)
        if self.scheduler.has_work and not self.overlap:
            assert batch.items, "work is waiting and nothing runs"


@pytest.mark.parametrize("kind", CACHES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(items=traffic, seqs=st.integers(1, 6), tokens=st.integers(6, 48), slack=st.integers(0, 3))
def test_any_traffic_finishes(kind: str, items: list[Traffic], seqs: int, tokens: int, slack: int) -> None:
    ranges = 2 * SHAPE.num_layers if kind == "virtual-per_layer" else 1
    budget = max(MAX_LEN * SHAPE.token_bytes, 4096 * ranges * 3) + slack * 4096 * ranges
    harness = Harness(kind, budget, seqs, tokens)
    arrivals = sorted(items, key=lambda item: item.arrives)
    step = 0
    while arrivals or harness.scheduler.has_work:
        while arrivals and arrivals[0].arrives <= step:
            harness.add(arrivals.pop(0))
        for request, item in zip(harness.requests, sorted(items, key=lambda i: i.arrives), strict=False):
            if item.aborted_at == step and not request.finished:
                harness.scheduler.finish(request)
                harness.scheduler.check()
        harness.step()
        step += 1
        assert step < 5_000, "livelock"
    for request, item in zip(harness.requests, sorted(items, key=lambda i: i.arrives), strict=True):
        assert request.finished
        if item.aborted_at is None:
            assert len(request.output_token_ids) == item.output
    assert harness.kv.usage().in_use == 0


def test_the_youngest_yields_and_comes_back_in_its_place() -> None:
    # 16 blocks of 8: three requests of 40 tokens fit at first (15 blocks) and outgrow the pool.
    harness = Harness("paged", 16 * 8 * SHAPE.token_bytes, seqs=3, tokens=48)
    old, middle, young = (harness.add(Traffic(38, 24, 0, None)) for _ in range(3))
    victims = []
    while harness.scheduler.has_work:
        victims += [victim.request for victim in harness.step().preempted]
    assert young in victims and old not in victims
    assert [len(r.output_token_ids) for r in (old, middle, young)] == [24, 24, 24]
    assert young.metrics.num_preemptions >= 1


def test_decodes_go_first_and_a_long_prompt_takes_what_is_left() -> None:
    harness = Harness("paged", 64 * 8 * SHAPE.token_bytes, seqs=4, tokens=16)
    decoding = harness.add(Traffic(3, 20, 0, None))
    harness.step()
    prompt = harness.add(Traffic(40, 2, 0, None))
    lengths = [{i.request.request_id: i.length for i in harness.step().items} for _ in range(3)]
    assert lengths == [{decoding.request_id: 1, prompt.request_id: n} for n in (15, 15, 10)]


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit() -> None:
    harness = Harness("paged", 8 * 8 * SHAPE.token_bytes, seqs=4, tokens=64)
    harness.add(Traffic(30, 8, 0, None))
    harness.step()
    big, small = harness.add(Traffic(40, 1, 0, None)), harness.add(Traffic(1, 1, 0, None))
    harness.step()
    assert big.status is small.status is RequestStatus.WAITING
