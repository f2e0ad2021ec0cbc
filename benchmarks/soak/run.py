"""Thousands of short requests with aborts, resizes, sleep, swap, samples, beams, prefixes: what leaks?

    python benchmarks/soak/run.py [--requests 10000] [--backend NAME …] [--json FILE]

Each backend serves `--requests` requests with a model of random weights, a quarter or half of the memory
they could use, and a little of everything that takes or gives memory. Open descriptors, mappings, address
space and resident memory of the process are read after a tenth of the requests and at the end, both with the
engine idle; then the engine closes, and they are compared with those before it opened.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vattn import LLM, SamplingParams
from vattn.engine.deltas import RequestDelta
from vattn.engine.service import Service
from vattn.lab.bench.environment import environment
from vattn.lab.bench.tiny import load_tiny
from vattn.models.attention import register_attention
from vattn.models.loader import LoadedModel
from vattn.params import BeamSearchParams
from vattn.vmm.host import HostDriver

PAGE = 4096
TOKEN_BYTES = 512  # of the tiny model
MAX_LEN = 96
BUDGETS = (400, 800)  # tokens; 16 running requests could use 1,536
BACKENDS: dict[str, dict[str, Any]] = {
    "virtual-interleaved": {"kv_backend": "virtual", "kv_layout": "interleaved", "page_bytes": PAGE},
    "virtual-per_layer": {"kv_backend": "virtual", "kv_layout": "per_layer", "page_bytes": PAGE},
    "virtual-overlap": {
        "kv_backend": "virtual",
        "kv_layout": "interleaved",
        "page_bytes": PAGE,
        "overlap": True,
        "background_mapping": True,
    },
    "paged-16": {"kv_backend": "paged", "block_size": 16},
    "static": {"kv_backend": "static", "kv_layout": "interleaved"},
}


@dataclass(frozen=True)
class Holdings:
    """What a process and an engine hold at one moment; sizes in bytes."""

    descriptors: int
    maps: int
    """Lines of /proc/self/maps outside the KV reservation, whose mappings come and go with the cache."""
    threads: int
    rss: int
    address_space: int
    kv_in_use: int = 0
    kv_physical: int = 0
    swap_used: int = 0
    kv_mappings: int = 0
    """Of the driver, the KV cache's own."""


def holdings(llm: LLM | None = None, driver: HostDriver | None = None) -> Holdings:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    inside = [] if driver is None else list(driver.shadow.reservations.values())

    def foreign(line: str) -> bool:
        start = int(line.split("-", 1)[0], 16)
        return not any(r.base <= start < r.end for r in inside)

    process: dict[str, int] = {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "maps": sum(map(foreign, Path("/proc/self/maps").read_text().splitlines())),
        "threads": int(status["Threads"]),
        "rss": int(status["VmRSS"].split()[0]) << 10,
        "address_space": int(status["VmSize"].split()[0]) << 10,
    }
    if llm is None:
        return Holdings(**process)
    usage, swap = llm.memory_usage(), llm.engine.kv.swap
    return Holdings(
        **process,
        kv_in_use=usage.in_use,
        kv_physical=usage.physical,
        swap_used=0 if swap is None else swap.used_bytes,
        kv_mappings=0 if driver is None else driver.shadow.mapping_count,
    )


def requests(rng: random.Random, vocab: int) -> Iterator[tuple[list[int], SamplingParams | BeamSearchParams]]:
    """Short prompts, half of which begin with one of a few texts; samples, branches, some beams."""
    stock = [[rng.randrange(3, vocab) for _ in range(rng.randrange(10, 40))] for _ in range(6)]
    while True:
        prompt = list(rng.choice(stock)) if rng.random() < 0.5 else []
        prompt += [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 24))]
        kind, tokens = rng.random(), rng.randrange(1, 16)
        if kind < 0.03:
            yield prompt, BeamSearchParams(beam_width=3, max_tokens=tokens)
        elif kind < 0.15:
            yield prompt, SamplingParams(temperature=1.0, n=rng.randrange(2, 4), max_tokens=tokens)
        else:
            yield prompt, SamplingParams(temperature=rng.choice([0.0, 0.8]), max_tokens=tokens)


