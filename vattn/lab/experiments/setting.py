"""What experiments run on and with: one model, and the machinery of `vattn.lab.bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.engines import VattnSystem
from vattn.lab.bench.interleaved_run import Limits, Plan, run
from vattn.lab.bench.kernel_bench import bench_kernels
from vattn.lab.bench.workload import Workload
from vattn.models.loader import LoadedModel

T = TypeVar("T")

STEPS_KEPT = 60
"""Rows of a run's step log that a record keeps, evenly spaced."""
STEP_COLUMNS = ("time_s", "running", "physical", "in_use", "logical", "shared_saved", "tail_waste")
DROPPED = ("std_", "p50_", "p90_", "p95_")
"""Metrics a record does without: more of each latency than anybody compares here."""
COUNTED = (
    "preemptions",
    "recomputed_tokens",
    "computed_tokens",
    "prefix_hit_tokens",
    "forks",
    "units_shared",
    "tails_copied",
    "bytes_copied",
    "swap_out_bytes",
    "swap_in_bytes",
    "rows_adopted",
)
"""Counters that become metrics of a repeat, under their own names."""


@dataclass(frozen=True)
class Setting:
    """`repeats`: of what is timed. Memory is the same in every repeat, so it is run once."""

    loaded: LoadedModel
    smoke: bool
    repeats: int
    told: Callable[[str], None]
    """Called with what runs now."""

    def pick(self, full: T, smoke: T) -> T:
        return smoke if self.smoke else full

    @property
    def token_bytes(self) -> int:
        return self.loaded.spec.kv_token_bytes

    def limits(self, max_model_len: int, *, rows: int, seqs: int = 64, batched: int = 512) -> Limits:
        """KV memory for `rows` requests of the longest length, `seqs` of them running at once."""
        return Limits(seqs, batched, max_model_len, rows * max_model_len * self.token_bytes)

    def system(self, name: str, limits: Limits, **options: Any) -> VattnSystem:
        """An engine within these limits; `options` of `LLM` on top."""
        common = {
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "kv_cache_memory_bytes": limits.kv_memory_bytes,
        }
        return VattnSystem(name, self.loaded, {**common, **options})

    def compare(
        self,
        workload: Workload,
        limits: Limits,
        systems: Sequence[VattnSystem],
        *,
        timed: bool,
        max_concurrency: int | None = None,
    ) -> dict[str, Any]:
        """The same requests, all at once, on every system; slimmed for a record."""
        repeats = self.repeats if timed else 1
        plan = Plan("throughput", workload, Arrivals("at-once"), limits, repeats, max_concurrency)
        measured = run(plan, systems, self.loaded.spec.vocab_size, self._progress)
        for found in measured["runs"]:
            found["repeats"] = [_slim(repeat, first=i == 0) for i, repeat in enumerate(found["repeats"])]
        return measured

    def kernels(
        self, systems: Sequence[VattnSystem], contexts: Sequence[int], *, batch: int, queries: int = 1
    ) -> dict[str, Any]:
        """Attention alone, by context length."""
        report = bench_kernels(
            self.loaded,
            systems,
            contexts,
            batch=batch,
            queries=queries,
            repeats=self.pick(15, 2),
            progress=lambda context: self.told(f"attention over {context} tokens"),
        )
        return {key: report[key] for key in ("layers", "repeats", "runs", "conclusions")}

    def _progress(self, name: str, repeat: int, done: int, total: int) -> None:
        turn = "warm-up" if repeat < 0 else f"repeat {repeat + 1}"
        self.told(f"{name}, {turn}: {done} of {total} requests")


def _slim(repeat: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
    """Metrics of every repeat; of the first also the lengths of its requests and some of its steps."""
    counters = repeat["counters"]
    metrics = {
        **repeat["metrics"],
        **{name: counters[name] for name in COUNTED},
        "map_stall_ms": counters["map_stall_s"] * 1e3,
        "driver_ms": sum(counters["driver_seconds"].values()) * 1e3,
        "map_calls": counters["driver_calls"].get("map", 0),
        "set_access_calls": counters["driver_calls"].get("set_access", 0),
    }
    rounded = {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in metrics.items()
        if not key.startswith(DROPPED)
    }
    slim: dict[str, Any] = {"tokens_digest": repeat["tokens_digest"], "metrics": rounded}
    if not first:
        return slim
    requests, steps = repeat["requests"], repeat["steps"]
    stride = max(1, -(-len(steps["time_s"]) // STEPS_KEPT))
    return {
        **slim,
        "lengths": [[r["prompt_len"], r["output_len"]] for r in requests],
        "steps": {name: steps[name][::stride] for name in STEP_COLUMNS},
    }
