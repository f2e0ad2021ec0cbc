"""Cases from a bench JSON: one per run, from its repeat of median duration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vattn.lab.bench.bench_record import Bench, Run
from vattn.lab.bench.geometry import token_bytes, unit_tokens
from vattn.lab.doctor.case import Case, Length, Steps


def bench_case(bench: Bench, run: Run) -> Case:
    """One run."""
    counters, metrics = run.counters, run.repeat.get("metrics") or {}
    done = [r for r in run.requests if r.get("error") is None]
    failed = [r for r in run.requests if r.get("error") is not None]
    options, limits = run.options, bench.limits
    rate = bench.arrivals.get("rate")
    budget = options.get("kv_cache_memory_bytes") or limits.get("kv_memory_bytes")
    return Case(
        name=run.name,
        backend=run.backend,
        model=run.record.get("model") or bench.model,
        budget=budget,
        max_num_seqs=options.get("max_num_seqs") or limits.get("max_num_seqs"),
        max_num_batched_tokens=options.get("max_num_batched_tokens") or limits.get("max_num_batched_tokens"),
        steps=_steps(run.steps),
        requests=done,
        lengths=[_length(r) for r in done],
        finished=int(metrics.get("completed") or len(done)),
        failed=int(metrics.get("failed") or len(failed)),
        errors=list(dict.fromkeys(str(r["error"]) for r in failed)),
        preemptions=_number(counters, "preemptions"),
        computed_tokens=_number(counters, "computed_tokens"),
        recomputed_tokens=_number(counters, "recomputed_tokens"),
        swap_bytes=_number(counters, "swap_out_bytes") + _number(counters, "swap_in_bytes"),
        swap_s=_number(counters, "swap_seconds"),
        map_stall_s=_number(counters, "map_stall_s"),
        busy_s=float(sum(run.steps.get("duration_s", ()))),
        prefix_queries=_number(counters, "prefix_query_tokens"),
        prefix_hits=_number(counters, "prefix_hit_tokens"),
        prefix_evictions=_number(counters, "prefix_evictions"),
        prefix_unshared=_number(counters, "prefix_tokens_unshared_by_page_size"),
        shareable=shareable_tokens(bench.workload, done),
        caching=run.backend != "static" and options.get("enable_prefix_caching") is not False,
        token_bytes=token_bytes(bench, run),
        unit_tokens=unit_tokens(bench, run),
        unit_bytes=run.kv.get("page_bytes"),
        layout=str(run.kv.get("layout", "")),
        kv_dtype=str(run.kv.get("kv_cache_dtype") or options.get("kv_cache_dtype") or "auto"),
        preemption=str(options.get("preemption", "recompute")),
        background_mapping=bool(options.get("background_mapping") or options.get("hidden_mapping")),
        device=str((run.record.get("model") or bench.model).get("device", "cpu")),
        arrival_rate=float(rate) if isinstance(rate, (int, float)) and math.isfinite(rate) else None,
        throughput=metrics.get("request_throughput"),
        barrier=run.record.get("batching") == "static",
        simulated=bench.kind == "simulate",
        summary=run.summary,
    )


def _number(counters: Mapping[str, Any], key: str) -> float:
    return float(counters.get(key) or 0)


def _length(request: Mapping[str, Any]) -> Length:
    outputs = max(1, int(request.get("outputs") or 1))
    return Length(float(request["prompt_len"]), float(request["output_len"]) / outputs)


def _steps(columns: Mapping[str, list[Any]]) -> Steps | None:
    if not columns.get("duration_s"):
        return None
    return Steps(**{name: np.asarray(columns[name], np.float64) for name in Steps.__dataclass_fields__})


def shareable_tokens(workload: Mapping[str, Any], done: list[Mapping[str, Any]]) -> float | None:
    """Prompt tokens that an earlier request had too, as the workload was designed; None where unknown."""
    if workload.get("name") == "shared-prefix":
        return float((workload["requests"] - workload["groups"]) * workload["prefix_len"])
    if workload.get("name") == "chat":
        own = workload["sessions"] * workload["turns"] * _mean(workload["prompt_len"])
        said = sum(float(r["prompt_len"]) for r in done)
        return max(0.0, said - float(own) - float(workload["prefix_len"]))
    return None


def _mean(lengths: Mapping[str, Any]) -> float:
    low, high = float(lengths["low"]), float(lengths["high"])
    if lengths["kind"] == "bimodal":
        return float(low + (high - low) * lengths["long_share"])
    if lengths["kind"] == "fixed" or low == high:
        return high
    return (low + high) / 2 if lengths["kind"] == "uniform" else (high - low) / math.log(high / low)
