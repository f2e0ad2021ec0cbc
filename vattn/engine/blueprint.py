"""Writes an engine's setup into the first line of an event log, and builds the same scheduler and cache
from that line."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from vattn.config import KVCacheConfig, SchedulerConfig
from vattn.engine.events import TraceWriter
from vattn.engine.policy import create_policy
from vattn.engine.preemption import Preemption
from vattn.engine.scheduler import Scheduler
from vattn.errors import ConfigError
from vattn.kv.base import KVCache
from vattn.kv.factory import create_kv_cache
from vattn.kv.layout import KVShape, dtype_by_name
from vattn.vmm.accounting import AccountingDriver

_OPTIONS = (
    "backend",
    "layout",
    "page_bytes",
    "block_size",
    "memory_bytes",
    "prefix_caching",
    "swap_space_bytes",
)
"""Fields of `KVCacheConfig` that a log's header records."""


def create_scheduler(kv: KVCache, config: SchedulerConfig) -> Scheduler:
    """Create the scheduler that `config` describes."""
    return Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=create_policy(config.policy, config.priority_ageing_tokens),
        weights=config.fair_shares,
        preemption=Preemption(kv, config.preemption),
    )


def open_trace(
    path: str | Path,
    limits: SchedulerConfig,
    config: KVCacheConfig,
    kv: KVCache,
    *,
    granularity: int,
    max_model_len: int,
    model_len: int,
) -> TraceWriter:
    """Open an event log. Its header records how the scheduler and the cache are set up."""
    from vattn import __version__

    described = _describe_cache(
        config,
        kv,
        granularity=granularity,
        max_model_len=max_model_len,
        model_len=model_len,
        max_num_seqs=limits.max_num_seqs,
    )
    return TraceWriter(path, {"version": __version__, "scheduler": asdict(limits), "kv": described})


def rebuild_limits(header: dict[str, Any]) -> SchedulerConfig:
    """Read the scheduler's configuration from a log's header. Raises ConfigError if it is not valid."""
    try:
        return SchedulerConfig(**header["scheduler"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the log's header does not describe a scheduler we know: {error}") from error


def rebuild_cache(header: dict[str, Any]) -> tuple[KVCache, AccountingDriver]:
    """Build the cache that a log's header describes, without real memory, and its driver.

    The caller must close both. Raises ConfigError if the header does not describe a cache.
    """
    try:
        kv = header["kv"]
        shape = KVShape(**{**kv["shape"], "dtype": dtype_by_name(kv["shape"]["dtype"])})
        options = {name: kv[name] for name in _OPTIONS}
        lengths = {"max_model_len": kv["max_model_len"], "model_len": kv["model_len"]}
        driver = AccountingDriver(kv["granularity"], budget=1 << 60)
        config = KVCacheConfig(**options, background_mapping=False)
        cache = create_kv_cache(
            config, shape, driver, **lengths, max_num_seqs=kv["max_num_seqs"], fingerprint="replayed"
        )
        return cache, driver
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the log's header does not describe a KV cache we know: {error}") from error


def _describe_cache(
    config: KVCacheConfig,
    kv: KVCache,
    *,
    granularity: int,
    max_model_len: int,
    model_len: int,
    max_num_seqs: int,
) -> dict[str, Any]:
    """The header's `kv` entry: everything needed to build the same cache again."""
    made, shape = kv.describe(), kv.shape
    if config.backend == "virtual":
        memory = int(made["pages"]) * int(made["page_bytes"])
    elif config.backend == "paged":
        memory = int(made["blocks"]) * int(made["block_size"]) * shape.token_bytes
    else:
        memory = int(made["rows"]) * kv.capacity_tokens * shape.token_bytes
    return {
        "backend": config.backend,
        "layout": made.get("layout", config.layout),
        "page_bytes": made.get("page_bytes"),
        "block_size": config.block_size,
        "memory_bytes": memory,
        "swap_space_bytes": config.swap_space_bytes,
        "prefix_caching": kv.shares_prefixes if config.backend != "static" else None,
        "granularity": granularity,
        "max_model_len": max_model_len,
        "model_len": model_len,
        "max_num_seqs": max_num_seqs,
        "shape": {
            **{f.name: getattr(shape, f.name) for f in fields(shape)},
            "dtype": str(shape.dtype).removeprefix("torch."),
        },
    }
