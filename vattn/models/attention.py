"""The hook into transformers: attention of every layer goes to the step's plan.

transformers calls `attention_forward` once per layer with that layer's new q, k and v; the plan,
handed down through the model's keyword arguments, stores k and v and attends over the cache. No
state is global: two engines in one process share nothing but the registered function.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from vattn.kernels.torch_ops import attend, cut, store_kv
from vattn.kv.base import AttentionInputs, ContiguousInputs, PagedInputs

ATTENTION_NAME = "vattn"


class StepAttention(Protocol):
    """A step's attention: planned once, called for every layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k, v `[T, Hkv, D]` of the new tokens, then attend. q and the result `[T, Hq, D]`."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    vattn_step: StepAttention,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[1, Hq, T, D]` in, `[1, T, Hq, D]` out."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return vattn_step.attend(layer, q, k, v, scale).unsqueeze(0), None


def register_attention() -> str:
    """Make `attn_implementation="vattn"` known to transformers. Idempotent; returns the name."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    return ATTENTION_NAME


class SdpaContiguous:
    """CPU, contiguous rows: SDPA on a view of each request's row, exactly as it lies."""

    def __init__(self, inputs: ContiguousInputs) -> None:
        kv = inputs.kv
        self._slot_mapping = inputs.slot_mapping
        self._flat = kv.flatten(2, 3).unbind(0)
        self._runs = cut(inputs.cu_seqlens, inputs.seq_lens, kv.dtype)
        # One narrow and one unbind give the views of all layers: [2 x layer + (0: K, 1: V)].
        self._views = [
            kv[:, :, slot, :n].transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)
            for slot, n in zip(inputs.slots, inputs.seq_lens, strict=True)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store_kv(self._flat[layer], self._slot_mapping, k, v)
        views = self._views
        return attend(q, self._runs, lambda b: (views[b][2 * layer], views[b][2 * layer + 1]), scale)


class SdpaGather:
    """CPU, block tables: gather the blocks of the whole batch, then the same SDPA on the copies."""

    def __init__(self, inputs: PagedInputs) -> None:
        self._slot_mapping = inputs.slot_mapping
        self._kv = inputs.kv.unbind(0)
        self._runs = cut(inputs.cu_seqlens, inputs.seq_lens, inputs.kv.dtype)
        self._blocks = torch.tensor([block for table in inputs.block_tables for block in table])
        first, self._spans = 0, []
        for table, n in zip(inputs.block_tables, inputs.seq_lens, strict=True):
            self._spans.append((first * inputs.block_size, n))
            first += len(table)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        kv = self._kv[layer]
        store_kv(kv.flatten(1, 2), self._slot_mapping, k, v)
        keys, values = kv.index_select(1, self._blocks).flatten(1, 2).transpose(1, 2).unsqueeze(1)

        def kv_of(b: int) -> tuple[Tensor, Tensor]:
            first, n = self._spans[b]
            return keys.narrow(2, first, n), values.narrow(2, first, n)

        return attend(q, self._runs, kv_of, scale)



def plan_attention(inputs: AttentionInputs) -> StepAttention:
    """The attention that reads this kind of memory."""
    if isinstance(inputs, PagedInputs):
        return SdpaGather(inputs)
    assert isinstance(inputs, ContiguousInputs)
    return SdpaContiguous(inputs)
