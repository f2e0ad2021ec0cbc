"""The one place that knows backends by name: from a configuration to a KV cache."""

from __future__ import annotations

import resource

import torch

from vattn.config import CPU_DEFAULT_KV_BYTES, KVCacheConfig
from vattn.errors import ConfigError
from vattn.kv.base import KVCache
from vattn.kv.layout import KVLayout, KVShape, RowLayout, default_page_bytes
from vattn.kv.paged import PagedKVCache
from vattn.kv.ranges import KVRanges
from vattn.kv.static import StaticKVCache
from vattn.kv.swap import SwapSpace
from vattn.kv.virtual import VirtualKVCache
from vattn.vmm.driver import Driver, open_driver

DEFAULT_LAYOUT = KVLayout.INTERLEAVED  # measured: docs/memory.md


def open_kv_driver(device: torch.device) -> Driver:
    """The driver that maps a device's KV cache; on a CPU its pages may be as small as the system's."""
    if device.type == "cpu":
        return open_driver(device, granularity=resource.getpagesize())
    return open_driver(device)


def kv_budget(config: KVCacheConfig, driver: Driver, activations: int = 0) -> int:
    """Bytes of KV memory to use, `activations` bytes left to the model's steps.

    Raises ConfigError when more is asked than the device has.
    """
    free, total = driver.memory_info()
    if config.memory_bytes is None:
        if driver.device.type == "cpu":
            return min(CPU_DEFAULT_KV_BYTES, int(free * config.gpu_memory_utilization))
        budget = int(total * config.gpu_memory_utilization) - (total - free) - activations
        if budget <= 0:
            raise ConfigError(
                f"no memory is left for KV: {total - free:,} of {total:,} bytes are in use, a step takes "
                f"{activations:,}, and gpu_memory_utilization={config.gpu_memory_utilization} allows "
                f"{int(total * config.gpu_memory_utilization):,}"
            )
        return budget
    if config.memory_bytes > free:
        raise ConfigError(
            f"kv_cache_memory_bytes={config.memory_bytes:,} is more than the {free:,} bytes that are "
            f"free on {driver.device} (of {total:,}): ask for less"
        )
    return config.memory_bytes


def create_kv_cache(
    config: KVCacheConfig,
    shape: KVShape,
    driver: Driver,
    *,
    max_model_len: int | None,
    model_len: int,
    max_num_seqs: int,
    activations: int = 0,
    fingerprint: str | None = None,
) -> KVCache:
    """Build the backend that `config` names.

    `max_model_len` None means: the model's own length `model_len`, or less if the budget is smaller.
    `activations`: bytes of device memory to leave to the model's steps.
    `fingerprint`: of the model: KV of equal ones may be shared. None: no prefix cache in any case.
    Raises ConfigError when one request of `max_model_len` tokens would not fit.
    """
    budget = kv_budget(config, driver, activations)
    device = driver.device
    kind = DEFAULT_LAYOUT if config.layout == "auto" else KVLayout(config.layout)
    page = config.page_bytes or default_page_bytes(kind, shape, driver.granularity)
    if page % driver.granularity:
        raise ConfigError(
            f"page_bytes={page:,} is not a multiple of the {driver.name} driver's granularity of "
            f"{driver.granularity:,} bytes"
        )
    if config.backend == "virtual":
        rows = RowLayout(kind, shape, max_num_seqs, model_len, page)
        fits = rows.tokens(budget // page // rows.ranges)
        unit = f"one page of {page:,} bytes in each of {rows.ranges} ranges"
    elif config.backend == "paged":
        fits = budget // (config.block_size * shape.token_bytes) * config.block_size
        unit = f"one block of {config.block_size} tokens"
    else:
        fits = budget // shape.token_bytes
        unit = "one token"
    if fits < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget:,} does not hold {unit}; a token takes "
            f"{shape.token_bytes:,} bytes"
        )
    length = min(model_len, fits) if max_model_len is None else max_model_len
    if length > fits:
        raise ConfigError(
            f"max_model_len={length:,} tokens need {length * shape.token_bytes:,} bytes of KV; the cache "
            f"holds {fits:,} tokens (kv_cache_memory_bytes={budget:,}): raise it or lower max_model_len"
        )
    model = fingerprint if config.shares_prefixes else None
    cache = _build(config, shape, driver, budget, length, max_num_seqs, kind, page, model)
    if config.swap_space_bytes:
        cache.swap = SwapSpace(config.swap_space_bytes, device)
    if isinstance(config.scales, KVRanges):
        cache.static_scales = config.scales.scales(shape.dtype, device)
    return cache


def _build(
    config: KVCacheConfig,
    shape: KVShape,
    driver: Driver,
    budget: int,
    length: int,
    rows: int,
    kind: KVLayout,
    page: int,
    fingerprint: str | None,
) -> KVCache:
    device = driver.device
    if config.backend == "paged":
        return PagedKVCache(
            shape,
            device=device,
            budget_bytes=budget,
            block_size=config.block_size,
            max_tokens=length,
            fingerprint=fingerprint,
        )
    if config.backend == "static":
        return StaticKVCache(
            shape, device=device, budget_bytes=budget, max_tokens=length, max_rows=rows, layout=kind
        )
    background = config.background_mapping
    return VirtualKVCache(
        shape,
        driver,
        budget_bytes=budget,
        max_tokens=length,
        max_rows=rows,
        layout=kind,
        page_bytes=page,
        background=device.type == "cuda" if background is None else background,
        fingerprint=fingerprint,
        unit=config.block_size,
    )
