"""VirtualCache against transformers' own caches, on CPU: time per token and peak memory by context length.

python benchmarks/hf_cache/run.py                 all of it, into benchmarks/results
python benchmarks/hf_cache/run.py --smoke         a toy model in seconds, to see that everything runs
python benchmarks/hf_cache/run.py --plot-only     the picture again from the JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from caches import build, factories, models, token_bytes, usable
from measure import cache_time, model_time, peak_memory
from plot import plot

CONTEXTS = [512, 1024, 2048, 4096, 8192, 16384]
TABLES = (
    ("cache_s", "cache alone, a token"),
    ("model_s", "whole model, a token"),
    ("prompt_s", "cache alone, a prompt of that length"),
)
SLOW_ROUNDS = 2  # of quantized caches, which take seconds for a token
RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Measure, print, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--steps", type=int, default=8, help="tokens timed in each")
    parser.add_argument("--out", type=Path, default=RESULTS / "hf_cache.json")
    options = parser.parse_args()
    if options.plot_only:
        plot(json.loads(options.out.read_text()), options.out.with_suffix(".png"))
        return
    contexts = options.contexts
    if options.smoke:
        options.rounds, options.steps, contexts = 1, 2, [64, 128]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    report: dict[str, Any] = {"environment": _environment(), "contexts": contexts, "models": {}}
    for name, config in models(options.smoke).items():
        report["models"][name] = _measure(config, contexts, options.rounds, options.steps)
        _print(name, report["models"][name], contexts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(report, options.out.with_suffix(".png"))


def _measure(config: Any, contexts: list[int], rounds: int, steps: int) -> dict[str, Any]:
    makes = factories(config, contexts[-1] + 64)
    absent = {cache: why for cache, make in makes.items() if (why := usable(make, config))}
    makes = {cache: make for cache, make in makes.items() if cache not in absent}
    model = build(config)
    series: dict[str, dict[str, list[list[float]]]] = {
        kind: {cache: [[] for _ in contexts] for cache in makes} for kind, _ in TABLES
    }
    for index, context in enumerate(contexts):
        turns = [
            (cache, make)
            for turn in range(rounds)  # one after the other: what the machine does besides hits all of them
            for cache, make in makes.items()
            if turn < SLOW_ROUNDS or not cache.startswith("quantized")
        ]
        for cache, make in turns:
            prompt_s, token_s = cache_time(make, config, context, steps)
            series["prompt_s"][cache][index].append(prompt_s)
            series["cache_s"][cache][index].append(token_s)
        for cache, make in turns:
            series["model_s"][cache][index].append(model_time(model, make, context, steps))
        print(f"  {context} tokens: timed", file=sys.stderr, flush=True)
    del model
    memory = {
        cache: [peak_memory(make, config, context, min(32, context // 2)) for context in contexts]
        for cache, make in makes.items()
    }
    return {"token_bytes": token_bytes(config), "absent": absent, "memory": memory, **series}


def _print(name: str, result: dict[str, Any], contexts: list[int]) -> None:
    print(f"\n{name}: {result['token_bytes']:,} bytes of KV per token")
    for kind, title in TABLES:
        print(f"  {title}, ms: median (least to most); how many times dynamic's time")
        print("  " + "".join(f"{column:>27}" for column in ("", *contexts)))
        for cache, rows in result[kind].items():
            cells = []
            for row, dynamic in zip(rows, result[kind]["dynamic"], strict=True):
                ratio = statistics.median(ours / theirs for ours, theirs in zip(row, dynamic, strict=False))
                low, middle, high = (1e3 * f(row) for f in (min, statistics.median, max))
                cells.append(f"{middle:9.2f} ({low:.2f}-{high:.2f}) {ratio:4.2f}x")
            print("  " + "".join(f"{cell:>27}" for cell in (cache, *cells)))
    print("  peak memory, MiB, and how much more than the tokens need")
    for cache, peaks in result["memory"].items():
        cells = []
        for peak, context in zip(peaks, contexts, strict=True):
            used = result["token_bytes"] * (context + 1)
            cells.append(f"{peak['peak'] / 2**20:9.1f} {(peak['peak'] - used) / 2**20:+9.1f}")
        print("  " + "".join(f"{cell:>27}" for cell in (cache, *cells)))
    for cache, why in result["absent"].items():
        print(f"  {cache} did not run: {why}")


def _environment() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu,
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel": platform.release(),
    }


if __name__ == "__main__":
    main()
