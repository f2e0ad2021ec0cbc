"""From options to a simulation: what fits, the cache, the scheduler, the prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.engine import Engine
from vattn.engine.intake import Intake
from vattn.errors import CapacityError, ConfigError
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import SCALE_BYTES, KVShape, dtype_by_name
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.simulator.calibrate import Fit
from vattn.lab.simulator.cost import CallSeconds, CostModel, Efficiency, Mapping, Roofline
from vattn.lab.simulator.driver import PricedDriver
from vattn.lab.simulator.executor import PricedExecutor
from vattn.lab.simulator.gpus import Gpu
from vattn.lab.simulator.simulator import Outcome, Simulator
from vattn.lab.simulator.source import Plan, Source
from vattn.models.spec import PARAMETER_BYTES, ModelSpec

_LEAST_KV = 0.1
"""`tp=None` takes devices until this share of their memory is left to KV."""
_MOST_TP = 64
_GRAPH_RESERVE = 0.02
"""Share of device memory left to captured graphs and fragmentation (vattn.engine.sizing)."""


@dataclass(frozen=True)
class SimulationConfig:
    """One simulated engine. Names and defaults follow `LLM`, where it has them."""

    model: ModelSpec
    gpu: Gpu
    tp: int | None = None
    """Devices that share the model; None: the fewest (a power of two) that leave room for KV."""
    kv: KVCacheConfig = field(default_factory=KVCacheConfig)
    """`memory_bytes`: on each device; None: what weights and a step leave. `prefix_caching`: None: where
    requests have text in common; without, there is nothing to find and no need to hash it."""
    limits: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(256, 2048))
    max_model_len: int | None = None
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    hidden_mapping: bool = True
    """Driver calls are made ahead by a thread, or else in the step."""
    overlap: bool = True
    granularity: int | None = None
    """Smallest page of the driver; None: the device's, or less if `page_bytes` asks for it."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    call_seconds: CallSeconds = field(default_factory=CallSeconds)
    fit: Fit | None = None
    """Price steps by this instead of the roofline."""

    def __post_init__(self) -> None:
        if self.weight_dtype not in PARAMETER_BYTES:
            raise ConfigError(
                f"weight_dtype={self.weight_dtype!r} is unknown: use one of {', '.join(PARAMETER_BYTES)}"
            )
        if self.tp is not None and (self.tp < 1 or self.model.num_heads % self.tp):
            raise ConfigError(
                f"tp={self.tp} does not divide the {self.model.num_heads} heads of {self.model.name}"
            )
        longest = self.model.max_model_len
        if self.max_model_len is not None and not 2 <= self.max_model_len <= longest:
            raise ConfigError(
                f"max_model_len={self.max_model_len:,} must be from 2 to {self.model.name}'s {longest:,}"
            )

    @property
    def weight_bytes(self) -> int:
        """Of all devices together."""
        return int(self.model.num_params * PARAMETER_BYTES[self.weight_dtype])

    def kv_shape(self, tp: int) -> KVShape:
        """A token's KV on each of `tp` devices. KV heads are copied when there are fewer than devices."""
        stored = {"auto": self.kv_dtype, "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}[self.kv.dtype]
        scales = 0 if self.kv.dtype == "auto" else SCALE_BYTES
        heads = max(1, self.model.num_kv_heads // tp)
        return KVShape(self.model.num_layers, heads, self.model.head_dim, dtype_by_name(stored), scales)

    @property
    def page_granularity(self) -> int:
        page = self.kv.page_bytes
        if self.granularity is not None:
            return self.granularity
        return self.gpu.page_bytes if page is None else min(self.gpu.page_bytes, page & -page)

    def step_bytes(self, tp: int) -> int:
        """One device's bytes beside weights and KV: activations and logits of a full step, and a reserve.

        Two hidden states and the widest layer for each token; float32 logits, their copy and their sorted
        twin for each request (as `vattn.engine.sizing` counts them).
        """
        model, limits = self.model, self.limits
        width = 2 * model.hidden_size + 3 * model.experts_per_token * model.intermediate_size // tp
        activations = 2 * limits.max_num_batched_tokens * width
        logits = 14 * limits.max_num_seqs * model.vocab_size
        return activations + logits + int(_GRAPH_RESERVE * self.gpu.memory_bytes)

    def kv_bytes(self, tp: int) -> int:
        """What `tp` devices leave to KV on each of them; negative: it does not fit."""
        usable = int(self.gpu.memory_bytes * self.kv.gpu_memory_utilization)
        return usable - self.weight_bytes // tp - self.step_bytes(tp)

    def resolved(self) -> SimulationConfig:
        """With `tp` and `kv.memory_bytes` decided. Raises ConfigError when the model does not fit."""
        tp = self.tp
        if tp is None:
            tp = 1
            while self.kv_bytes(tp) < _LEAST_KV * self.gpu.memory_bytes:
                if tp * 2 > _MOST_TP or self.model.num_heads % (tp * 2):
                    break
                tp *= 2
        room = self.kv_bytes(tp)
        if room <= 0 or (self.kv.memory_bytes or 0) > room:
            wanted = f" and {_gib(self.kv.memory_bytes)} of KV" if self.kv.memory_bytes else ""
            short = (self.kv.memory_bytes or 0) - room
            raise ConfigError(
                f"{self.model.name} does not fit: each of {tp} {self.gpu.name} has "
                f"{_gib(self.gpu.memory_bytes)} x gpu_memory_utilization={self.kv.gpu_memory_utilization}; "
                f"weights ({self.weight_dtype}) take {_gib(self.weight_bytes // tp)}, a step "
                f"{_gib(self.step_bytes(tp))}{wanted}: {_gib(short)} too much. Raise tp, or lower "
                "weight_dtype, max_num_seqs or max_num_batched_tokens"
            )
        return replace(self, tp=tp, kv=replace(self.kv, memory_bytes=self.kv.memory_bytes or room))


@dataclass(frozen=True)
class Simulation:
    """A finished simulation and what it was of."""

    config: SimulationConfig
    """Resolved."""
    outcome: Outcome
    kv: dict[str, Any]
    """`KVCache.describe`."""
    counters: dict[str, Any]
    max_model_len: int
    cost: dict[str, float | str]


def simulate(
    config: SimulationConfig,
    plans: Sequence[Plan],
    arrivals: Arrivals,
    *,
    max_concurrency: int | None = None,
    skip: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Simulation:
    """Run a workload. Raises ConfigError or CapacityError before anything runs."""
    config = config.resolved()
    tp = config.tp
    assert tp is not None
    shape = config.kv_shape(tp)
    driver = PricedDriver(config.page_granularity, config.gpu.memory_bytes, config.call_seconds)
    limits = config.limits
    shares = config.kv.prefix_caching
    if shares is None:
        shares = any(p.prompt is not None for p in plans)
    kv = create_kv_cache(
        replace(config.kv, background_mapping=False, prefix_caching=shares and config.kv.backend != "static"),
        shape,
        driver,
        max_model_len=config.max_model_len,
        model_len=config.model.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        fingerprint=config.model.name,
    )
    longest = config.max_model_len or kv.capacity_tokens
    _require_fitting(plans, longest)
    driver.collect()  # what setting up costs is no step's
    cost = _cost(config, shape, tp)
    executor = PricedExecutor(cost, driver.collect)
    intake = Intake(vocab_size=config.model.vocab_size, max_model_len=longest)
    engine = Engine(executor, kv, intake, limits, overlap=config.overlap)
    source = Source(plans, arrivals, max_concurrency, shares_prefixes=kv.shares_prefixes)
    simulator = Simulator(engine, executor, source, skip=skip)
    outcome = simulator.run(progress)
    stats = kv.stats()
    counters = {
        "steps": len(outcome.steps),
        "skipped_steps": outcome.skipped_steps,
        "computed_tokens": sum(outcome.steps.tokens),
        "preemptions": engine.scheduler.num_preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "rows_adopted": stats.rows_adopted,
        "map_stall_s": sum(outcome.steps.map_stall_s),
        "driver_calls": stats.driver_calls,
    }
    description = kv.describe()
    kv.close()
    return Simulation(config, outcome, description, counters, longest, cost.describe())


def _cost(config: SimulationConfig, shape: KVShape, tp: int) -> CostModel:
    if config.fit is not None:
        return config.fit.model(shape.token_bytes)
    return Roofline(
        config.model,
        config.gpu,
        tp=tp,
        weight_bytes=PARAMETER_BYTES[config.weight_dtype],
        kv_token_bytes=shape.token_bytes,
        paged=config.kv.backend == "paged",
        mapping=Mapping(config.hidden_mapping),
        overlap=config.overlap,
        efficiency=config.efficiency,
    )


def _require_fitting(plans: Sequence[Plan], longest: int) -> None:
    totals: dict[str, int] = {}
    most = 0
    for p in plans:
        before = totals.get(p.session, 0) if p.session is not None else 0
        total = before + p.prompt_len + p.output_len
        if p.session is not None:
            totals[p.session] = total
        most = max(most, total)
    if most > longest:
        raise CapacityError(
            f"a request of {most:,} tokens, prompt and output, is longer than max_model_len={longest:,}: "
            "raise max_model_len, if the model and its KV memory allow, or shorten the workload"
        )


def _gib(n: float | None) -> str:
    return f"{(n or 0) / (1 << 30):.1f} GiB"
