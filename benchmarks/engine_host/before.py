# ruff: noqa: I001
"""The measurement of `vattn bench engine` on the engine of commit b45cdf5, before the executors.

Started by run.py with that commit's tree first on the path. Reads lines `case|batch|steps`, answers each with
the seconds of a decode step. The model, packing and sampling are left out of its pipeline; the rest of
`Pipeline.launch` and `settle` is that commit's.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
from tests.models.tiny import build

from vattn import SamplingParams
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.engine import Engine
from vattn.engine.pipeline import InFlight, NewToken, Pipeline
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape
from vattn.models.loader import load_model
from vattn.vmm.accounting import AccountingDriver

PROMPT, WARM = 24, 4
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
KV: dict[str, dict[str, Any]] = {
    "virtual interleaved": {"backend": "virtual", "layout": "interleaved", "prefix_caching": False},
    "virtual per_layer": {"backend": "virtual", "layout": "per_layer", "prefix_caching": False},
    "paged": {"backend": "paged", "prefix_caching": False},
    "static": {"backend": "static", "prefix_caching": False},
}
LOADED = load_model(build("llama"), device="cpu")


class NullPipeline(Pipeline):
    def launch(self, batch: Any, previous: Any) -> InFlight:
        now = time.perf_counter()
        self.kv.begin_step([item.chunk for item in batch.items])
        sampling = [item.request for item in batch.items if item.samples]
        self.kv.submitted(None)
        self.metrics.observe_step(batch.num_tokens, len(self.scheduler.running), self.kv.usage())
        self.metrics.preemptions = self.scheduler.num_preemptions
        self.metrics.swapped_requests = self.scheduler.preemption.swaps
        self.metrics.recomputed_tokens = self.scheduler.preemption.recomputed_tokens
        for request, length in batch.items:
            request.num_computed += length
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        for row, request in enumerate(sampling):
            request.add_pending(row)
        failure = self._tell_computed([item.request for item in batch.items])
        decodes = sum(length == 1 for _, length in batch.items)
        return InFlight(None, sampling, None, [], {}, now, decodes, batch.num_tokens - decodes, failure)

    def settle(self, flight: InFlight) -> list[NewToken]:
        self._time(flight)
        tokens = [0] * len(flight.sampling)
        logprobs: list[Any] = [None] * len(tokens)
        news = []
        for request, token, entry in zip(flight.sampling, tokens, logprobs, strict=True):
            if not request.finished:
                request.settle_pending()
                news.append(NewToken(request, token, entry))
        return news


def measure(case: str, requests: int, steps: int) -> float:
    length = PROMPT + WARM + steps + 2 + -(-requests * PROMPT // 2048)
    longest = max(length, 1024)
    config = KVCacheConfig(
        **KV[case], background_mapping=False, memory_bytes=2 * requests * longest * SHAPE.token_bytes
    )
    kv = create_kv_cache(
        config, SHAPE, AccountingDriver(2 << 20, budget=1 << 60), max_model_len=longest, model_len=longest,
        max_num_seqs=requests, fingerprint="nothing",
    )  # fmt: skip
    limits = SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=max(2048, requests))
    engine = Engine(LOADED, kv, limits, max_model_len=longest)
    old = engine.pipeline
    engine.pipeline = NullPipeline(old.scheduler, old.kv, old.runner, old.sampler, old.metrics)
    params = SamplingParams(temperature=0.0, max_tokens=length - PROMPT, ignore_eos=True, detokenize=False)
    for i in range(requests):
        engine.add_request(str(i), [1] * PROMPT, params)
    while any(r.num_remaining > 1 for r in engine.requests()):
        engine.step()
    for _ in range(WARM):
        engine.step()
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        return (time.perf_counter() - started) / steps
    finally:
        gc.enable()
        kv.close()


for line in sys.stdin:
    name, batch, steps = line.strip().split("|")
    print(measure(name, int(batch), int(steps)), flush=True)
