"""How far the simulator is from a real CPU run, and how fast it is.

    python benchmarks/simulator/run.py [--json FILE] [--model smollm2] [--speed-only]

1. calibrate: one workload on the real engine; step times are fitted to its steps;
2. predict: other workloads, simulated with that fit, then run for real; the errors are recorded. Where all
   requests arrive at once, memory is compared as well, every column of every step;
3. speed: 100,000 requests of a 70B model, in seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.engines import vattn_systems
from vattn.lab.bench.environment import environment
from vattn.lab.bench.interleaved_run import Limits, Plan, run
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.steps import MEMORY
from vattn.lab.bench.tiny import load_for_bench
from vattn.lab.bench.workload import RandomWorkload
from vattn.lab.simulator.calibrate import Fit, fit_steps
from vattn.lab.simulator.gpus import find_gpu
from vattn.lab.simulator.known_models import find_model
from vattn.lab.simulator.results import metrics
from vattn.lab.simulator.setup import Simulation, SimulationConfig, simulate
from vattn.lab.simulator.source import plan
from vattn.models.attention import register_attention
from vattn.models.loader import LoadedModel

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024, kv_memory_bytes=64 << 20)
KV = KVCacheConfig(
    backend="virtual", layout="per_layer", page_bytes=65536, memory_bytes=64 << 20, prefix_caching=True
)
CALIBRATE = RandomWorkload(32, Lengths("loguniform", 16, 384), Lengths("uniform", 8, 96), seed=0)
PREDICT = {
    "other lengths, all at once": (
        RandomWorkload(20, Lengths("uniform", 64, 512), Lengths("uniform", 16, 64), seed=1),
        Arrivals("at-once"),
    ),
    "short chats, all at once": (
        RandomWorkload(40, Lengths("uniform", 8, 48), Lengths("uniform", 32, 128), seed=2),
        Arrivals("at-once"),
    ),
    "the calibrated lengths, Poisson arrivals": (
        RandomWorkload(32, Lengths("loguniform", 16, 384), Lengths("uniform", 8, 96), seed=3),
        Arrivals("poisson", rate=1.0, seed=3),
    ),
}
KEYS = (
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p90_tpot_ms",
    "mean_e2el_ms",
    "p90_e2el_ms",
)


def real(loaded: LoadedModel, workload: RandomWorkload, arrivals: Arrivals) -> dict[str, Any]:
    """One repeat of the real engine, after its warm-up."""
    options = {
        "max_model_len": LIMITS.max_model_len,
        "max_num_seqs": LIMITS.max_num_seqs,
        "max_num_batched_tokens": LIMITS.max_num_batched_tokens,
        "kv_cache_memory_bytes": LIMITS.kv_memory_bytes,
    }
    systems = vattn_systems(
        loaded, ["virtual"], options, page_bytes=[KV.page_bytes], layouts=[str(KV.layout)]
    )
    report = run(Plan("serve", workload, arrivals, LIMITS, repeats=1), systems, loaded.spec.vocab_size)
    repeat: dict[str, Any] = report["runs"][0]["repeats"][0]
    return repeat


def simulated(
    loaded: LoadedModel, workload: RandomWorkload, arrivals: Arrivals, fit: Fit | None
) -> Simulation:
    """The same workload on paper."""
    spec = loaded.spec
    config = SimulationConfig(
        spec,
        find_gpu("h200"),  # any: prices are fitted
        tp=1,
        kv=KV,
        limits=SchedulerConfig(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens),
        max_model_len=LIMITS.max_model_len,
        kv_dtype=spec.dtype_name,
        granularity=KV.page_bytes,
        overlap=False,
        fit=fit,
    )
    return simulate(config, plan(workload, spec.vocab_size), arrivals)


def memory_differences(repeat: dict[str, Any], simulation: Simulation) -> list[str]:
    """Columns that differ in some step; empty: memory is equal."""
    steps = simulation.outcome.steps.to_dict()
    return [name for name in ("tokens", "running", *MEMORY) if repeat["steps"][name] != steps[name]]


def compare(repeat: dict[str, Any], simulation: Simulation) -> dict[str, Any]:
    """Both sides and the relative error of the simulated one."""
    found, measured = metrics(simulation), repeat["metrics"]
    figures = {}
    for key in KEYS:
        actual, guess = measured[key], found[key]
        figures[key] = {
            "measured": actual,
            "simulated": guess,
            "error": guess / actual - 1 if actual else None,  # type: ignore[operator]
        }
    return figures


def speed(requests: int = 100_000) -> list[dict[str, Any]]:
    """Seconds of CPU to simulate Llama-3-70B on two H200, as fast as it goes."""
    workload = RandomWorkload(requests, Lengths("loguniform", 16, 2048), Lengths("loguniform", 16, 512))
    rows = []
    for backend in ("virtual", "paged", "static"):
        config = SimulationConfig(
            find_model("llama-3-70b"),
            find_gpu("h200"),
            tp=2,
            kv=KVCacheConfig(backend=backend),  # type: ignore[arg-type]
            max_model_len=4096,
        )
        plans = plan(workload, config.model.vocab_size)
        wall, cpu = time.perf_counter(), time.process_time()
        found = simulate(config, plans, Arrivals("at-once"))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append(
            {
                "backend": backend,
                "requests": requests,
                "prompt_tokens": sum(p.prompt_len for p in plans),
                "output_tokens": sum(p.output_len for p in plans),
                "steps": len(found.outcome.steps),
                "preemptions": found.counters["preemptions"],
                "virtual_s": found.outcome.seconds,
                "wall_s": wall,
                "cpu_s": cpu,
                "requests_per_cpu_s": requests / cpu,
            }
        )
        print(
            f"speed, {backend}: {requests:,} requests in {cpu:.1f} s of CPU, {wall:.1f} s of wall time",
            flush=True,
        )
    return rows


def check(name: str) -> dict[str, Any]:
    """Calibrate, predict, measure."""
    torch.set_num_threads(1)
    register_attention()
    loaded = load_for_bench(name, "cpu")
    at_once = Arrivals("at-once")
    measured = real(loaded, CALIBRATE, at_once)
    shadow = simulated(loaded, CALIBRATE, at_once, None)
    differ = memory_differences(measured, shadow)
    work = shadow.outcome.steps.to_dict()
    columns = {**measured["steps"], **{k: work[k] for k in ("decode_kv_tokens", "prefill_pairs")}}
    token_bytes = shadow.config.kv_shape(1).token_bytes
    fit = fit_steps([columns], token_bytes)
    print(f"calibrated: {fit.sentence()}; memory: {differ or 'equal in every step'}")
    predictions = []
    for title, (workload, arrivals) in PREDICT.items():
        guess = simulated(loaded, workload, arrivals, fit)
        repeat = real(loaded, workload, arrivals)
        entry: dict[str, Any] = {
            "name": title,
            "workload": workload.describe(),
            "arrivals": arrivals.describe(),
            "figures": compare(repeat, guess),
        }
        if arrivals.kind == "at-once":
            entry["memory_columns_that_differ"] = memory_differences(repeat, guess)
        predictions.append(entry)
        print(title)
        for key, figure in entry["figures"].items():
            print(
                f"  {key:20} measured {figure['measured']:10,.1f}  simulated {figure['simulated']:10,.1f}  "
                f"{figure['error']:+.1%}"
            )
        print(f"  memory: {entry.get('memory_columns_that_differ', 'not compared') or 'equal in every step'}")
    return {
        "model": loaded.name,
        "limits": LIMITS.to_dict(),
        "calibration": {
            "workload": CALIBRATE.describe(),
            "fit": fit.to_dict(),
            "memory_columns_that_differ": differ,
        },
        "predictions": predictions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--speed-only", action="store_true")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"environment": environment()}
    if not arguments.speed_only:
        record |= check(arguments.model)
    record["speed"] = speed()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
