"""What sharing saves on a CPU: prefill work, time to the first token, KV of branches.

    python benchmarks/prefix/run.py [--requests 32] [--prefix 1024] [--rounds 3] [--json FILE]

1. `--requests` requests with a common prefix of `--prefix` tokens arrive at once, on each backend with
   prefix caching on and off. A round runs all of them; ratios are taken within a round.
2. One prompt of `--prefix` tokens with n=1, n=8 and 4 beams: KV held when every branch has its first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vattn import LLM, BeamSearchParams, SamplingParams
from vattn.lab.bench.compare import run_backend, tokens_equal
from vattn.lab.bench.environment import environment
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import SharedPrefixWorkload
from vattn.models.loader import LoadedModel, load_model

BACKENDS: dict[str, dict[str, Any]] = {
    "virtual": {"kv_backend": "virtual"},
    "paged": {"kv_backend": "paged"},
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "virtual-per_layer-4KiB": {"kv_backend": "virtual", "kv_layout": "per_layer", "page_bytes": 4 << 10},
    "virtual-per_layer-16KiB": {"kv_backend": "virtual", "kv_layout": "per_layer", "page_bytes": 16 << 10},
    "virtual-per_layer-64KiB": {"kv_backend": "virtual", "kv_layout": "per_layer", "page_bytes": 64 << 10},
    "virtual-interleaved": {"kv_backend": "virtual", "kv_layout": "interleaved"},
    "virtual-interleaved-2MiB": {"kv_backend": "virtual", "kv_layout": "interleaved", "page_bytes": 2 << 20},
    "paged": {"kv_backend": "paged"},
}
OUTPUT = 4
OWN = 16
"""Tokens of a request behind the prefix."""


@dataclass(frozen=True)
class Settings:
    requests: int
    prefix: int
    rounds: int


def make(loaded: LoadedModel, prefix: int, **options: Any) -> LLM:
    """Memory is no limit: what is measured is what is needed."""
    length = prefix + 64
    return LLM(loaded, max_model_len=length, kv_cache_memory_bytes=3 << 30, max_num_seqs=32, **options)


def first_tokens(loaded: LoadedModel, s: Settings) -> dict[str, Any]:
    """Part 1."""
    own, output = Lengths.parse(str(OWN)), Lengths.parse(str(OUTPUT))
    work = SharedPrefixWorkload(s.requests, 1, s.prefix, own, output).generate(loaded.spec.vocab_size)
    out: dict[str, Any] = {name: {"rounds": []} for name in BACKENDS}
    for number in range(s.rounds):
        results = []
        for name, options in BACKENDS.items():
            figures: dict[str, Any] = {}
            for caching in (True, False) if number % 2 else (False, True):
                with make(loaded, s.prefix, enable_prefix_caching=caching, **options) as llm:
                    result = run_backend(name, llm, work)
                results.append(result)
                report = result.to_dict()
                figures["on" if caching else "off"] = {
                    key: report[key]
                    for key in (
                        "median_ttft_ms", "p99_ttft_ms", "duration_s", "computed_tokens", "prefix_hit_tokens",
                        "units_shared", "tails_copied", "bytes_copied", "prefix_tokens_unshared_by_page_size",
                        "peak_in_use_bytes", "peak_shared_saved_bytes", "driver_calls",
                    )
                }  # fmt: skip
                print(
                    name,
                    "caching" if caching else "no caching",
                    figures["on" if caching else "off"],
                    flush=True,
                )
            figures["ttft_p50_ratio"] = figures["off"]["median_ttft_ms"] / figures["on"]["median_ttft_ms"]
            out[name]["rounds"].append(figures)
        assert tokens_equal(results), "caching and backends change no token"
    for name in BACKENDS:
        ratios = [figures["ttft_p50_ratio"] for figures in out[name]["rounds"]]
        out[name]["ttft_p50_ratio"] = {
            "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "n": len(ratios)
        }  # fmt: skip
    return out


def held(llm: LLM, prompt: Sequence[int], params: SamplingParams | BeamSearchParams) -> dict[str, int]:
    """KV when every branch has its first token and the room for it."""
    branches = params.n if isinstance(params, SamplingParams) else params.beam_width + 1
    llm.engine.kv.reset_prefix_cache()
    llm.engine.add_request("r", list(prompt), params)
    before = llm.engine.metrics.output_tokens
    while llm.engine.metrics.output_tokens - before < branches:
        llm.engine.step()
    usage = llm.memory_usage()
    llm.engine.abort("r")
    llm.engine.take_deltas()
    return {
        "in_use_bytes": usage.in_use,
        "shared_saved_bytes": usage.shared_saved,
        "logical_bytes": usage.logical,
    }


def branches(loaded: LoadedModel, s: Settings) -> dict[str, Any]:
    """Part 2."""
    [request] = SharedPrefixWorkload(
        1, 1, s.prefix - 1, Lengths.parse("1"), Lengths.parse("1"), seed=1
    ).generate(loaded.spec.vocab_size)
    kinds: dict[str, SamplingParams | BeamSearchParams] = {
        "n=1": SamplingParams(max_tokens=9, ignore_eos=True),
        "n=8": SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True),
        "beam 4": BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True),
    }
    out = {}
    for name, options in SYSTEMS.items():
        with make(loaded, s.prefix, **options) as llm:
            figures: dict[str, Any] = {k: held(llm, request.prompt_token_ids, p) for k, p in kinds.items()}
            one = figures["n=1"]["in_use_bytes"]
            for kind in ("n=8", "beam 4"):
                figures[f"{kind} / n=1"] = figures[kind]["in_use_bytes"] / one
            out[name] = {"kv": llm.describe_kv(), **figures}
        print(name, {k: round(v, 3) for k, v in figures.items() if isinstance(v, float)}, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = Settings(args.requests, args.prefix, args.rounds)
    loaded = load_model(args.model, device="cpu")
    report = {
        "benchmark": "prefix",
        "model": args.model,
        "requests": settings.requests,
        "prefix_len": settings.prefix,
        "own_len": OWN,
        "output_len": OUTPUT,
        "branches": branches(loaded, settings),
        "shared_prefix": first_tokens(loaded, settings),
        "environment": environment(),
    }
    for name, figures in report["shared_prefix"].items():
        print(name, "TTFT p50, caching off / on:", figures["ttft_p50_ratio"])
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
