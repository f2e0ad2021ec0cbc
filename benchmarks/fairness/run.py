"""Two tenants on one engine, one sending twenty times the load: what the light one feels of it.

    python benchmarks/fairness/run.py [--model tiny] [--requests 40] [--load 0.15] [--json FILE]

The light tenant sends the same requests at the same times twice: alone, and beside a heavy tenant that sends
twenty times as many. A third run has both under one name, which is what happens without fair shares; it ends
with the fifth of the light requests, since they wait longer and longer. Greedy, EOS ignored. A request counts
from when it was due; the heavy tenant's rest is dropped when the light one is done.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vattn import LLM, SamplingParams
from vattn.engine.service import Service
from vattn.lab.bench.environment import environment
from vattn.lab.bench.tiny import load_for_bench
from vattn.models.attention import register_attention
from vattn.models.loader import LoadedModel

HEAVY_FACTOR = 20
OUTPUT = {"light": 8, "heavy": 32}


@dataclass(frozen=True)
class Arrival:
    """One request: seconds after the start when it is due, whose it is, and its prompt."""

    due: float
    tenant: str
    prompt: list[int]


def arrivals(tenant: str, count: int, interval: float, vocab_size: int) -> list[Arrival]:
    """Poisson arrivals `interval` seconds apart on average; prompts of 64 to 192 random tokens."""
    rng = np.random.default_rng(len(tenant))
    due = np.cumsum(rng.exponential(interval, count))
    lengths = rng.integers(64, 193, count)
    return [
        Arrival(float(t), tenant, rng.integers(3, vocab_size, n).tolist())
        for t, n in zip(due, lengths, strict=True)
    ]


@dataclass(frozen=True)
class First:
    """A light request's way to its first token."""

    seconds: float
    steps: int
    tokens: int
    """Tokens computed from its arrival to its first token, its own included."""


def play(llm: LLM, plan: list[Arrival], *, one_tenant: bool) -> Iterator[First]:
    """Send what is due, step, until every light request has its first token."""
    engine = llm.engine
    pending = {f"{a.tenant}{i}": a for i, a in enumerate(plan)}
    sent: dict[str, tuple[Arrival, int, int]] = {}
    queue = list(pending)
    left = sum(a.tenant == "light" for a in plan)
    start = time.perf_counter()
    while left:
        now = time.perf_counter() - start
        while queue and pending[queue[0]].due <= now:
            name = queue.pop(0)
            arrival = pending[name]
            service = Service(tenant="both" if one_tenant else arrival.tenant)
            params = SamplingParams(
                temperature=0, max_tokens=OUTPUT[arrival.tenant], ignore_eos=True, detokenize=False
            )
            light = arrival.tenant == "light"
            engine.add_request(name, arrival.prompt, params, service=service, stream=light)
            if light:
                sent[name] = (arrival, engine.metrics.steps, engine.metrics.computed_tokens)
        if not engine.has_work:
            time.sleep(max(0.0, pending[queue[0]].due - now))
            continue
        for delta in engine.step():
            if delta.request_id in sent:
                arrival, steps, tokens = sent.pop(delta.request_id)
                left -= 1
                yield First(
                    time.perf_counter() - start - arrival.due,
                    engine.metrics.steps - steps,
                    engine.metrics.computed_tokens - tokens,
                )


def measure(
    loaded: LoadedModel, plan: list[Arrival], one_tenant: bool, options: dict[str, Any]
) -> dict[str, Any]:
    with LLM(loaded, **options) as llm:
        list(play(llm, [Arrival(0.0, "light", [5] * 128)], one_tenant=False))  # warm up
        firsts = list(play(llm, plan, one_tenant=one_tenant))
        figures: dict[str, Any] = {}
        for unit, values in (
            ("ms", [1e3 * f.seconds for f in firsts]),
            ("steps", [f.steps for f in firsts]),
            ("tokens", [f.tokens for f in firsts]),
        ):
            for q in (50, 99):
                figures[f"p{q}_ttft_{unit}"] = float(np.percentile(values, q))
        metrics = llm.metrics()
        return {
            **figures,
            "requests": len(firsts),
            "steps": metrics.steps,
            "preemptions": metrics.preemptions,
        }


def seconds_alone(loaded: LoadedModel, vocab_size: int, options: dict[str, Any]) -> float:
    """What a light request takes, prompt and outputs, when the machine does nothing else; on average."""
    plan = arrivals("light", 8, 1.0, vocab_size)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT["light"], ignore_eos=True, detokenize=False)
    with LLM(loaded, **options) as llm:
        llm.generate(plan[0].prompt, params, use_tqdm=False)
        best = math.inf  # of three: what else runs on the machine must not make the load lighter
        for _ in range(3):
            start = time.perf_counter()
            for arrival in plan:
                llm.generate(arrival.prompt, params, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        return best / len(plan)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny (random weights), …")
    parser.add_argument("--requests", type=int, default=40, help="of the light tenant")
    parser.add_argument(
        "--load", type=float, default=0.15, help="of the light tenant, as a share of the machine"
    )
    parser.add_argument("--kv-backend", default="virtual")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {
        "kv_backend": args.kv_backend,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 128 << 20,
    }
    register_attention()
    loaded = load_for_bench(args.model)
    vocab = loaded.spec.vocab_size
    interval = seconds_alone(loaded, vocab, options) / args.load
    print(f"a light request every {interval:.2f} s", flush=True)
    light = arrivals("light", args.requests, interval, vocab)
    heavy = arrivals("heavy", HEAVY_FACTOR * args.requests, interval / HEAVY_FACTOR, vocab)
    both = sorted(light + heavy, key=lambda a: a.due)
    runs = {
        "alone": measure(loaded, light, False, options),
        "beside heavy, fair shares": measure(loaded, both, False, options),
        "beside heavy, one tenant": measure(
            loaded, [a for a in both if a.due <= light[4].due], True, options
        ),
    }
    for name, figures in runs.items():
        print(name, {k: round(v, 1) for k, v in figures.items()}, flush=True)
    ratios = {
        unit: runs["beside heavy, fair shares"][f"p99_ttft_{unit}"] / runs["alone"][f"p99_ttft_{unit}"]
        for unit in ("ms", "steps", "tokens")
    }
    print("p99 TTFT beside the heavy tenant over alone:", {k: round(v, 2) for k, v in ratios.items()})
    if args.json is not None:
        report = {
            "runs": runs,
            "p99_ttft_ratio": ratios,
            "options": options,
            "light": {
                "requests": args.requests,
                "interval_s": interval,
                "load": args.load,
                "output": OUTPUT["light"],
            },
            "heavy": {"factor": HEAVY_FACTOR, "output": OUTPUT["heavy"]},
            "model": args.model,
            "environment": environment(),
        }
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
