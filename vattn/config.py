"""Engine options, checked before anything is loaded or allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from vattn.checks import choice, flag, number, shown, text, whole
from vattn.errors import ConfigError
from vattn.kv.backends import BACKENDS
from vattn.kv.layout import SCALE_BYTES, KVShape

if TYPE_CHECKING:
    from vattn.kv.ranges import KVRanges
    from vattn.models.spec import ModelSpec

PolicyName = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap", "auto"]
KVBackend = Literal["virtual", "paged", "static"]
LayoutName = Literal["auto", "interleaved", "per_layer"]
KVDtype = Literal["auto", "fp8_e4m3", "int8"]

CPU_DEFAULT_KV_BYTES = 4 << 30
DEFAULT_SWAP_BYTES = 4 << 30
"""Default swap space if requests may be swapped; the same as in vLLM."""


LARGEST = 2**63 - 1
"""Largest allowed size or count. It fits in 64 bits."""


def _positive(config: object, field_name: str, *, name: str = "", optional: bool = False) -> None:
    """Check a field of `config` and store it as an int. Messages call the field `name`."""
    value = getattr(config, field_name)
    if optional and value is None:
        return
    name = name or field_name
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, got {shown(value)}")
    object.__setattr__(config, field_name, whole(name, value, 1, LARGEST, error=ConfigError))


@dataclass(frozen=True)
class KVCacheConfig:
    """How KV memory is managed.

    - `backend`: how a request's tokens find their memory. `"virtual"`: the driver maps pages behind
      contiguous addresses. `"paged"`: the kernel follows block tables. `"static"`: no mapping; each request
      has a fixed row.
    - `layout`: how contiguous rows (`virtual`, `static`) are arranged: `"interleaved"`, `"per_layer"`, or
      `"auto"`, which chooses the better one for the device (docs/memory.md).
    - `page_bytes`: physical page size of `virtual`, a multiple of the driver's granularity. None: default.
    - `block_size`: tokens per block of `paged`.
    - `memory_bytes`: budget of KV memory in bytes. None: on CUDA, what `gpu_memory_utilization` leaves
      after weights and activations; on CPU, 4 GiB, or that share of free memory if it is less.
    - `background_mapping`: map pages ahead in a thread (`virtual`). None: only on CUDA, where the host
      waits while the device computes. On CPU the thread would take a core from the kernels.
    - `dtype`: dtype in which keys and values are stored. `"auto"` is the model's dtype; `"fp8_e4m3"` and
      `"int8"` take one byte per number (docs/quantisation.md).
    - `prefix_caching`: keep computed prompts for later requests with the same prefix. None: on, if the
      backend supports it (`static` does not).
    - `swap_space_bytes`: host memory for the KV of preempted requests. 0: their KV is recomputed.
    - `scales`: scales of a quantised cache. `"token"`: one per token and head, computed as tokens arrive.
      `KVRanges`: static ones per head; a file or a mapping with "k" and "v" works too.
    """

    backend: KVBackend = "virtual"
    layout: LayoutName = "auto"
    page_bytes: int | None = None
    block_size: int = 16
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    background_mapping: bool | None = None
    dtype: KVDtype = "auto"
    scales: Literal["token"] | KVRanges = "token"
    prefix_caching: bool | None = None
    swap_space_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kv_backend", self.backend, tuple(BACKENDS)),
            ("kv_layout", self.layout, get_args(LayoutName)),
            ("kv_cache_dtype", self.dtype, get_args(KVDtype)),
        ):
            choice(name, value, allowed)
        _positive(self, "page_bytes", optional=True)
        _positive(self, "block_size")
        _positive(self, "memory_bytes", name="kv_cache_memory_bytes", optional=True)
        share = number(
            "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, above=True, error=ConfigError
        )
        object.__setattr__(self, "gpu_memory_utilization", share)
        flag("background_mapping", self.background_mapping, optional=True, error=ConfigError)
        flag("enable_prefix_caching", self.prefix_caching, optional=True, error=ConfigError)
        if self.prefix_caching and self.backend == "static":
            raise ConfigError(
                "kv_backend='static' can't share prefixes: every request has memory of its own; "
                "use 'virtual' or 'paged', or leave enable_prefix_caching out"
            )
        swap = whole("swap_space_bytes", self.swap_space_bytes, 0, LARGEST, error=ConfigError)
        object.__setattr__(self, "swap_space_bytes", swap)
        if not isinstance(self.scales, str) or self.scales != "token":
            from vattn.kv.ranges import KVRanges  # it imports torch, which a configuration does not need

            object.__setattr__(self, "scales", KVRanges.of(self.scales))
            if self.dtype == "auto":
                raise ConfigError(
                    "kv_scales are of a quantised cache: set kv_cache_dtype to 'int8' or 'fp8_e4m3'"
                )

    @property
    def shares_prefixes(self) -> bool:
        """True if a cache with this configuration keeps prefixes."""
        return self.backend != "static" and self.prefix_caching is not False

    def shape(self, spec: ModelSpec) -> KVShape:
        """The shape of one token's KV. Raises ConfigError if static scales belong to another model."""
        import torch

        if self.scales != "token":
            self.scales.check(spec.num_layers, spec.num_kv_heads)
        stored = {"auto": spec.dtype, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}[self.dtype]
        per_token = self.dtype != "auto" and self.scales == "token"
        return KVShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, stored, SCALE_BYTES if per_token else 0
        )


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests are scheduled. Options that vLLM has mean the same as there.

    - `max_num_seqs`: maximum number of running requests.
    - `max_num_batched_tokens`: maximum number of tokens in one step. Longer prompts are prefilled in chunks.
      At least `max_num_seqs`, so that every running request can decode in every step.
    - `policy`: the order of requests: `"fcfs"` (first come, first served) or `"priority"` (smaller first).
    - `priority_ageing_tokens`: a waiting request gains one unit of priority each time the engine has
      scheduled this many tokens, so that no request waits forever.
    - `fair_shares`: weights of tenants for tokens and memory. A tenant that is not named has weight 1.
    - `max_waiting`: maximum number of waiting requests per tenant. None: no limit.
    - `preemption`: what happens to the KV of a preempted request: `"recompute"`, `"swap"` (to host memory,
      as long as there is swap space) or `"auto"`, whichever is predicted to cost less.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    policy: PolicyName = "fcfs"
    priority_ageing_tokens: int = 16384
    fair_shares: Mapping[str, float] = field(default_factory=dict)
    max_waiting: int | None = None
    preemption: PreemptionMode = "recompute"

    def __post_init__(self) -> None:
        for limit in ("max_num_seqs", "max_num_batched_tokens", "priority_ageing_tokens"):
            _positive(self, limit)
        _positive(self, "max_waiting", optional=True)
        choice("scheduling_policy", self.policy, get_args(PolicyName))
        choice("preemption", self.preemption, get_args(PreemptionMode))
        if not isinstance(self.fair_shares, Mapping):
            raise ConfigError(f"fair_shares must map tenants to weights, got {shown(self.fair_shares)}")
        object.__setattr__(self, "fair_shares", dict(self.fair_shares))
        for tenant, weight in self.fair_shares.items():
            real = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not isinstance(tenant, str) or not real or not 1e-3 <= weight <= 1e3:
                raise ConfigError(
                    f"fair_shares={{{shown(tenant)}: {shown(weight)}}}: a tenant's name maps to a weight "
                    "from 0.001 to 1000"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running request needs one token a step"
            )


