"""From what a user asked for to a plan: which workload, when it arrives, within which limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from vattn.errors import ConfigError
from vattn.lab.bench.arrivals import ArrivalKind, Arrivals
from vattn.lab.bench.interleaved_run import Limits
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import (
    BeamSearchWorkload,
    ChatWorkload,
    ParallelSamplingWorkload,
    SharedPrefixWorkload,
)
from vattn.lab.bench.trace import TraceWorkload
from vattn.lab.bench.workload import RandomWorkload, Workload

if TYPE_CHECKING:
    from vattn.models.loader import LoadedModel

WORKLOADS = ("random", "shared-prefix", "chat", "parallel-sampling", "beam-search")


def choose_workload(
    name: str,
    *,
    requests: int | None = None,
    prompt_len: str = "16:512",
    output_len: str = "16:128",
    groups: int = 4,
    prefix_len: int | None = None,
    turns: int = 3,
    think_s: float = 0.0,
    samples: int = 4,
    trace: Path | None = None,
    length_scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """The workload of that name; `trace`: that file instead, all of it unless `requests` says how many.

    Raises ConfigError for an unknown name or impossible parameters.
    """
    if trace is not None:
        return TraceWorkload.read(trace, limit=requests, length_scale=length_scale, seed=seed)
    prompts, outputs = Lengths.parse(prompt_len), Lengths.parse(output_len, "uniform")
    count = 32 if requests is None else requests
    if name == "random":
        return RandomWorkload(count, prompts, outputs, seed)
    if name == "shared-prefix":
        shared = 256 if prefix_len is None else prefix_len
        return SharedPrefixWorkload(count, groups, shared, prompts, outputs, seed)
    if name == "chat":
        return ChatWorkload(count, turns, prompts, outputs, prefix_len or 0, think_s, seed)
    if name == "parallel-sampling":
        return ParallelSamplingWorkload(count, samples, prompts, outputs, seed)
    if name == "beam-search":
        return BeamSearchWorkload(count, samples, prompts, outputs, seed)
    raise ConfigError(f"--workload {name!r} is unknown: use one of {', '.join(WORKLOADS)}, or --trace FILE")


def choose_arrivals(
    workload: Workload,
    *,
    kind: str | None = None,
    rate: float | None = None,
    burstiness: float | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Arrivals:
    """How requests arrive. With nothing asked for: as the trace has it, else all at once.

    A rate makes it Poisson, a burstiness gamma. Raises ConfigError where the wishes contradict each other.
    """
    traced = isinstance(workload, TraceWorkload)
    if rate is not None and not rate > 0:
        raise ConfigError(f"--request-rate must be above 0 a second (inf: all at once), got {rate}")
    if kind is None:
        if rate is None:
            kind = "trace" if traced else "at-once"
        else:
            kind = "at-once" if rate == math.inf else "poisson" if burstiness is None else "gamma"
    if kind == "trace" and not traced:
        raise ConfigError("--arrivals trace needs --trace FILE: other workloads have no times of their own")
    if kind in ("at-once", "trace") and rate not in (None, math.inf):
        raise ConfigError(f"--arrivals {kind} takes no --request-rate, got {rate}")
    if burstiness is not None and kind != "gamma":
        raise ConfigError(f"--burstiness is for gamma arrivals at a finite --request-rate, not for {kind}")
    chosen: ArrivalKind = kind  # type: ignore[assignment]
    shape = 1.0 if burstiness is None else burstiness
    return Arrivals(chosen, math.inf if rate is None else rate, shape, time_scale, seed)


def choose_limits(
    loaded: LoadedModel,
    workload: Workload,
    *,
    kv_memory_bytes: int | None,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Limits:
    """Limits for every system.

    `max_model_len` by default: 2048, or the model's if it has less, or what the workload needs if that is
    more. `kv_memory_bytes` by default: what `static` needs for four requests of that length.
    """
    spec = loaded.spec
    length = max_model_len or min(spec.max_model_len, max(2048, workload.max_len))
    if length > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {length:,} is more than the model's {spec.max_model_len:,} positions"
        )
    return Limits(
        max_num_seqs, max_num_batched_tokens, length, kv_memory_bytes or 4 * length * spec.kv_token_bytes
    )
