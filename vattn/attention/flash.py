"""flash-attn's own kernel on contiguous rows, unchanged, if the package is installed.

`flash_attn_with_kvcache` takes a cache `[slots, max_len, Hkv, D]` with any strides, the slot of each request
(`cache_batch_idx`) and lengths (`cache_seqlens`). A cache of rows has exactly these.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from vattn.attention.base import AttentionBackend, StepAttention, refuse_quantised
from vattn.attention.device import DeviceInputs, to_device
from vattn.errors import ConfigError
from vattn.kernels.torch_ops import store_kv
from vattn.kv.base import ContiguousInputs, KVCache


class ContiguousFlash(AttentionBackend):
    """flash-attn 2, on CUDA, float16 or bfloat16, head sizes up to 256."""

    def check(self, kv: KVCache, device: torch.device) -> None:
        if importlib.util.find_spec("flash_attn") is None:
            raise ConfigError("attention='flash_attn' needs the flash-attn package: pip install flash-attn")
        if device.type != "cuda":
            raise ConfigError(f"attention='flash_attn' needs a GPU, not {device}")
        refuse_quantised(kv, "flash_attn", "'triton'")
        if kv.shape.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"attention='flash_attn' reads float16 and bfloat16, not {kv.shape.dtype}")
        if kv.shape.head_dim > 256:
            raise ConfigError(f"attention='flash_attn' takes heads up to 256, not {kv.shape.head_dim}")

    def plan(self, inputs: ContiguousInputs) -> StepAttention:
        return _FlashStep(inputs)


class _FlashStep:
    def __init__(self, inputs: ContiguousInputs) -> None:
        self._kv = inputs.kv.unbind(0)
        self._flat = inputs.kv.flatten(2, 3).unbind(0)
        self._cu = inputs.cu_seqlens
        self._inputs: DeviceInputs = to_device(inputs, inputs.kv.device)
        self._kernel = importlib.import_module("flash_attn").flash_attn_with_kvcache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        inputs = self._inputs
        store_kv(self._flat[layer], inputs.slot_mapping, k, v)
        n, chunks = inputs.num_decodes, range(inputs.num_decodes, len(self._cu) - 1)
        # All decodes take one call. Each chunk takes its own, since all queries of a call have one length.
        runs = [(slice(0, n), slice(0, n))] if n else []
        runs += [(slice(self._cu[b], self._cu[b + 1]), slice(b, b + 1)) for b in chunks]
        outs = []
        for tokens, requests in runs:
            rows = q[tokens].view(requests.stop - requests.start, -1, *q.shape[1:])
            out = self._kernel(
                rows,
                *self._kv[layer],
                cache_seqlens=inputs.seq_lens[requests],
                cache_batch_idx=inputs.places[requests],
                softmax_scale=scale,
                causal=True,
            )
            outs.append(out.flatten(0, 1))
        return torch.cat(outs)