def check_options(
    *,
    max_model_len: Any,
    seed: Any,
    trace: Any,
    coordinator: Any,
    driver: Any,
    engine_name: Any,
    attention: Any,
    device: Any,
    dtype: Any,
    revision: Any,
    overlap: Any,
    enforce_eager: Any,
    trust_remote_code: Any,
) -> None:
    """Check the options of `LLM` that belong to neither config. Raises ConfigError."""

    def refuse(name: str, wanted: str, value: Any) -> None:
        raise ConfigError(f"{name} must {wanted}, got {shown(value)}")

    def integer(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool)

    if max_model_len is not None and not (integer(max_model_len) and max_model_len >= 2):
        refuse("max_model_len", "hold a prompt and one output token", max_model_len)
    if not integer(seed):
        refuse("seed", "be a whole number", seed)
    for name, path in (("trace", trace), ("coordinator", coordinator)):
        if path is not None and (not isinstance(path, (str, Path)) or "\0" in str(path)):
            refuse(name, "be the name of a file", path)
        if path is not None:
            text(name, str(path), error=ConfigError)
    if trace is not None and not Path(trace).absolute().parent.is_dir():
        raise ConfigError(f"trace={str(trace)!r}: there is no folder {Path(trace).absolute().parent}")
    for name, value in (("engine_name", engine_name), ("revision", revision), ("attention", attention)):
        if value is not None or name == "attention":
            text(name, value, error=ConfigError)
    import torch

    for name, value, kind in (("device", device, torch.device), ("dtype", dtype, torch.dtype)):
        if not isinstance(value, (str, kind)):
            refuse(name, f"be a name or a torch.{name}", value)
    if driver is not None and not callable(getattr(driver, "memory_info", None)):
        refuse("driver", "be a virtual memory driver of vattn.vmm", driver)
    flag("overlap", overlap, optional=True, error=ConfigError)
    flag("enforce_eager", enforce_eager, optional=True, error=ConfigError)
    flag("trust_remote_code", trust_remote_code, error=ConfigError)


C = TypeVar("C", KVCacheConfig, SchedulerConfig)


def one_of(config: C | None, options: C, defaults: C) -> C:
    """Return the whole configuration or the single options. Raises ConfigError if both are given."""
    if config is None:
        return options
    if not isinstance(config, type(options)):
        raise ConfigError(f"this must be a {type(options).__name__}, not {type(config).__name__}")
    if options != defaults:
        raise ConfigError(f"give a {type(options).__name__} or its single options, not both")
    return config
