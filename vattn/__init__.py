"""vattn: one inference engine, switchable KV-cache backends (`virtual`, `paged`, `static`).

In two lines:

    from vattn import LLM, SamplingParams
    LLM("smollm2", kv_backend="virtual").generate("The capital of France is")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vattn.async_llm import AsyncLLM
    from vattn.config import KVCacheConfig, SchedulerConfig
    from vattn.hf import VirtualCache
    from vattn.lab.page_maps.recorder import PageMapRecorder
    from vattn.llm import LLM
    from vattn.outputs import CompletionOutput, RequestOutput
    from vattn.params import BeamSearchParams, RequestOutputKind, SamplingParams
    from vattn.vmm.growable import GrowableTensor

__version__ = "0.1.0"

# Loaded when first used: `import vattn` and `vattn --help` must not wait for torch.
_HOME = {
    "AsyncLLM": "vattn.async_llm",
    "BeamSearchParams": "vattn.params",
    "CompletionOutput": "vattn.outputs",
    "GrowableTensor": "vattn.vmm.growable",
    "KVCacheConfig": "vattn.config",
    "LLM": "vattn.llm",
    "PageMapRecorder": "vattn.lab.page_maps.recorder",
    "RequestOutput": "vattn.outputs",
    "RequestOutputKind": "vattn.params",
    "SamplingParams": "vattn.params",
    "SchedulerConfig": "vattn.config",
    "VirtualCache": "vattn.hf",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "GrowableTensor",
    "KVCacheConfig",
    "PageMapRecorder",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerConfig",
    "VirtualCache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vattn' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
