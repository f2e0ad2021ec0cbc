"""The same workload through the real engine and through the simulator, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.engine.engines import loaded, random_prompts, stepped
from vattn import LLM
from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.kv.usage import MemoryUsage
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.simulator.gpus import GPUS
from vattn.lab.simulator.setup import Simulation, SimulationConfig, simulate
from vattn.lab.simulator.source import Plan
from vattn.metrics import EngineMetrics
from vattn.params import SamplingParams
from vattn.vmm.host import HostDriver

GRANULARITY = 4096
MAX_LEN = 128
BACKENDS: dict[str, dict[str, Any]] = {
    "virtual-interleaved": {"backend": "virtual", "layout": "interleaved", "page_bytes": 4096},
    "virtual-per_layer": {"backend": "virtual", "layout": "per_layer"},
    "paged-16": {"backend": "paged", "block_size": 16},
    "paged-7": {"backend": "paged", "block_size": 7},
    "static": {"backend": "static", "layout": "per_layer"},
}


@dataclass
class StepTruth:
    """What the real engine's steps were."""

    tokens: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    usage: list[MemoryUsage] = field(default_factory=list)


class _Recorder(EngineMetrics):
    truth: StepTruth

    def observe_step(self, tokens: int, running: int, usage: MemoryUsage) -> None:
        super().observe_step(tokens, running, usage)
        self.truth.tokens.append(tokens)
        self.truth.running.append(running)
        self.truth.usage.append(usage)


@contextmanager
def tiny_llm(kv: KVCacheConfig, limits: SchedulerConfig, overlap: bool) -> Iterator[LLM]:
    with LLM(
        loaded("llama"),
        kv_backend=kv.backend,
        kv_layout=kv.layout,
        page_bytes=kv.page_bytes,
        block_size=kv.block_size,
        kv_cache_memory_bytes=kv.memory_bytes,
        max_model_len=MAX_LEN,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        background_mapping=False,
        enable_prefix_caching=kv.prefix_caching,
        overlap=overlap,
        driver=HostDriver(granularity=GRANULARITY),
    ) as llm:
        yield llm


def run_real(
    kv: KVCacheConfig,
    limits: SchedulerConfig,
    lengths: Sequence[tuple[int, int]],
    *,
    overlap: bool,
    prompts: Sequence[list[int]] | None = None,
) -> tuple[StepTruth, EngineMetrics]:
    """All at once; each request is (prompt tokens, output tokens). `prompts`: their ids; None: random."""
    with tiny_llm(kv, limits, overlap) as llm:
        recorder = _Recorder()
        recorder.truth = StepTruth()
        llm.engine.metrics = recorder
        prompts = prompts or random_prompts(0, [p for p, _ in lengths], loaded("llama").spec.vocab_size)
        for i, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            stepped(llm).add_request(f"r{i}", prompt, params)
        while llm.engine.has_work:
            stepped(llm).step()
        return recorder.truth, llm.metrics()


def tiny_config(kv: KVCacheConfig, limits: SchedulerConfig, *, overlap: bool = False) -> SimulationConfig:
    """The simulator's twin of `tiny_llm`."""
    return SimulationConfig(
        loaded("llama").spec, GPUS["l4"], tp=1, kv=kv, limits=limits, max_model_len=MAX_LEN,
        kv_dtype="float32", granularity=GRANULARITY, overlap=overlap,
    )  # fmt: skip


def run_simulated(
    config: SimulationConfig, lengths: Sequence[tuple[int, int]], *, skip: bool = True
) -> Simulation:
    """All at once."""
    return simulate(config, [Plan(p, o) for p, o in lengths], Arrivals("at-once"), skip=skip)
