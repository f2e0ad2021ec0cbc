"""The engine without a model: host time of a decode step, by batch size and KV backend.

    measured       schedule, grow KV, KVCache.begin_step (the plan), enter tokens, stop, count
    not measured   model, sampling, packing of inputs, text, clients; driver calls (an accounting driver)

A batch of equal requests computes its prompts; then decode steps are timed, pages and blocks that run full in
them included. In every round each backend has its turn, so that a change of the machine meets all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.engine import Engine
from vattn.engine.executor import Executor, StepResult
from vattn.engine.intake import Intake
from vattn.engine.scheduler import Scheduled
from vattn.errors import ConfigError
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape
from vattn.lab.bench.bench_report import FORMAT
from vattn.lab.bench.environment import environment
from vattn.params import SamplingParams
from vattn.vmm.accounting import AccountingDriver

BATCHES = (1, 16, 64, 128, 256, 512, 1024)
PROMPT = 24
"""Tokens of each prompt; no multiple of a block or page, so that some fill up while steps are timed."""
WARM = 4
"""Decode steps before the first one that is timed."""
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
"""Of Llama 3 8B: a token's K and V take 128 KiB."""
CASES = {
    "virtual interleaved": KVCacheConfig(
        backend="virtual", layout="interleaved", background_mapping=False, prefix_caching=False
    ),
    "virtual per_layer": KVCacheConfig(
        backend="virtual", layout="per_layer", background_mapping=False, prefix_caching=False
    ),
    "paged": KVCacheConfig(backend="paged", prefix_caching=False),
    "static": KVCacheConfig(backend="static", prefix_caching=False),
}


class NullExecutor(Executor):
    """Computes nothing: it plans the step's memory, as every executor does, and returns token 0."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def clock(self) -> float:
        return perf_counter()

    def launch(self, items: Sequence[Scheduled], behind: int | None) -> int:
        self._kv.begin_step([item.chunk for item in items])
        sampled = sum(item.samples for item in items)
        self._kv.submitted(None)
        return sampled

    def collect(self, handle: int) -> StepResult:
        return StepResult([0] * handle)


@dataclass
class DecodingBatch:
    """An engine that has computed the prompts of `requests` equal requests and now decodes them."""

    engine: Engine
    requests: int

    @classmethod
    def open(cls, config: KVCacheConfig, requests: int, steps: int) -> DecodingBatch:
        """`steps`: decode steps it must be able to make. Raises ConfigError for impossible sizes."""
        # Prompts may be computed over several steps, while the first requests decode already.
        length = PROMPT + WARM + steps + 2 + -(-requests * PROMPT // 2048)
        longest = max(length, 1024)
        kv = create_kv_cache(
            replace(config, memory_bytes=2 * requests * longest * SHAPE.token_bytes),
            SHAPE,
            AccountingDriver(2 << 20, budget=1 << 60),
            max_model_len=longest,
            model_len=longest,
            max_num_seqs=requests,
            fingerprint="nothing",
        )
        limits = SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=max(2048, requests))
        intake = Intake(vocab_size=32_000, max_model_len=longest)
        engine = Engine(NullExecutor(kv), kv, intake, limits)
        params = SamplingParams(
            temperature=0.0, max_tokens=length - PROMPT, ignore_eos=True, detokenize=False
        )
        for i in range(requests):
            engine.add_request(str(i), [1] * PROMPT, params)
        batch = cls(engine, requests)
        while any(r.num_remaining > 1 for r in engine.requests()):
            engine.step()
        for _ in range(WARM):
            engine.step()
        return batch

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.kv.close()


def seconds_per_step(step: Callable[[], object], steps: int) -> float:
    """Mean seconds of `steps` calls, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        started = perf_counter()
        for _ in range(steps):
            step()
        return (perf_counter() - started) / steps
    finally:
        gc.enable()


def bench_engine(
    cases: Iterable[str] = CASES,
    batches: Sequence[int] = BATCHES,
    *,
    steps: int = 32,
    rounds: int = 5,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """A report of kind `engine`: per case and batch, microseconds of a step and of a request in it.

    Raises ConfigError for an unknown case and for impossible sizes.
    """
    names = list(cases)
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        raise ConfigError(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if min(steps, rounds, *batches) < 1:
        raise ConfigError(
            f"batch sizes, steps and rounds must be at least 1, got {list(batches)}, {steps}, {rounds}"
        )
    measured: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        for batch in batches:
            for name in names:
                if progress is not None:
                    progress(f"round {number + 1} of {rounds}: {name}, {batch} requests")
                opened = DecodingBatch.open(CASES[name], batch, steps)
                try:
                    seconds = seconds_per_step(opened.step, steps)
                finally:
                    opened.close()
                measured.setdefault((name, batch), []).append(seconds)
    return {
        "format": FORMAT,
        "kind": "engine",
        "environment": environment(),
        "rounds": rounds,
        "steps": steps,
        "prompt_tokens": PROMPT,
        "runs": [{"name": name, "points": [point(b, measured[name, b]) for b in batches]} for name in names],
    }


def point(batch: int, seconds: Sequence[float]) -> dict[str, Any]:
    """One batch size of a run: `us_per_step` of each round, and their summary per request."""
    each = sorted(s * 1e6 / batch for s in seconds)
    return {
        "batch": batch,
        "us_per_step": [round(s * 1e6, 2) for s in seconds],
        "us_per_request": {
            "median": round(median(each), 3),
            "low": round(each[0], 3),
            "high": round(each[-1], 3),
        },
    }
