"""PyTorch's scaled_dot_product_attention: on a view of each request's row, or on gathered blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.attention.base import AttentionBackend, StepAttention
from vattn.attention.quantised import ContiguousQuantisedStep, GatherQuantisedStep
from vattn.kernels.torch_ops import attend, cut, store_kv
from vattn.kv.base import ContiguousInputs, KVCache, PagedInputs


class ContiguousSdpa(AttentionBackend):
    """SDPA on a view of each row. It knows nothing of pages. Runs anywhere."""

    def check(self, kv: KVCache, device: torch.device) -> None:
        pass

    def plan(self, inputs: ContiguousInputs) -> StepAttention:
        return _ContiguousStep(inputs) if inputs.scales is None else ContiguousQuantisedStep(inputs)


class GatherSdpa(AttentionBackend):
    """SDPA on copies: gathers the blocks of the whole batch first. Runs anywhere."""

    def check(self, kv: KVCache, device: torch.device) -> None:
        pass

    def plan(self, inputs: PagedInputs) -> StepAttention:
        return _GatherStep(inputs) if inputs.scales is None else GatherQuantisedStep(inputs)


class _ContiguousStep:
    def __init__(self, inputs: ContiguousInputs) -> None:
        kv = inputs.kv
        self._slot_mapping = inputs.slot_mapping.to(kv.device)
        self._flat = kv.flatten(2, 3).unbind(0)
        self._runs = cut(inputs.cu_seqlens, inputs.seq_lens, kv.dtype, kv.device)
        # One narrow and one unbind give the views of all layers: [2 x layer + (0: K, 1: V)].
        self._views = [
            kv[:, :, slot, :n].transpose(2, 3).unsqueeze(2).flatten(0, 1).unbind(0)
            for slot, n in zip(inputs.slots, inputs.seq_lens, strict=True)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store_kv(self._flat[layer], self._slot_mapping, k, v)
        views = self._views
        return attend(q, self._runs, lambda b: (views[b][2 * layer], views[b][2 * layer + 1]), scale)


class _GatherStep:
    def __init__(self, inputs: PagedInputs) -> None:
        device = inputs.kv.device
        self._slot_mapping = inputs.slot_mapping.to(device)
        self._kv = inputs.kv.unbind(0)
        self._runs = cut(inputs.cu_seqlens, inputs.seq_lens, inputs.kv.dtype, device)
        blocks, counts = inputs.blocks()
        self._blocks = torch.from_numpy(blocks).to(device)
        first, self._spans = 0, []
        for count, n in zip(counts, inputs.seq_lens, strict=True):
            self._spans.append((first * inputs.block_size, n))
            first += count

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        kv = self._kv[layer]
        store_kv(kv.flatten(1, 2), self._slot_mapping, k, v)
        keys, values = kv.index_select(1, self._blocks).flatten(1, 2).transpose(1, 2).unsqueeze(1)

        def kv_of(b: int) -> tuple[Tensor, Tensor]:
            first, n = self._spans[b]
            return keys.narrow(2, first, n), values.narrow(2, first, n)

        return attend(q, self._runs, kv_of, scale)
