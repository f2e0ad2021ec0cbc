"""Run one workload on several systems, side by side, and record it.

warm-up    A  B  C
repeat 1   A  B  C        the order rotates, so that whatever drifts on the machine
repeat 2   B  C  A        falls on everybody alike; ratios are taken within a repeat
repeat 3   C  A  B
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.load import drive
from vattn.lab.bench.serving import serving_metrics
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.target import System
from vattn.lab.bench.timeline import digest, duration
from vattn.lab.bench.workload import RandomWorkload, Workload, WorkloadRequest

HEADLINES: dict[str, tuple[str, ...]] = {
    "throughput": ("output_throughput", "kv_utilization"),
    "latency": ("mean_e2el_ms", "median_ttft_ms", "median_tpot_ms"),
    "serve": (
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_ms",
        "p99_itl_ms",
        "output_throughput",
        "request_goodput",
    ),
    "memory": ("peak_in_use_bytes", "peak_physical_bytes", "kv_utilization", "output_throughput"),
}
"""By kind of benchmark, the metrics whose differences are put into words."""


@dataclass(frozen=True)
class Limits:
    """What every system gets, so that the comparison is fair."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_memory_bytes: int

    def to_dict(self) -> dict[str, int]:
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "kv_memory_bytes": self.kv_memory_bytes,
        }


@dataclass(frozen=True)
class Plan:
    """One benchmark, whatever it is run on."""

    kind: str
    workload: Workload
    arrivals: Arrivals
    limits: Limits
    repeats: int = 5
    max_concurrency: int | None = None
    slo: Slo | None = None

    def __post_init__(self) -> None:
        if self.kind not in HEADLINES:
            raise ConfigError(f"a benchmark is one of {', '.join(HEADLINES)}, not {self.kind!r}")
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be at least 1, got {self.repeats}")
        if self.workload.max_len > self.limits.max_model_len:
            raise ConfigError(
                f"requests may have {self.workload.max_len:,} tokens, the longest allowed is "
                f"{self.limits.max_model_len:,}: ask for shorter ones or raise --max-model-len"
            )


OnRun = Callable[[str, int, int, int], None]
"""Called with (name of the system, repeat from 0 or -1 for the warm-up, requests that ended, in all)."""


def run(
    plan: Plan, systems: Sequence[System], vocab_size: int, on_run: OnRun | None = None
) -> dict[str, Any]:
    """Everything measured; `report.finish` makes it a report."""
    names = [system.name for system in systems]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"a comparison needs systems with names of their own, got {', '.join(names) or 'none'}"
        )
    requests = plan.workload.generate(vocab_size)
    warm_up = _warm_up(plan, vocab_size)
    runs: dict[str, dict[str, Any]] = {
        system.name: {
            "name": system.name,
            "peer": system.peer,
            "options": system.options,
            "batching": "static" if system.barrier else "continuous",
            "kv": {},
            "repeats": [],
        }
        for system in systems
    }
    with _settled_heap():
        for system in systems:
            _once(system, warm_up, Arrivals("at-once"), plan, _told(on_run, system.name, -1))
        for repeat in range(plan.repeats):
            turn = repeat % len(systems)
            for system in [*systems[turn:], *systems[:turn]]:
                told = _told(on_run, system.name, repeat)
                kv, measured = _once(system, requests, plan.arrivals, plan, told)
                runs[system.name]["kv"] = kv
                runs[system.name]["repeats"].append(measured)
    return {
        "kind": plan.kind,
        "workload": plan.workload.describe(),
        "arrivals": {**plan.arrivals.describe(), "max_concurrency": plan.max_concurrency},
        "limits": plan.limits.to_dict(),
        "goodput_slo": plan.slo.to_dict() if plan.slo is not None else None,
        "repeats": plan.repeats,
        "runs": list(runs.values()),
    }


@contextmanager
def _settled_heap() -> Iterator[None]:
    """The collector leaves alone what is there now, the libraries: walking it would pause the engines."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _once(
    system: System,
    requests: Sequence[WorkloadRequest],
    arrivals: Arrivals,
    plan: Plan,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, str | int], dict[str, Any]]:
    """One system, one repeat, from a fresh engine: how its memory is laid out, and what was measured."""
    gc.collect()  # what the run before left must not be cleaned up in this one
    with system.open() as target:
        timelines = drive(
            requests,
            arrivals,
            target,
            max_concurrency=_concurrency(system, plan),
            barrier=system.barrier,
            progress=progress,
        )
        inside = target.inside()
        kv = target.kv
    seconds = duration(timelines)
    metrics = serving_metrics(timelines, seconds, plan.slo)
    if inside.steps is not None:
        metrics |= inside.steps.metrics()
    return kv, {
        "duration_s": seconds,
        "tokens_digest": digest(timelines),
        "metrics": metrics,
        "counters": inside.counters,
        "requests": [timeline.to_dict() for timeline in timelines],
        "steps": inside.steps.to_dict() if inside.steps is not None else None,
    }


def _concurrency(system: System, plan: Plan) -> int | None:
    """Requests in flight; static batches are as large as the engine runs at once, unless asked otherwise."""
    if plan.max_concurrency is not None or not system.barrier:
        return plan.max_concurrency
    size: int = system.options.get("max_num_seqs", plan.limits.max_num_seqs)
    return size


def _warm_up(plan: Plan, vocab_size: int) -> list[WorkloadRequest]:
    """A few short requests: libraries load, kernels compile, caches fill."""
    room = max(2, min(32, plan.limits.max_model_len)) // 2
    return RandomWorkload(4, Lengths("fixed", room, room), Lengths("fixed", room, room), 1).generate(
        vocab_size
    )


def _told(on_run: OnRun | None, name: str, repeat: int) -> Callable[[int, int], None] | None:
    return None if on_run is None else lambda done, total: on_run(name, repeat, done, total)
