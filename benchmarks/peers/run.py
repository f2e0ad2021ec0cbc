"""Throughput on CPU: vattn's backends against transformers, interleaved in one run.

    python benchmarks/peers/run.py [--requests 32] [--rounds 3] [--json FILE]

Every engine gets the same requests (random tokens, EOS ignored) and the same threads. A round runs each
engine once, in an order that rotates; figures are medians over rounds, ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from vattn import LLM
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.compare import run_backend
from vattn.lab.bench.environment import environment
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.load import drive
from vattn.lab.bench.peers.generate_batch import GenerateBatch
from vattn.lab.bench.timeline import duration
from vattn.lab.bench.workload import RandomWorkload, WorkloadRequest
from vattn.models.loader import LoadedModel, load_model

Engine = Callable[[list[WorkloadRequest]], float]
"""Runs the requests, returns output tokens per second."""

VATTN = {
    "vattn virtual": {"kv_backend": "virtual", "kv_layout": "interleaved"},
    "vattn virtual per-layer": {"kv_backend": "virtual", "kv_layout": "per_layer"},
    "vattn virtual per-layer 64 KiB": {
        "kv_backend": "virtual",
        "kv_layout": "per_layer",
        "page_bytes": 64 << 10,
    },
    "vattn paged": {"kv_backend": "paged"},
    "vattn static": {"kv_backend": "static", "kv_layout": "interleaved"},
}


def vattn_engine(loaded: LoadedModel, options: dict[str, str]) -> Engine:
    """All requests at once; memory is no limit, so that speed alone is compared."""

    def run(requests: list[WorkloadRequest]) -> float:
        with LLM(loaded, max_model_len=1024, kv_cache_memory_bytes=4 << 30, **options) as llm:  # type: ignore[arg-type]
            return run_backend("", llm, requests).output_throughput

    return run


def generate_batch(name: str, loaded: LoadedModel) -> Engine:
    """transformers' continuous batching; started before the clock, each request with its own length."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024, kv_memory_bytes=1 << 30)
    system = GenerateBatch(name, loaded, limits)

    def run(requests: list[WorkloadRequest]) -> float:
        with system.open() as target:
            timelines = drive(requests, Arrivals("at-once"), target)
        assert [t.output_len for t in timelines] == [r.output_len for r in requests], "it stopped early"
        return sum(t.output_len for t in timelines) / duration(timelines)

    return run


def sequential(model: PreTrainedModel, sample: int) -> Engine:
    """`model.generate`, one request after another; every n-th request, so that `sample` of them run."""

    def run(requests: list[WorkloadRequest]) -> float:
        chosen = sorted(requests, key=lambda r: len(r.prompt_token_ids))[:: max(1, len(requests) // sample)]
        started = time.perf_counter()
        for r in chosen:
            ids = torch.tensor([r.prompt_token_ids])
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=r.output_len,
                min_new_tokens=r.output_len,
                do_sample=False,
                pad_token_id=0,
            )
        return sum(r.output_len for r in chosen) / (time.perf_counter() - started)

    return run


def hf_model(name: str) -> PreTrainedModel:
    """The same checkpoint as transformers loads it, with its own attention and linear layers."""
    return load_model(name, device="cpu", attn_implementation="sdpa", prepare=False).model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", default="16:512")
    parser.add_argument("--output-len", default="16:128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequential-sample", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    low_high = lambda text: tuple(int(x) for x in text.split(":"))  # noqa: E731
    workload = RandomWorkload(args.requests, low_high(args.prompt_len), low_high(args.output_len))

    loaded = load_model(args.model, device="cpu")
    engines: dict[str, Engine] = {name: vattn_engine(loaded, options) for name, options in VATTN.items()}
    engines["transformers generate_batch"] = generate_batch(args.model, loaded)
    engines["transformers generate"] = sequential(hf_model(args.model), args.sequential_sample)

    requests = workload.generate(loaded.spec.vocab_size)
    warm = RandomWorkload(2, (16, 16), (4, 4), seed=1).generate(loaded.spec.vocab_size)
    for engine in engines.values():
        engine(warm)
    rounds: list[dict[str, float]] = []
    names = list(engines)
    for i in range(args.rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        rounds.append({name: engines[name](requests) for name in order})
        print(f"round {i + 1}: " + ", ".join(f"{n} {rounds[-1][n]:.1f}" for n in names), flush=True)

    base = "vattn virtual"
    report = {
        "environment": environment(),
        "workload": vars(workload),
        "output_tokens": sum(r.output_len for r in requests),
        "rounds": rounds,
        "output_throughput": {n: statistics.median(r[n] for r in rounds) for n in names},
        "virtual_over": {n: statistics.median(r[base] / r[n] for r in rounds) for n in names},
    }
    print(f"\n{'engine':30}{'tokens/s':>10}{'spread':>18}{'virtual / it':>14}")
    for n in names:
        values = [r[n] for r in rounds]
        spread = f"{min(values):.1f}-{max(values):.1f}"
        print(f"{n:30}{report['output_throughput'][n]:10.1f}{spread:>18}{report['virtual_over'][n]:14.2f}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
