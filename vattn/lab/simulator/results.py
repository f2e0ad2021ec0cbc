"""A simulation as a bench JSON (`vattn-bench-1`, kind "simulate"): what the report and the doctor read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vattn.lab.bench.serving import Samples, Served
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.steps import StepLog
from vattn.lab.simulator.request import SimulatedRequest
from vattn.lab.simulator.setup import Simulation

Array = npt.NDArray[np.float64]
DETAILED_TOKENS = 2_000_000
"""With more output tokens `itl_s` stays empty: the file would be hundreds of megabytes."""


class Latencies:
    """Per-request times of a simulation, in seconds; failed requests are left out, as in vLLM."""

    def __init__(self, simulation: Simulation) -> None:
        steps = simulation.outcome.steps
        self.ends: Array = np.asarray(steps.time_s) + np.asarray(steps.duration_s)
        """When the tokens of each step were known."""
        self.done = [r for r in simulation.outcome.requests if r.error is None]
        m = [r.metrics for r in self.done]
        arrival = np.array([x.arrival_time for x in m])
        first = np.array([x.first_token_time for x in m], np.float64)
        finished = np.array([x.finished_time for x in m], np.float64)
        self.outputs = np.array([x.num_output_tokens for x in m], np.int64)
        self.ttft: Array = first - arrival
        self.e2el: Array = finished - arrival
        several = self.outputs > 1
        self.tpot_or_zero: Array = np.where(several, (finished - first) / np.maximum(self.outputs - 1, 1), 0)
        self.tpot: Array = self.tpot_or_zero[several]

    def itl(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Gaps between tokens and how often each occurs: all requests of a step share its gap."""
        starts = np.zeros(len(self.ends) + 1, np.int64)
        jumps: list[float] = []
        for request in self.done:
            spans = request.token_steps()
            for span in spans:
                starts[span.start + 1] += 1
                starts[span.stop] -= 1
            jumps += [float(self.ends[b.start] - self.ends[a.stop - 1]) for a, b in pairwise(spans)]
        counts = np.cumsum(starts)[1 : len(self.ends)]
        gaps = np.concatenate([np.diff(self.ends), np.array(jumps)])
        times = np.concatenate([counts, np.ones(len(jumps), np.int64)])
        return gaps[times > 0], times[times > 0]

    def gaps_of(self, request: SimulatedRequest) -> list[float]:
        """One request's inter-token latencies."""
        steps = [step for span in request.token_steps() for step in span]
        return [float(x) for x in np.diff(self.ends[steps])]

    def good(self, slo: Slo) -> int:
        """Requests that keep every limit."""
        kept = np.ones(len(self.done), np.bool_)
        for name, seconds in (("ttft", self.ttft), ("tpot", self.tpot_or_zero), ("e2el", self.e2el)):
            limit = getattr(slo, name)
            if limit is not None:
                kept &= seconds * 1e3 <= limit
        return int(kept.sum())


def metrics(simulation: Simulation, slo: Slo | None = None) -> dict[str, float | int | None]:
    """The serving metrics of a simulation, without a list of every token."""
    latencies = Latencies(simulation)
    return Served(
        max((r.metrics.finished_time or 0.0 for r in simulation.outcome.requests), default=0.0),
        len(simulation.outcome.requests),
        len(latencies.done),
        sum(r.prompt_len for r in latencies.done),
        int(latencies.outputs.sum()),
        {
            "ttft": Samples(latencies.ttft),
            "tpot": Samples(latencies.tpot),
            "itl": Samples(*latencies.itl()),
            "e2el": Samples(latencies.e2el),
        },
        None if slo is None else latencies.good(slo),
    ).metrics()