def how_it_ended(delta: RequestDelta) -> str:
    """Of a request that has ended."""
    if delta.error:
        return "error"
    finishes = [part.finish for part in (*delta.branches, *delta.beams) if part.finish is not None]
    return str(finishes[0].reason) if finishes else "cut short, no beam ended"


def serve(llm: LLM, rng: random.Random, count: int, names: Iterator[int]) -> dict[str, int]:
    """Have the engine serve `count` requests; how they ended."""
    engine, source = llm.engine, requests(rng, llm.loaded.spec.vocab_size)
    ended: dict[str, int] = {}
    live: list[str] = []
    sent = steps = 0
    while sent < count or engine.has_work:
        while sent < count and len(live) < 24:
            prompt, params = next(source)
            request_id = str(next(names))
            timeout = 0.05 if rng.random() < 0.02 else None
            engine.add_request(
                request_id,
                prompt,
                params,
                service=Service(tenant=rng.choice("ab"), timeout_s=timeout, priority=rng.randrange(3)),
            )
            live.append(request_id)
            sent += 1
        deltas = engine.step()
        steps += 1
        event = rng.random()
        if event < 0.05 and live:
            engine.abort(rng.choice(live))
        elif event < 0.06:
            llm.resize_kv_cache(rng.choice(BUDGETS) * TOKEN_BYTES)
        elif event < 0.062:
            llm.sleep()
            llm.wake_up()
        if steps % 100 == 0:
            llm.check()
        for delta in deltas:
            if delta.finished:
                live.remove(delta.request_id)
                reason = how_it_ended(delta)
                ended[reason] = ended.get(reason, 0) + 1
    llm.check()
    return ended


def soak(loaded: LoadedModel, backend: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Serve `count` requests on one backend, the first tenth of them to warm up; what was held when."""
    rng = random.Random(seed)
    names = iter(range(1 << 60))
    start = time.perf_counter()
    opened = holdings()
    driver = HostDriver(granularity=PAGE)
    with LLM(
        loaded,
        driver=driver,
        max_model_len=MAX_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=BUDGETS[-1] * TOKEN_BYTES,
        preemption="auto",
        swap_space_bytes=1 << 20,
        scheduling_policy="priority",
        **BACKENDS[backend],
    ) as llm:
        ended: dict[str, int] = {}
        states = []
        for part in (count // 10, count - count // 10):
            for reason, n in serve(llm, rng, part, names).items():
                ended[reason] = ended.get(reason, 0) + n
            llm.resize_kv_cache(BUDGETS[-1] * TOKEN_BYTES)
            llm.reset_prefix_cache()
            states.append(holdings(llm, driver))
        metrics = llm.metrics()
    left = {
        "mappings": driver.shadow.mapping_count,
        "handles": len(driver.shadow.allocations),
        "reservations": len(driver.shadow.reservations),
        "bytes": driver.shadow.used,
    }
    driver.close()
    return {
        "backend": backend,
        "requests": count,
        "ended": ended,
        "steps": metrics.steps,
        "preemptions": metrics.preemptions,
        "swapped": metrics.swapped_requests,
        "recomputed_tokens": metrics.recomputed_tokens,
        "prefix_hit_tokens": metrics.kv_stats.prefix_hit_tokens,
        "forks": metrics.kv_stats.forks,
        "driver_calls": metrics.kv_stats.driver_calls,
        "seconds": time.perf_counter() - start,
        "before_opening": asdict(opened),
        "after_a_tenth": asdict(states[0]),
        "at_the_end": asdict(states[1]),
        "left_in_the_driver_after_closing": left,
        "after_closing": asdict(holdings()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--backend", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    register_attention()
    loaded = load_tiny("cpu")
    runs = []
    for backend in args.backend:
        run = soak(loaded, backend, args.requests)
        runs.append(run)
        print(
            backend, {k: run[k] for k in ("ended", "steps", "preemptions", "swapped", "seconds")}, flush=True
        )
        for moment in ("before_opening", "after_a_tenth", "at_the_end", "after_closing"):
            print(f"  {moment:16}", run[moment], flush=True)
        print("  left", run["left_in_the_driver_after_closing"], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"runs": runs, "environment": environment()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
