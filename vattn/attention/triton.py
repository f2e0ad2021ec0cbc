"""vattn's own Triton kernels, for contiguous rows and for block tables: split-KV decode, varlen prefill."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor, nn

from vattn.attention.base import AttentionBackend, StepAttention
from vattn.attention.device import DeviceInputs, to_device
from vattn.attention.graphs import CudaGraphCapture, DecodeGraphs, EagerCapture
from vattn.errors import ConfigError
from vattn.kernels import contiguous, paged
from vattn.kernels.launch import KVScales, interpreted
from vattn.kernels.split import SplitBuffers, SplitPlan, plan_splits
from vattn.kernels.store import store
from vattn.kv.base import AttentionInputs, KVCache

PROGRAMS_PER_SM = 2


class TritonAttention(AttentionBackend):
    """The kernels of `vattn.kernels`, on a GPU or in Triton's interpreter.

    The two kernel modules differ only in how they are told where keys and values lie.
    """

    kernels: ModuleType
    place: str
    """Name of the kernel argument that says where keys and values lie: slots or block_table."""

    def check(self, kv: KVCache, device: torch.device) -> None:
        if device.type != "cuda" and not interpreted():
            raise ConfigError(
                f"attention='triton' needs a GPU, not {device}; to run the kernels slowly in Triton's "
                "interpreter set TRITON_INTERPRET=1 before Python starts"
            )

    @cached_property
    def programs(self) -> int:
        """Number of kernel programs that the device runs at a time; a guess in the interpreter."""
        if not torch.cuda.is_available():
            return 8
        return PROGRAMS_PER_SM * torch.cuda.get_device_properties().multi_processor_count

    def plan(self, inputs: AttentionInputs) -> StepAttention:
        on_device = to_device(inputs, inputs.kv.device)
        decodes = inputs.seq_lens[: on_device.num_decodes]
        plan = self.split_plan(decodes, inputs.kv.shape[4])
        return TritonStep(self, inputs.kv, inputs.scales, on_device, plan)

    def decode_graphs(
        self, model: nn.Module, kv: KVCache, *, num_heads: int, max_batch: int
    ) -> DecodeGraphs | None:
        return DecodeGraphs(
            model,
            self,
            kv.tensor,
            kv.scales,
            num_heads=num_heads,
            max_batch=max_batch,
            place_width=kv.table_width,
            capture=CudaGraphCapture() if kv.tensor.is_cuda else EagerCapture(),
        )

    def graph_step(
        self,
        kv: Tensor,
        scales: Tensor | None,
        inputs: DeviceInputs,
        plan: SplitPlan,
        splits: SplitBuffers | None,
    ) -> StepAttention:
        return TritonStep(self, kv, scales, inputs, plan, splits)

    def split_plan(self, seq_lens: list[int], kv_heads: int, num_splits: int | None = None) -> SplitPlan:
        return plan_splits(seq_lens, kv_heads, self.programs, num_splits)


class ContiguousTriton(TritonAttention):
    """Kernels that read contiguous rows, by slot."""

    kernels = contiguous
    place = "slots"


class PagedTriton(TritonAttention):
    """Kernels that read block tables."""

    kernels = paged
    place = "block_table"

    def check(self, kv: KVCache, device: torch.device) -> None:
        super().check(kv, device)
        block_size = int(kv.describe()["block_size"])
        if block_size & (block_size - 1):
            raise ConfigError(
                f"attention='triton' needs a block_size that is a power of two, not {block_size}: the kernel "
                "finds a token's block with shifts; use 'gather' for others"
            )


class TritonStep:
    """One step. `scales` is as in `AttentionInputs`.

    `splits`: buffers of a captured graph, which hold its plan; None if the step is not captured.
    """

    def __init__(
        self,
        backend: TritonAttention,
        kv: Tensor,
        scales: Tensor | None,
        inputs: DeviceInputs,
        plan: SplitPlan,
        splits: SplitBuffers | None = None,
    ) -> None:
        self._kernels, self._place = backend.kernels, backend.place
        self._kv = kv.unbind(0)
        self._scales = [None] * len(kv) if scales is None else [KVScales(k, v) for k, v in scales]
        self._inputs = inputs
        self._plan = plan
        self._splits = splits

    def _split_buffers(self, q: Tensor) -> SplitBuffers | None:
        """Workspace of split decode, made by the first layer and used by all. None if there is one split."""
        if self._splits is None and self._plan.num_splits > 1:
            self._splits = SplitBuffers(
                self._inputs.num_decodes, q.shape[1], q.shape[2], self._plan, q.device
            )
        return self._splits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        inputs, (keys, values) = self._inputs, self._kv[layer]
        scales = self._scales[layer]
        store(k, v, keys, values, inputs.slot_mapping, scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n = inputs.num_decodes
        if n:
            self._kernels.decode(
                q[:n],
                keys,
                values,
                seq_lens=inputs.seq_lens[:n],
                scale=scale,
                scales=scales,
                splits=self._split_buffers(q),
                out=out[:n],
                **{self._place: inputs.places[:n]},
            )
        if inputs.max_query_len:
            self._kernels.prefill(
                q[n:],
                keys,
                values,
                cu_seqlens=inputs.cu_seqlens,
                seq_lens=inputs.seq_lens[n:],
                max_query_len=inputs.max_query_len,
                scale=scale,
                scales=scales,
                out=out[n:],
                **{self._place: inputs.places[n:]},
            )
        return out
