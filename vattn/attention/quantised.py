"""CPU attention over an 8-bit cache: widen one layer's keys and values into a buffer, then run SDPA.

    cache (int8 or float8)   | r0: n0 tokens .... |  | r1: n1 tokens . |       and their scales
                                       |                    |
    buffer of the step       | r0 ............... | r1 ............... |      [2, Hkv, n0 + n1 + …, D]

New tokens are stored first and read back like all others. So a token has the same rounded K and V in the step
that computes it as in every later step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vattn.kernels.quantise import dequantise, store_quantised
from vattn.kernels.torch_ops import Run, attend, cut
from vattn.kv.base import AttentionInputs, ContiguousInputs, PagedInputs


class QuantisedStep(ABC):
    """A step over an 8-bit cache. Subclasses know where keys and values are."""

    def __init__(self, inputs: AttentionInputs, spans: list[tuple[int, int]], tokens: int) -> None:
        """`spans`: for each request, its first token in the buffer and its length.

        `tokens`: size of the buffer.
        """
        assert inputs.scales is not None
        self._inputs = inputs
        self._spans = spans
        self._tokens = tokens
        self._per_token = inputs.scales.ndim == 5
        self._slot_mapping = inputs.slot_mapping.to(inputs.kv.device)
        self._kv = inputs.kv.unbind(0)
        self._scales = inputs.scales.unbind(0)
        self._buffer: Tensor | None = None
        self._runs: list[Run] = []

    @abstractmethod
    def load(self, kv: Tensor, scales: Tensor, buffer: Tensor) -> None:
        """Widen a layer's kv `[2, row, position, Hkv, D]` of all requests into `buffer`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        kv, scales = self._kv[layer], self._scales[layer]
        flat = scales.flatten(1, 2) if self._per_token else scales
        store_quantised(kv.flatten(1, 2), flat, self._slot_mapping, k, v, per_token=self._per_token)
        if self._buffer is None:  # the first layer shows the dtype the model computes in
            shape = (2, kv.shape[3], self._tokens, kv.shape[4])
            self._buffer = torch.empty(shape, dtype=q.dtype, device=q.device)
            self._runs = cut(self._inputs.cu_seqlens, self._inputs.seq_lens, q.dtype, q.device)
        self.load(kv, scales, self._buffer)
        keys, values = self._buffer.unsqueeze(1)

        def kv_of(b: int) -> tuple[Tensor, Tensor]:
            first, n = self._spans[b]
            return keys.narrow(2, first, n), values.narrow(2, first, n)

        return attend(q, self._runs, kv_of, scale)


class ContiguousQuantisedStep(QuantisedStep):
    """A step over contiguous rows, one per request."""

    def __init__(self, inputs: ContiguousInputs) -> None:
        ends = [0]
        for n in inputs.seq_lens:
            ends.append(ends[-1] + n)
        super().__init__(inputs, list(zip(ends, inputs.seq_lens, strict=False)), ends[-1])
        self._slots = inputs.slots

    def load(self, kv: Tensor, scales: Tensor, buffer: Tensor) -> None:
        for slot, (first, n) in zip(self._slots, self._spans, strict=True):
            factors = scales[:, slot, :n].transpose(1, 2) if self._per_token else scales.unsqueeze(2)
            stored = kv[:, slot, :n].transpose(1, 2)
            dequantise(stored, factors.unsqueeze(-1), buffer[:, :, first : first + n])


class GatherQuantisedStep(QuantisedStep):
    """A step over blocks: gathers all blocks with their scales into a buffer of whole blocks."""

    def __init__(self, inputs: PagedInputs) -> None:
        size, spans, first = inputs.block_size, [], 0
        blocks, counts = inputs.blocks()
        for count, n in zip(counts, inputs.seq_lens, strict=True):
            spans.append((first, n))
            first += count * size
        super().__init__(inputs, spans, first)
        self._blocks = torch.from_numpy(blocks).to(inputs.kv.device)

    def load(self, kv: Tensor, scales: Tensor, buffer: Tensor) -> None:
        _, blocks, size, heads, dim = kv.shape
        # View all bytes of a token, scales and padding too, as one run, so that one copy gathers a block.
        unit = kv.stride(0) // (blocks * size)
        strides = (blocks * size * unit, size * unit, unit, 1)
        units = kv.view(torch.int8).as_strided((2, blocks, size, unit), strides)
        units = units.index_select(1, self._blocks).flatten(1, 2)
        stored = units[..., : heads * dim].view(kv.dtype).view(2, self._tokens, heads, dim)
        factors = scales.unsqueeze(1)
        if self._per_token:
            begin = scales.data_ptr() - kv.data_ptr()
            factors = units[..., begin : begin + 4 * heads].view(torch.float32)
        dequantise(stored.transpose(1, 2), factors.transpose(1, 2).unsqueeze(-1), buffer)
