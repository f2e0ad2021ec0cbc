"""Choose an attention implementation by name, among those that can read the memory at hand."""

from __future__ import annotations

import importlib

import torch

from vattn.attention.base import AttentionBackend
from vattn.errors import ConfigError
from vattn.kv.base import AttentionInputs, ContiguousInputs, KVCache, PagedInputs

CHOICES: dict[type[AttentionInputs], dict[str, str]] = {
    ContiguousInputs: {
        "sdpa": "vattn.attention.sdpa:ContiguousSdpa",
        "triton": "vattn.attention.triton:ContiguousTriton",
        "flex": "vattn.attention.flex:ContiguousFlex",
        "flash_attn": "vattn.attention.flash:ContiguousFlash",
    },
    PagedInputs: {
        "gather": "vattn.attention.sdpa:GatherSdpa",
        "triton": "vattn.attention.triton:PagedTriton",
        "flex": "vattn.attention.flex:PagedFlex",
    },
}
"""Name -> "module:class". A module is imported when chosen, since Triton or flash-attn may be missing."""


def create_attention(name: str, kv: KVCache, device: torch.device) -> AttentionBackend:
    """The implementation `name` for the memory of `kv`. "auto" is Triton on CUDA and PyTorch on a CPU.

    Raises ConfigError if no implementation of that name can read this memory, or if it can't run here.
    """
    choices = CHOICES[kv.reads]
    if name == "auto":
        name = "triton" if device.type == "cuda" else next(iter(choices))
    if name not in choices:
        known = ", ".join(map(repr, choices))
        raise ConfigError(f"attention={name!r} can't read the KV memory of this backend: use {known}")
    module, _, cls = choices[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    backend.check(kv, device)
    return backend
