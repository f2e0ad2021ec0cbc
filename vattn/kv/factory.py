"""Build a KV cache from a configuration. This is the only place that knows backends by name."""

from __future__ import annotations

import resource
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from vattn.config import CPU_DEFAULT_KV_BYTES, KVCacheConfig
from vattn.errors import ConfigError
from vattn.kv.backends import BACKENDS
from vattn.kv.backends.base import Backend, Setting
from vattn.kv.cache import KVCache
from vattn.kv.layout import KVShape
from vattn.kv.memory.swap import SwapSpace
from vattn.vmm.driver import Driver, open_driver

if TYPE_CHECKING:
    import torch


def open_kv_driver(device: torch.device) -> Driver:
    """Open the driver that maps the KV cache of a device. On a CPU, pages may be as small as the system's."""
    if device.type == "cpu":
        return open_driver(device, granularity=resource.getpagesize())
    return open_driver(device)


def kv_budget(config: KVCacheConfig, driver: Driver, activations: int = 0) -> int:
    """Bytes of KV memory to use, after leaving `activations` bytes for the model's steps.

    Raises ConfigError if more is asked for than the device has.
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

    `max_model_len`: None to use the model's own length `model_len`, or less if the budget is too small.
    `activations`: bytes of device memory to leave for the model's steps.
    `fingerprint`: identifies the model; KV is shared only under equal ones. None for no prefix cache.
    Raises ConfigError if one request of `max_model_len` tokens does not fit.
    """
    budget = kv_budget(config, driver, activations)
    kind = backend_class(config.backend)
    model = fingerprint if config.shares_prefixes else None
    setting = Setting(config, shape, driver, budget, 1, max_num_seqs, model)
    trial = kind(setting)  # with requests of one token, a `static` row is one token: the smallest unit
    layout = trial.layout()
    fits = layout.tokens(budget // layout.bytes)
    if fits < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget:,} does not hold {trial.smallest()}; a token takes "
            f"{shape.token_bytes:,} bytes"
        )
    length = min(model_len, fits) if max_model_len is None else max_model_len
    if length > fits:
        raise ConfigError(
            f"max_model_len={length:,} tokens need {length * shape.token_bytes:,} bytes of KV; the cache "
            f"holds {fits:,} tokens (kv_cache_memory_bytes={budget:,}): raise it or lower max_model_len"
        )
    cache = KVCache(kind(replace(setting, max_tokens=length)))
    if config.swap_space_bytes:
        cache.swap = SwapSpace(config.swap_space_bytes, driver.device)
    if not isinstance(config.scales, str):
        cache.static_scales = config.scales.scales(shape.dtype, driver.device)
    return cache


def backend_class(name: str) -> type[Backend]:
    """The backend class of that name. Raises ConfigError if there is none."""
    if name not in BACKENDS:
        raise ConfigError(f"kv_backend={name!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}")
    module, _, kind = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(module), kind)
    return found
