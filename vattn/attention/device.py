"""A step's plan as device tensors, for kernels that read lengths, slots and block tables from memory.

batch        | decode decode decode | chunk ....... | chunk .... |
tokens         0      1      2        3 . . . . . .   . . . . T
               └ num_decodes = 3     └ cu_seqlens, from 0, over the rest
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vattn.kv.base import AttentionInputs, ContiguousInputs, PagedInputs


@dataclass(frozen=True)
class DeviceInputs:
    """B requests, T tokens; the first `num_decodes` requests have one token each."""

    num_decodes: int
    max_query_len: int
    """Length of the longest chunk behind the decodes; 0 if there is none."""
    slot_mapping: Tensor
    """int64 `[T]`."""
    seq_lens: Tensor
    """int32 `[B]`."""
    cu_seqlens: Tensor
    """int32 `[B - num_decodes + 1]`: offsets of the chunks behind the decodes, from 0."""
    places: Tensor
    """int32: slots `[B]`, or the block table `[B, max_blocks]`, rows padded with 0."""


def to_device(inputs: AttentionInputs, device: torch.device) -> DeviceInputs:
    """Copy a host plan to the device."""
    cu, lens = inputs.cu_seqlens, inputs.seq_lens
    decodes = 0
    while decodes < len(lens) and cu[decodes + 1] - cu[decodes] == 1:
        decodes += 1
    chunks = [cu[b + 1] - cu[b] for b in range(decodes, len(lens))]

    def upload(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        host = torch.as_tensor(values, dtype=dtype)
        if device.type == "cuda":
            host = host.pin_memory()
        return host.to(device, non_blocking=True)

    return DeviceInputs(
        num_decodes=decodes,
        max_query_len=max(chunks, default=0),
        slot_mapping=upload(inputs.slot_mapping, torch.int64),
        seq_lens=upload(lens),
        cu_seqlens=upload([c - cu[decodes] for c in cu[decodes:]]),
        places=upload(places(inputs)),
    )


def places(inputs: AttentionInputs) -> np.ndarray:
    """int32: slots `[B]` or block table `[B, max_blocks]`."""
    if isinstance(inputs, ContiguousInputs):
        return np.asarray(inputs.slots, np.int32)
    assert isinstance(inputs, PagedInputs)
    return inputs.block_tables
