"""A quarter of the memory that is needed: what do recompute, swap and auto cost?

    python benchmarks/pressure/run.py [--model smollm2] [--repeats 3] [--json FILE]

The same requests, all there from the start, greedy, EOS ignored, on one backend with 25 % of the KV memory
that they need at once. Policies take turns within each repeat, in another order each time, so that whatever
else the machine does meets all of them. An engine first serves one prompt of another text, so that `auto` has
a speed to predict with. Wall time and processor time of the process are both recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from vattn import LLM, SamplingParams
from vattn.lab.bench.environment import environment
from vattn.lab.bench.tiny import load_for_bench
from vattn.models.attention import register_attention
from vattn.models.loader import LoadedModel

MODES = ("recompute", "swap", "auto")
SHARE = 0.25


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)


def serve(
    loaded: LoadedModel, prompts: list[list[int]], output: int, mode: str, options: dict[str, Any]
) -> dict[str, Any]:
    """One run of one policy."""
    with LLM(loaded, preemption=mode, swap_space_bytes=1 << 30, **options) as llm:
        llm.generate([prompts[0][::-1]], greedy(4), use_tqdm=False)
        before = llm.metrics()
        cpu, start = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, greedy(output), use_tqdm=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        metrics, records = llm.metrics(), list(llm.engine.scheduler.preemption.records)
        chosen = [
            (r.predicted_recompute_s, r.predicted_swap_s)
            for r in records
            if r.predicted_recompute_s is not None and r.predicted_swap_s is not None
        ]
        return {
            "mode": mode,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "finished": sum(o.outputs[0].finish_reason == "length" for o in outputs),
            "preemptions": metrics.preemptions,
            "swapped": metrics.swapped_requests,
            "recomputed_tokens": metrics.recomputed_tokens,
            "computed_tokens": metrics.computed_tokens - before.computed_tokens,
            "swap_bytes": metrics.kv_stats.swap_out_bytes + metrics.kv_stats.swap_in_bytes,
            "swap_seconds": metrics.kv_stats.swap_seconds,
            "last_finished_s": max(o.metrics.finished_time for o in outputs) - start,
            "predicted_recompute_s": sum(r for r, _ in chosen),
            "predicted_swap_s": sum(s for _, s in chosen),
            "actual_s": sum(r.actual_s or 0.0 for r in records),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-backend", default="virtual")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--output", type=int, default=40, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    register_attention()
    loaded = load_for_bench(args.model)
    spec = loaded.spec
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, spec.vocab_size, (args.requests, args.prompt)).tolist()
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    need = args.requests * (args.prompt + args.output) * token_bytes
    options = {
        "kv_backend": args.kv_backend,
        "kv_layout": "interleaved",  # so little memory would be one page in each of per_layer's ranges
        "max_model_len": args.prompt + args.output,
        "max_num_seqs": args.requests,
        "kv_cache_memory_bytes": int(SHARE * need),
        "enable_prefix_caching": False,
    }
    plenty = {**options, "kv_cache_memory_bytes": 2 * need}
    expected = serve(loaded, prompts, args.output, "recompute", plenty).pop("tokens")
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats):
        for mode in MODES[repeat % 3 :] + MODES[: repeat % 3]:
            run = serve(loaded, prompts, args.output, mode, options)
            run["tokens_equal"] = run.pop("tokens") == expected
            runs[mode].append(run)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in run.items()}, flush=True)
    summary: dict[str, Any] = {}
    for unit in ("seconds", "cpu_seconds"):
        median = {mode: statistics.median(r[unit] for r in runs[mode]) for mode in MODES}
        both = median["recompute"], median["swap"]
        summary[unit] = {
            **median,
            "auto_over_better": median["auto"] / min(both),
            "auto_over_worse": median["auto"] / max(both),
        }
        print(unit, {k: round(v, 3) for k, v in summary[unit].items()})
    if args.json is not None:
        report = {
            "share": SHARE,
            "needed_bytes": need,
            "options": options,
            "requests": {"count": args.requests, "prompt": args.prompt, "output": args.output},
            "model": args.model,
            "runs": runs,
            "medians": summary,
            "environment": environment(),
        }
        args.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
