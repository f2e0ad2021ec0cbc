"""Two checkouts of vattn against each other: the same requests, interleaved, one process each.

    python benchmarks/peers/versions.py --before ../vattn-old --after . --json FILE

Both processes load the model first. Then they take turns, so that only one of them computes at a time; which
one begins changes from round to round. A ratio is taken within a round: after / before, so 1.05 means that
the newer checkout is 5 % faster. Only public names are used, so that any two versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BACKENDS = ("virtual", "paged", "static")


def worker(model: str, count: int, prompt_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """Read a backend's name per line, run all requests on it, and write output tokens per second."""
    from vattn import LLM, SamplingParams
    from vattn.models.loader import load_model

    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(rng.randint(*prompt_len))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(*output_len), ignore_eos=True, detokenize=False)
        for _ in range(count)
    ]
    loaded = load_model(model, device="cpu")
    print("ready", flush=True)
    for line in sys.stdin:
        options: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 4 << 30}
        with LLM(loaded, kv_backend=line.strip(), enable_prefix_caching=False, **options) as llm:
            llm.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        print(json.dumps(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds), flush=True)


class Checkout:
    """One checkout's process."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        asked = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        self.commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.commit} ended")
        return line

    def run(self, backend: str) -> float:
        """Output tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(backend + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._read()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def span(text: str) -> tuple[int, int]:
    low, high = text.split(":")
    return int(low), int(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path("."))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=span, default=(16, 512))
    parser.add_argument("--output-len", type=span, default=(16, 128))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.model, args.requests, args.prompt_len, args.output_len)
        return
    if args.before is None:
        parser.error("--before must name a checkout")
    lengths = [f"{low}:{high}" for low, high in (args.prompt_len, args.output_len)]
    passed = ["--model", args.model, "--requests", str(args.requests)]
    passed += ["--prompt-len", lengths[0], "--output-len", lengths[1]]
    sides = {"before": Checkout(args.before, passed), "after": Checkout(args.after, passed)}
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for backend in BACKENDS:
            order = ["before", "after"] if number % 2 == 0 else ["after", "before"]
            rates = {side: sides[side].run(backend) for side in order}
            rounds.append({"backend": backend, "load": os.getloadavg()[0], **rates})
            print(f"{backend:8s} before {rates['before']:7.1f}  after {rates['after']:7.1f} tokens/s")
    for checkout in sides.values():
        checkout.close()
    summary: dict[str, Any] = {}
    for backend in BACKENDS:
        ratios = [r["after"] / r["before"] for r in rounds if r["backend"] == backend]
        summary[backend] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{backend:8s} after / before: {statistics.median(ratios):.3f} ({spread})")
    if args.json:
        record = {
            "format": "vattn-versions-1",
            "date": time.strftime("%Y-%m-%d"),
            "commits": {side: checkout.commit for side, checkout in sides.items()},
            "model": args.model,
            "requests": args.requests,
            "prompt_len": args.prompt_len,
            "output_len": args.output_len,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "rounds": rounds,
            "ratios": summary,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
