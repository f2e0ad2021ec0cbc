"""Engines with a planted cause: simulated ones at full scale, real ones with a tiny model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.lab.bench import bench_report as reports
from vattn.lab.bench.arrivals import Arrivals
from vattn.lab.bench.bench_record import as_bench
from vattn.lab.bench.engines import VattnSystem
from vattn.lab.bench.interleaved_run import HEADLINES, Limits, Plan, run
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.tiny import load_tiny
from vattn.lab.bench.workload import RandomWorkload, Workload
from vattn.lab.doctor.diagnose import Diagnosis, diagnose_bench
from vattn.lab.simulator.gpus import find_gpu
from vattn.lab.simulator.known_models import find_model
from vattn.lab.simulator.results import report
from vattn.lab.simulator.setup import SimulationConfig, simulate
from vattn.lab.simulator.source import plan
from vattn.models.describe import describe_model
from vattn.models.loader import LoadedModel

GIB = 1 << 30


def lengths(text: str) -> Lengths:
    return Lengths.parse(text)


def simulated(
    workload: Workload,
    rate: float | None = None,
    *,
    model: str = "llama-3-8b",
    gpu: str = "h100",
    backend: str = "paged",
    seqs: int = 256,
    tokens: int = 2048,
    kv_gib: float | None = None,
    **more: Any,
) -> Diagnosis:
    """Diagnosis of a simulation; `more` are fields of KVCacheConfig, and `hidden_mapping`."""
    hidden = more.pop("hidden_mapping", True)
    config = SimulationConfig(
        model=find_model(model),
        gpu=find_gpu(gpu),
        kv=KVCacheConfig(backend=backend, memory_bytes=None if kv_gib is None else int(kv_gib * GIB), **more),  # type: ignore[arg-type]
        limits=SchedulerConfig(seqs, tokens),
        hidden_mapping=hidden,
    ).resolved()
    arrivals = Arrivals("at-once") if rate is None else Arrivals("poisson", rate)
    done = simulate(config, plan(workload, config.model.vocab_size), arrivals)
    record = report({"planted": done}, workload.describe(), arrivals.describe(), None, ())
    [diagnosis] = diagnose_bench(as_bench(record))
    return diagnosis


@lru_cache(maxsize=1)
def tiny() -> LoadedModel:
    return load_tiny("cpu")


def measured_record(
    workload: Workload, *, kv_kib: int, seqs: int = 16, barrier: bool = False, **options: Any
) -> dict[str, Any]:
    """The bench JSON of a real engine that runs the tiny model once."""
    limits = Limits(seqs, 512, workload.max_len, kv_kib << 10)
    given = {
        "max_model_len": limits.max_model_len,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": limits.kv_memory_bytes,
        **options,
    }
    system = VattnSystem("planted", tiny(), given, barrier)
    found = run(Plan("serve", workload, Arrivals("at-once"), limits, 1), [system], tiny().spec.vocab_size)
    found["model"] = describe_model(tiny(), limits.max_model_len)
    return reports.finish(found, HEADLINES["serve"])


def measured(workload: Workload, **options: Any) -> Diagnosis:
    """Diagnosis of `measured_record`."""
    [diagnosis] = diagnose_bench(as_bench(measured_record(workload, **options)))
    return diagnosis


def requests(n: int, prompt: str, output: str) -> RandomWorkload:
    return RandomWorkload(n, lengths(prompt), lengths(output))
