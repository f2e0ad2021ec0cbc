"""PyTorch's FlexAttention, unchanged: on a view of each row, or on the block pool through a BlockMask.

On CUDA it is compiled, once per shape class (lengths are dynamic). On a CPU PyTorch's own unfused form runs;
it materialises scores and is there for correctness only.

    paged   the keys are the WHOLE pool, and the mask says which blocks a request has, in which order:
            kv index in the pool -> block -> position in the request (or none)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vattn.attention.base import AttentionBackend, StepAttention, refuse_quantised
from vattn.kernels.torch_ops import store_kv
from vattn.kv.base import AttentionInputs, ContiguousInputs, KVCache, PagedInputs


class FlexAttention(AttentionBackend):
    """What both memories share: the compiled function and the loop over requests."""

    instead: ClassVar[str]
    """Names of implementations that can read quantised KV, for error messages."""

    def check(self, kv: KVCache, device: torch.device) -> None:
        refuse_quantised(kv, "flex", self.instead)

    @cached_property
    def _flex(self) -> Callable[..., Any]:
        if torch.cuda.is_available():
            return torch.compile(flex_attention, dynamic=True)
        return flex_attention

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: BlockMask) -> Tensor:
        """q `[n, Hq, D]`, k and v `[N, Hkv, D]`; returns `[n, Hq, D]`."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            out: Tensor = self._flex(
                *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
                block_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out[0].transpose(0, 1)


class _Step:
    """A step with one mask and one range of keys per request, made once and used by every layer."""

    def __init__(self, backend: FlexAttention, inputs: AttentionInputs) -> None:
        self._backend = backend
        self._kv = inputs.kv.unbind(0)
        self._slot_mapping = inputs.slot_mapping.to(inputs.kv.device)
        self._cu = inputs.cu_seqlens
        self._masks: list[BlockMask] = []

    def keys(self, layer: int, b: int) -> Tensor:
        """Keys and values `[2, N, Hkv, D]` to which the mask of request b refers."""
        raise AssertionError("of the subclasses")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store_kv(self._kv[layer].flatten(1, 2), self._slot_mapping, k, v)
        outs = []
        for b, mask in enumerate(self._masks):
            keys, values = self.keys(layer, b)
            outs.append(self._backend.run(q[self._cu[b] : self._cu[b + 1]], keys, values, scale, mask))
        return torch.cat(outs)


class ContiguousFlex(FlexAttention):
    """FlexAttention on a view of each row."""

    instead = "'triton' or 'sdpa'"

    def plan(self, inputs: ContiguousInputs) -> StepAttention:
        return _ContiguousStep(self, inputs)


class _ContiguousStep(_Step):
    def __init__(self, backend: FlexAttention, inputs: ContiguousInputs) -> None:
        super().__init__(backend, inputs)
        self._places = list(zip(inputs.slots, inputs.seq_lens, strict=True))
        for b, n in enumerate(inputs.seq_lens):
            new = inputs.cu_seqlens[b + 1] - inputs.cu_seqlens[b]
            self._masks.append(_causal(new, n, inputs.kv.device))

    def keys(self, layer: int, b: int) -> Tensor:
        slot, n = self._places[b]
        return self._kv[layer][:, slot, :n]


class PagedFlex(FlexAttention):
    """FlexAttention on the block pool, through a mask made from the block table."""

    instead = "'triton' or 'gather'"

    def plan(self, inputs: PagedInputs) -> StepAttention:
        return _PagedStep(self, inputs)


class _PagedStep(_Step):
    def __init__(self, backend: FlexAttention, inputs: PagedInputs) -> None:
        super().__init__(backend, inputs)
        for b, (n, blocks) in enumerate(zip(inputs.seq_lens, inputs.tables(), strict=True)):
            new = inputs.cu_seqlens[b + 1] - inputs.cu_seqlens[b]
            table = torch.tensor(blocks, device=inputs.kv.device)
            self._masks.append(_paged_causal(new, n, table, inputs.kv.shape[2], inputs.block_size))

    def keys(self, layer: int, b: int) -> Tensor:
        return self._kv[layer].flatten(1, 2)


def _causal(new: int, total: int, device: torch.device) -> BlockMask:
    """The causal mask of the last `new` of `total` tokens."""
    before = total - new

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q + before >= kv

    return _mask(torch.arange(-(-total // 128), device=device), visible, new, total, 128)


def _paged_causal(new: int, total: int, table: Tensor, num_blocks: int, block_size: int) -> BlockMask:
    """The same mask over the pool. Blocks that are not in `table` are not visible."""
    before = total - new
    order = torch.full((num_blocks,), -1, device=table.device)
    order[table] = torch.arange(len(table), device=table.device)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        logical = order[kv // block_size]
        return (logical >= 0) & (q + before >= logical * block_size + kv % block_size)

    return _mask(table, visible, new, num_blocks * block_size, block_size)


def _mask(blocks: Tensor, visible: Callable[..., Tensor], new: int, keys: int, block_size: int) -> BlockMask:
    """A BlockMask in which every tile of queries looks at `blocks`, and `visible` decides inside them."""
    tiles = -(-new // 128)
    total = -(-keys // block_size)
    indices = torch.zeros(1, 1, tiles, total, dtype=torch.int32, device=blocks.device)
    indices[..., : len(blocks)] = blocks
    count = torch.full((1, 1, tiles), len(blocks), dtype=torch.int32, device=blocks.device)
    return BlockMask.from_kv_blocks(
        count,
        indices,
        BLOCK_SIZE=(128, block_size),
        mask_mod=visible,
        seq_lengths=(new, keys),
        compute_q_blocks=False,
    )
