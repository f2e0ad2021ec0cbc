"""KV memory as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vattn.kv.layout import KVShape

if TYPE_CHECKING:
    import torch



class KVViews(NamedTuple):
    """The same memory, seen three ways."""

    memory: torch.Tensor
    """`[layer, 2, row, position, unit_elems]` of the KV dtype: values and scales. Copies use this view."""
    kv: torch.Tensor
    """`[layer, 2, row, position, kv_head, head_dim]`: the values."""
    scales: torch.Tensor | None
    """float32 `[layer, 2, row, position, kv_head]`; None if tokens have no scales of their own."""


def kv_views(memory: torch.Tensor, shape: KVShape) -> KVViews:
    """View `memory` `[layer, 2, row, position, unit_elems]` as values and scales, without a copy."""
    values = memory[..., : shape.head_elems]
    kv = values.view(*values.shape[:-1], shape.num_kv_heads, shape.head_dim)
    if not shape.scale_bytes:
        return KVViews(memory, kv, None)
    end = shape.scale_offset + shape.num_kv_heads * shape.scale_bytes
    import torch

    return KVViews(memory, kv, memory[..., shape.scale_offset : end].view(torch.float32))
