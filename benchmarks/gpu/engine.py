"""Engine comparison: one model, one scheduler, the same requests; only who maps the KV cache differs.

    python -m benchmarks.gpu.engine --json FILE [--budget-s 200] [--dry]

All engines of a model live at once, on the same weights and with the same budget of KV memory, and are warmed
up (kernels compiled, decode graphs captured). Then they take turns, in rounds whose order rotates:

    saturation   all requests at once, more than fit: throughput, time to first token, time per token
    low load     1 and 8 requests: time per token when nothing queues

Figures are written after every run. When the time is spent, what is left is listed as not run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import survive
from benchmarks.gpu.models import random_model
from benchmarks.gpu.plans import DRY_PLANS, PLANS, Plan
from benchmarks.gpu.timing import Deadline
from vattn import LLM
from vattn.engine.listener import StepListener
from vattn.engine.scheduler import Batch
from vattn.kv.usage import MemoryUsage
from vattn.lab.bench.compare import BackendResult, run_backend
from vattn.lab.bench.environment import environment
from vattn.lab.bench.workload import RandomWorkload, WorkloadRequest
from vattn.metrics import EngineMetrics
from vattn.models.loader import LoadedModel, load_model
from vattn.vmm.driver import open_driver

BACKENDS: dict[str, dict[str, Any]] = {
    "virtual interleaved": {"kv_backend": "virtual", "kv_layout": "interleaved"},
    "paged 16": {"kv_backend": "paged", "block_size": 16},
    "virtual per_layer": {"kv_backend": "virtual", "kv_layout": "per_layer"},
    "paged 64": {"kv_backend": "paged", "block_size": 64},
    "static": {"kv_backend": "static"},
}
"""In the order in which a short budget should be spent."""

SAMPLE_EVERY = 8
"""Steps between two looks at the memory."""


@dataclass
class MemorySamples(StepListener):
    """Looks at the KV memory as the engine launches its steps."""

    llm: LLM
    steps: int = 0
    samples: list[MemoryUsage] = field(default_factory=list)

    def launched(self, batch: Batch) -> None:
        if self.steps % SAMPLE_EVERY == 0:
            self.samples.append(self.llm.engine.kv.usage())
        self.steps += 1

    def figures(self) -> dict[str, float]:
        """Peaks and means over the run, in bytes; utilization weighted by bytes."""
        mapped = sum(u.in_use + u.shared_saved for u in self.samples)
        logical = sum(u.logical for u in self.samples)
        return {
            "peak_in_use_bytes": max(u.in_use for u in self.samples),
            "peak_held_bytes": max(u.held for u in self.samples),
            "physical_bytes": max(u.physical for u in self.samples),
            "mean_logical_bytes": logical / len(self.samples),
            "kv_utilization": logical / mapped if mapped else 1.0,
        }


def measured(llm: LLM, requests: Sequence[WorkloadRequest]) -> tuple[dict[str, Any], list[list[int]]]:
    """Run the requests; figures of this run alone, and its tokens."""
    before, memory = llm.metrics(), MemorySamples(llm)
    stop = llm.listen(memory)
    try:
        result = run_backend("", llm, requests)
    finally:
        stop()
    return {**figures(result, before), **memory.figures()}, result.tokens


def books(llm: LLM) -> str:
    """Whether scheduler, cache and driver agree; asks the driver about every page, which takes time."""
    try:
        llm.check()
    except AssertionError as error:
        return survive.first_line(error)
    return "balance"


def figures(result: BackendResult, before: EngineMetrics) -> dict[str, Any]:
    """What happened between `before` and the end of the run."""
    after, summary = result.metrics, result.summary
    stall = after.kv_stats.map_stall_seconds - before.kv_stats.map_stall_seconds
    calls, old = after.kv_stats.driver_calls, before.kv_stats.driver_calls
    prompts = sum(len(output.prompt_token_ids) for output in result.outputs)
    return {
        "seconds": result.seconds,
        "steps": after.steps - before.steps,
        "output_tokens_per_s": result.output_throughput,
        "total_tokens_per_s": result.output_throughput + prompts / result.seconds,
        "ttft_ms": {"p50": summary.ttft.p50, "p99": summary.ttft.p99},
        "tpot_ms": {"mean": summary.tpot.mean, "p50": summary.tpot.p50, "p99": summary.tpot.p99},
        "map_stall_ms": stall * 1e3,
        "map_stall_share": stall / result.seconds,
        "driver_calls": {kind: n - old.get(kind, 0) for kind, n in calls.items()},
        "preemptions": after.preemptions - before.preemptions,
        "rows_adopted": after.kv_stats.rows_adopted - before.kv_stats.rows_adopted,
    }


def warm_up(llm: LLM, plan: Plan) -> None:
    """Compile what prompts need, then decode at every batch size on the way down, capturing its graph."""
    vocab = llm.loaded.spec.vocab_size
    longest, seqs = plan.saturation.prompt_len[1], llm.scheduler_config.max_num_seqs
    run_backend("", llm, RandomWorkload(3, (longest, longest), (2, 3)).generate(vocab))
    short = RandomWorkload(seqs, (4, 4), (1, 1)).generate(vocab)
    room = plan.max_model_len - 4
    ends = [WorkloadRequest(r.prompt_token_ids, min(room, 1 + i)) for i, r in enumerate(short)]
    run_backend("", llm, ends)


class Comparison:
    """The engines of one model."""

    def __init__(
        self, plan: Plan, device: torch.device, deadline: Deadline, state: dict[str, Any], path: Path
    ) -> None:
        self.plan, self.device, self.deadline = plan, device, deadline
        self.state = state
        self.store = partial(survive.store, path, state)
        self.note = partial(survive.note, path)
        # On a CPU with the smallest pages: a tiny model would fill none of the usual size.
        self.driver = open_driver("cpu", granularity=4096) if device.type == "cpu" else open_driver(device)
        self.engines: dict[str, LLM] = {}
        self.tokens: dict[str, tuple[str, list[list[int]]]] = {}

    def run(self) -> None:
        plan = self.plan
        started = time.perf_counter()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = random_model(plan.model, self.device, dtype)
        loaded = load_model(model, device=self.device)
        print(f"{plan.model}: weights in {time.perf_counter() - started:.1f} s", flush=True)
        try:
            for backend in BACKENDS:
                self.open(backend, loaded)
            self.rounds(loaded.spec.vocab_size)
        finally:
            for llm in self.engines.values():
                llm.close()
            self.engines.clear()
            self.driver.close()

    def open(self, backend: str, loaded: LoadedModel) -> None:
        """Start and warm up one engine, or record why it cannot be."""
        plan, key = self.plan, f"{self.plan.model}: {backend}"
        if key in self.state["fatal"]:
            self.fail(backend, self.state["fatal"][key])
            return
        self.note(key)
        started = time.perf_counter()
        try:
            llm = LLM(
                loaded,
                max_model_len=plan.max_model_len,
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                kv_cache_memory_bytes=plan.kv_bytes,
                driver=self.driver,
                **BACKENDS[backend],
            )
            self.engines[backend] = llm
            warm_up(llm, plan)
        except Exception as error:
            if survive.context_lost():
                raise
            self.close(backend)
            self.fail(backend, survive.first_line(error))
            return
        seconds = time.perf_counter() - started
        graphs = llm.runner.graphs
        self.state["engines"].append(
            {
                "model": plan.model,
                "backend": backend,
                "warm_up_s": seconds,
                "graphs": graphs is not None,
                "attention": type(llm.runner.attention).__name__,
                "kv": llm.describe_kv(),
                "kv_bytes": plan.kv_bytes,
                "driver_calls_of_warm_up": llm.metrics().kv_stats.driver_calls,
            }
        )
        self.store()
        self.note(None)
        print(f"  {backend}: ready in {seconds:.1f} s", flush=True)

    def rounds(self, vocab_size: int) -> None:
        work = {name: w.generate(vocab_size) for name, w in self.plan.work().items()}
        done = {
            (r["backend"], r["round"], r["work"]) for r in self.state["runs"] if r["model"] == self.plan.model
        }
        slowest: dict[str, float] = {}
        for number in range(self.plan.rounds):
            names = list(BACKENDS)
            for backend in names[number % len(names) :] + names[: number % len(names)]:
                for name, requests in work.items():
                    if backend not in self.engines or (backend, number, name) in done:
                        continue
                    if self.deadline.left < 1.2 * slowest.get(name, 0.0):
                        self.not_run(backend, f"round {number}, {name}: the time was spent")
                        continue
                    seconds = self.one(backend, number, name, requests)
                    slowest[name] = max(slowest.get(name, 0.0), seconds)

    def one(self, backend: str, number: int, name: str, requests: list[WorkloadRequest]) -> float:
        """One run; its seconds."""
        self.note(f"{self.plan.model}: {backend}")
        try:
            run, tokens = measured(self.engines[backend], requests)
            first_time = number == 0 and name == "saturation"
            run["books"] = books(self.engines[backend]) if first_time else None
        except Exception as error:
            if survive.context_lost():
                raise
            self.close(backend)
            self.fail(backend, f"round {number}, {name}: {survive.first_line(error)}")
            return 0.0
        first, reference = self.tokens.setdefault(name, (backend, tokens))
        equal = sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(tokens)
        self.state["runs"].append(
            {
                "model": self.plan.model, "backend": backend, "round": number, "work": name,
                "requests": len(requests), **run, "tokens_equal_share": equal, "tokens_equal_to": first,
            }
        )  # fmt: skip
        self.store()
        self.note(None)
        print(
            f"  {name}, round {number}, {backend}: {run['output_tokens_per_s']:,.1f} tokens/s, "
            f"TPOT {run['tpot_ms']['p50']:.2f} ms, stall {run['map_stall_share']:.3%} "
            f"({run['seconds']:.1f} s)",
            flush=True,
        )
        return float(run["seconds"])

    def close(self, backend: str) -> None:
        llm = self.engines.pop(backend, None)
        if llm is not None:
            llm.close()

    def fail(self, backend: str, reason: str) -> None:
        self.state["failed"].append({"model": self.plan.model, "backend": backend, "reason": reason})
        print(f"  {backend}: FAILED: {reason}", flush=True)

    def not_run(self, backend: str, reason: str) -> None:
        self.state["not_run"].append({"model": self.plan.model, "backend": backend, "reason": reason})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    deadline = Deadline(options.budget_s)
    device = torch.device("cpu" if options.dry else "cuda")
    plans = DRY_PLANS if options.dry else PLANS
    state = survive.load(options.json)
    state = {
        "environment": environment(), "dry": options.dry, "fatal": {}, "runs": [], **state,
        "engines": [], "failed": [], "not_run": [], "complete": False,
    }  # fmt: skip
    state["workloads"] = {plan.model: plan.describe() for plan in plans}
    for plan in plans:
        mine = Deadline(deadline.left * plan.share)
        comparison = Comparison(plan, device, mine, state, options.json)
        try:
            comparison.run()
        except Exception as error:
            if survive.context_lost():
                return survive.lost(options.json, state, error)
            state["failed"].append(
                {"model": plan.model, "backend": "all", "reason": survive.first_line(error)}
            )
            print(f"{plan.model}: FAILED: {survive.first_line(error)}")
        del comparison
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    state["complete"] = True
    survive.store(options.json, state)
    print(f"{len(state['runs'])} runs, {len(state['failed'])} failed, {len(state['not_run'])} not run")
    return 1 if state["failed"] or not state["runs"] else 0


if __name__ == "__main__":
    survive.leave(main())
