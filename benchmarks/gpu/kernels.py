"""Kernel benchmark: the same attention over every kind of memory.

    python -m benchmarks.gpu.kernels --json FILE [--budget-s 100] [--dry]

Per problem (problems.py) every contestant (attention.py) is checked against a float64 reference, then all
are timed in turns (timing.py). Figures are written after each problem; when the time is spent, what is left
is listed as not run. Called again with a file that is there, it goes on where that one ends (survive.py).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention, ceilings, survive
from benchmarks.gpu.memory import BLOCK_SIZES, NoRoom, PagedPlace, Place, StaticPlace, VirtualPlace
from benchmarks.gpu.problems import DTYPE, Heads, Problem, dry_sweep, sweep
from benchmarks.gpu.timing import Clock, CudaClock, Deadline, HostClock, Prepared, Timing, take_turns
from vattn.kv.base import AttentionInputs
from vattn.kv.layout import KVLayout
from vattn.lab.bench.environment import environment
from vattn.vmm.driver import Driver, DriverError, OutOfMemory, open_driver

INTERLEAVED_SHARE, PER_LAYER_SHARE = 0.5, 0.25
"""Of free memory, at most, for the pools of virtual memory; an interleaved row holds all layers."""
HEADROOM = 4 << 30
"""Bytes left to workspaces, the reference and the check's copies."""
ESSENTIAL = ("triton", "sdpa flash", "timing")
"""What must go well everywhere; other kernels are there for comparison, where they run."""
LEAST_SECONDS = 4.0
"""Time a problem is given at least."""


class Bench:
    """Memory and clock of one device; runs problems of one head configuration at a time."""

    def __init__(self, device: torch.device, driver: Driver, rows: int, max_tokens: int) -> None:
        self.device = device
        self.driver = driver
        self.clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
        self._rows, self._max_tokens = rows, max_tokens
        self._free = self._free_bytes()
        self._heads: Heads | None = None
        self._virtual: list[VirtualPlace] = []
        self._missing: dict[str, str] = {}
        self._others: list[Place] = []

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _free_bytes(self) -> int:
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what torch has cached is invisible to cuMemCreate
        return self.driver.memory_info()[0]

    def _use(self, heads: Heads) -> None:
        if heads == self._heads:
            return
        self.close()
        for layout, share in (
            (KVLayout.INTERLEAVED, INTERLEAVED_SHARE),
            (KVLayout.PER_LAYER, PER_LAYER_SHARE),
        ):
            budget = int(share * self._free)
            try:
                place = VirtualPlace(layout, heads, self.driver, budget, self._rows, self._max_tokens)
            except DriverError as error:
                self._missing[f"virtual {layout}"] = survive.first_line(error)
            else:
                self._virtual.append(place)
        self._heads = heads
        self._others = [StaticPlace(self.device), *(PagedPlace(size, self.device) for size in BLOCK_SIZES)]

    def close(self) -> None:
        """Give all memory back."""
        self._unload()
        for place in self._virtual:
            place.unload()
            place.close()
        self._virtual, self._others, self._missing, self._heads = [], [], {}, None

    def _unload(self) -> None:
        for place in self._others:
            place.unload()

    @contextmanager
    def loaded(self, problem: Problem) -> Iterator[dict[str, tuple[Place, AttentionInputs] | str]]:
        """Every place with the problem in it, by name, or why it is not. Raises NoRoom if none has room."""
        self._use(problem.heads)
        self._free_bytes()  # only now has the last problem let go of its tensors
        found: dict[str, tuple[Place, AttentionInputs] | str] = {**self._missing}
        wanted: list[Place] = []
        for virtual in self._virtual:
            need, budget = virtual.bytes_for(problem), virtual.budget_bytes
            if need > budget:
                virtual.unload()
                found[virtual.name] = f"does not fit: {need:,} bytes, the pool has {budget:,}"
            else:
                wanted.append(virtual)
        wanted += self._others
        queries = 3 * problem.queries * problem.heads.q_heads * problem.heads.head_dim * DTYPE.itemsize
        room = self._free - (HEADROOM if self.on_gpu else 0) - queries
        need = sum(place.bytes_for(problem) for place in wanted)
        if need > room:
            raise NoRoom(f"does not fit: {need:,} bytes in {len(wanted)} places, {room:,} are free")
        idle = sum(max(0, p.held_bytes - p.bytes_for(problem)) for p in self._virtual if p in wanted)
        if need + idle > room:
            for virtual in self._virtual:
                virtual.unload()
        try:
            for place in wanted:
                try:
                    found[place.name] = (place, place.load(problem))
                except (NoRoom, OutOfMemory, torch.OutOfMemoryError) as error:
                    place.unload()
                    found[place.name] = f"does not fit: {survive.first_line(error)}"
            yield found
        finally:
            self._unload()