def describe_model(simulation: Simulation) -> dict[str, Any]:
    """The `model` part of the JSON. `token_bytes` is one device's share."""
    config, model = simulation.config, simulation.config.model
    assert config.tp is not None
    return {
        "name": model.name,
        "token_bytes": config.kv_shape(config.tp).token_bytes,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "dtype": config.weight_dtype,
        "weight_bytes": config.weight_bytes,
        "parameters": model.num_params,
        "max_model_len": simulation.max_model_len,
        "device": f"{config.tp} x {config.gpu.name} (simulated)",
        "tp": config.tp,
    }


def describe_run(name: str, simulation: Simulation, slo: Slo | None, *, detail: bool) -> dict[str, Any]:
    """One entry of `runs`. `detail`: with every request and step."""
    config, outcome = simulation.config, simulation.outcome
    log = StepLog()
    log.columns |= outcome.steps.to_dict()
    log.columns["attention_s"] = [None] * len(outcome.steps)
    measured = metrics(simulation, slo)
    repeat: dict[str, Any] = {
        "duration_s": outcome.seconds,
        "metrics": {**measured, **log.metrics()},
        "counters": simulation.counters,
    }
    if detail:
        repeat |= {"requests": _requests(simulation), "steps": log.to_dict()}
    values = {k: v for k, v in repeat["metrics"].items() if v is not None}
    return {
        "name": name,
        "options": {
            "kv_backend": config.kv.backend,
            "kv_layout": config.kv.layout,
            "page_bytes": config.kv.page_bytes,
            "block_size": config.kv.block_size,
            "kv_cache_memory_bytes": config.kv.memory_bytes,
            "max_num_seqs": config.limits.max_num_seqs,
            "max_num_batched_tokens": config.limits.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "gpu": config.gpu.name,
            "tp": config.tp,
            "overlap": config.overlap,
            "hidden_mapping": config.hidden_mapping,
        },
        "model": describe_model(simulation),
        "kv": simulation.kv,
        "cost": simulation.cost,
        "repeats": [repeat],
        "summary": {k: {"median": v, "low": v, "high": v, "n": 1} for k, v in values.items()},
    }


def _requests(simulation: Simulation) -> list[dict[str, Any]]:
    latencies = Latencies(simulation)
    detailed = int(latencies.outputs.sum()) <= DETAILED_TOKENS
    return [
        {
            "id": str(r.plan),
            "arrival_s": r.metrics.arrival_time,
            "first_scheduled_s": r.metrics.first_scheduled_time,
            "first_token_s": r.metrics.first_token_time,
            "finished_s": r.metrics.finished_time,
            "itl_s": latencies.gaps_of(r) if detailed else [],
            "prompt_len": r.prompt_len,
            "output_len": r.metrics.num_output_tokens,
            "outputs": 1,
            "cached_tokens": r.metrics.num_cached_tokens,
            "preemptions": r.metrics.num_preemptions,
            "finish_reason": "length" if r.error is None else "error",
            **({"error": r.error} if r.error is not None else {}),
        }
        for r in simulation.outcome.requests
    ]


def report(
    simulations: Mapping[str, Simulation],
    workload: dict[str, Any],
    arrivals: dict[str, Any],
    slo: Slo | None,
    conclusions: Sequence[str],
    *,
    detail: bool = True,
) -> dict[str, Any]:
    """The whole JSON. `model` and `limits` are the first run's; each run says its own."""
    from vattn.lab.bench.bench_report import FORMAT
    from vattn.lab.bench.environment import environment

    first = next(iter(simulations.values()))
    return {
        "format": FORMAT,
        "kind": "simulate",
        "environment": environment(),
        "model": describe_model(first),
        "workload": workload,
        "arrivals": arrivals,
        "limits": {
            "max_num_seqs": first.config.limits.max_num_seqs,
            "max_num_batched_tokens": first.config.limits.max_num_batched_tokens,
            "max_model_len": first.max_model_len,
            "kv_memory_bytes": first.config.kv.memory_bytes,
        },
        "goodput_slo": None if slo is None else slo.to_dict(),
        "runs": [describe_run(name, s, slo, detail=detail) for name, s in simulations.items()],
        "conclusions": list(conclusions),
    }