def run(
    bench: Bench, problem: Problem, fatal: dict[str, str], note: Callable[[str | None], None]
) -> dict[str, dict[str, Any]]:
    """Check and time every contestant: its error and `timing`, or why it has none (`skipped`, `failed`).

    `fatal`: contestants not to be tried again, and why. `note`: told what runs next.
    """
    results: dict[str, dict[str, Any]] = {}
    with bench.loaded(problem) as places:
        torch.manual_seed(1)
        heads = problem.heads
        q = torch.randn(problem.queries, heads.q_heads, heads.head_dim, dtype=DTYPE, device=bench.device)
        ready: dict[str, Prepared] = {}
        for kernel, where in attention.contestants():
            name = f"{kernel} @ {where}"
            place = places[where]
            reason = attention.unavailable(kernel, bench.device)
            if name in fatal:
                results[name] = {"failed": fatal[name]}
            elif reason is not None or isinstance(place, str):
                results[name] = {"skipped": reason or place}
            else:
                note(name)
                try:
                    attend = attention.KERNELS[kernel](problem, place[1], q)
                    out = attend(0).reshape(q.shape)
                    error = attention.relative_error(problem, place[0], q, out)
                    del out
                    if error <= attention.TOLERANCE:
                        results[name] = {"relative_error": error}
                        ready[name] = bench.clock.prepare(attend)
                    else:
                        results[name] = {"failed": f"wrong: relative error {error:.2g}"}
                except Exception as failure:
                    if survive.context_lost():
                        raise
                    results[name] = {"failed": survive.first_line(failure)}
        note(f"timing {problem.name}")
        for name, timing in take_turns(ready).items():
            results[name]["timing"] = timing
        ready.clear()
    note(None)
    return results


def figures(problem: Problem, timing: Timing, limits: ceilings.Ceilings) -> dict[str, Any]:
    """Rates a timing means, and their shares of the ceilings."""
    seconds = timing.median_us / 1e6
    bytes_per_s, flop_per_s = problem.bytes_moved / seconds, problem.flop / seconds
    return {
        **asdict(timing),
        "gb_per_s": bytes_per_s / 1e9,
        "tflop_per_s": flop_per_s / 1e12,
        "share_of_copy": bytes_per_s / limits.copy_bytes_per_s,
        "share_of_matmul": flop_per_s / limits.matmul_flop_per_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=100.0)
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU; needs TRITON_INTERPRET=1")
    options = parser.parse_args()
    deadline = Deadline(options.budget_s)
    device = torch.device("cpu" if options.dry else "cuda")
    problems = list(dry_sweep() if options.dry else sweep())
    state = survive.load(options.json)
    if not state:
        state.update(
            environment=environment(), dry=options.dry, dtype=str(DTYPE).removeprefix("torch."),
            ceilings=asdict(ceilings.measure(device)), problems=[], not_run=[], fatal={}, complete=False,
        )  # fmt: skip
        survive.store(options.json, state)
    limits = ceilings.Ceilings(**state["ceilings"])
    fatal: dict[str, str] = state.get("fatal", {})
    done = {entry["name"] for entry in state["problems"] + state["not_run"]}
    note = partial(survive.note, options.json)

    driver = open_driver(device)
    bench = Bench(device, driver, max(p.batch for p in problems), max(p.context for p in problems))
    for problem in problems:
        if problem.name in done:
            continue
        reason = fatal.get(f"timing {problem.name}")
        if reason is None and deadline.left < LEAST_SECONDS and not options.dry:
            reason = "the time was spent"
        if reason is None:
            started = time.monotonic()
            try:
                results = run(bench, problem, fatal, note)
            except Exception as error:
                if survive.context_lost():
                    return survive.lost(options.json, state, error)
                reason = str(error) if isinstance(error, NoRoom) else survive.first_line(error)
        if reason is not None:
            state["not_run"].append({"name": problem.name, "reason": reason})
            continue
        for result in results.values():
            if "timing" in result:
                result |= figures(problem, result.pop("timing"), limits)
        sizes = {"bytes_moved": problem.bytes_moved, "flop": problem.flop}
        record = {"name": problem.name, **asdict(problem), **sizes, "contestants": results}
        state["problems"].append(record)
        survive.store(options.json, state)
        print(line(record, time.monotonic() - started), flush=True)
    bench.close()
    driver.close()
    state["complete"] = True
    survive.store(options.json, state)
    failed = {c for p in state["problems"] for c, v in p["contestants"].items() if "failed" in v} | set(fatal)
    print(f"{len(state['problems'])} problems run, {len(state['not_run'])} not run")
    print(f"failed: {', '.join(sorted(failed)) or 'none'}")
    return 1 if not state["problems"] or any(c.startswith(ESSENTIAL) for c in failed) else 0


def line(record: dict[str, Any], seconds: float) -> str:
    """One problem, printed: median microseconds of every contestant that was timed."""
    timed = {k: v["median_us"] for k, v in record["contestants"].items() if "median_us" in v}
    failed = [k for k, v in record["contestants"].items() if "failed" in v]
    text = f"{record['name']}: " + ", ".join(f"{k} {us:,.1f} us" for k, us in timed.items())
    return text + (f"; FAILED: {', '.join(failed)}" if failed else "") + f" ({seconds:.1f} s)"


if __name__ == "__main__":
    survive.leave(main())
