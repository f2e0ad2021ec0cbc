"""Decode steps from captured graphs: one launch for a whole forward pass.

A graph replays the same kernels on the same addresses, so everything a step may vary lies in buffers that
the graph reads: tokens, positions, where to store, lengths, slots or block tables, the split plan. KV
addresses never change, so a graph stays valid as ranges grow; no driver call happens inside a capture.

    batch of 5   | r0 | r1 | r2 | r3 | r4 | pad | pad | pad |    graph for 8
    seq_lens       17    3   44    9    2     0     0     0      0: reads nothing, yields zeros
    slot_mapping   ..   ..   ..   ..   ..    -1    -1    -1      -1: stores nothing

Padding rows neither read nor write, so no memory has to be kept for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vattn.attention.base import StepAttention
from vattn.attention.device import DeviceInputs, places
from vattn.kernels.split import SplitBuffers, SplitPlan
from vattn.kv.base import AttentionInputs

MAX_SPLITS = 16
"""Splits a graph's grid allows each request, for a batch of one; larger batches fill the device without."""


def padded_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64 and every 16 beyond; at most `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [size for size in sizes if size < largest] + [largest]


class PackedTokens(Protocol):
    """A step's tokens on the host."""

    @property
    def token_ids(self) -> Sequence[int]:
        """`[T]`; 0 where the token is pending."""

    @property
    def positions(self) -> Sequence[int]:
        """`[T]`."""

    @property
    def pending(self) -> Sequence[tuple[int, int]]:
        """(index in the tokens, row in the step in flight) of pending tokens."""


class Capturable(Protocol):
    """Attention made of kernels whose launches can be captured."""

    @property
    def programs(self) -> int:
        """Programs the device runs at a time."""

    def split_plan(self, seq_lens: list[int], kv_heads: int, num_splits: int | None = None) -> SplitPlan:
        """How to split long requests of a step."""

    def graph_step(
        self,
        kv: Tensor,
        scales: Tensor | None,
        inputs: DeviceInputs,
        plan: SplitPlan,
        splits: SplitBuffers | None,
    ) -> StepAttention:
        """A step that reads everything from `inputs` and `splits`, whose contents may change."""


class Capture(ABC):
    """How a forward pass is recorded and run again."""

    @abstractmethod
    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns what replays `forward` on the same buffers and gives its result."""


class CudaGraphCapture(Capture):
    """`torch.cuda.CUDAGraph`s that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Two runs before the capture: Triton compiles, and allocations settle.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the mapper's thread may map pages meanwhile, which touches nothing captured here.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class EagerCapture(Capture):
    """Runs the pass anew each time: the same buffers and padding, where there is no graph to capture."""

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return forward


class _Graph(NamedTuple):
    replay: Callable[[], Tensor]
    splits: SplitBuffers | None


class DecodeGraphs:
    """Captured decode passes of a model, one per padded batch size, made when first needed.

    `place_width`: entries of a request's block table at most; 0 for slots.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Capturable,
        kv: Tensor,
        scales: Tensor | None,
        *,
        num_heads: int,
        max_batch: int,
        place_width: int,
        capture: Capture,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv = kv
        self.scales = scales
        self.num_heads = num_heads
        self.sizes = padded_sizes(max_batch)
        self.capture = capture
        device = kv.device

        def buffer(*shape: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self._tokens = buffer(max_batch, dtype=torch.int64)
        self._positions = buffer(max_batch, dtype=torch.int64)
        self._slot_mapping = buffer(max_batch, dtype=torch.int64, fill=-1)
        self._seq_lens = buffer(max_batch)
        self._places = buffer(max_batch, place_width) if place_width else buffer(max_batch)
        self._graphs: dict[int, _Graph] = {}

    def fits(self, inputs: AttentionInputs) -> bool:
        """True for a step of decodes alone, not larger than the largest graph."""
        return inputs.decode_only and 0 < len(inputs.seq_lens) <= self.sizes[-1]

    def run(self, packed: PackedTokens, inputs: AttentionInputs, last_tokens: Tensor | None) -> Tensor:
        """Logits `[B, vocab]` of a step that `fits`; they stay valid until the next call."""
        size = self.sizes[bisect_left(self.sizes, len(inputs.seq_lens))]
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._record(size)
        self._fill(size, packed, inputs, last_tokens)
        if graph.splits is not None:
            plan = self.attention.split_plan(inputs.seq_lens, self.kv.shape[4], graph.splits.num_splits)
            graph.splits.write(plan)
        return graph.replay()[: len(inputs.seq_lens)]

    def _record(self, size: int) -> _Graph:
        """Capture the pass for `size` rows, all of them padding while it is captured."""
        self._slot_mapping.fill_(-1)
        self._seq_lens.zero_()
        kv_heads, head_dim = self.kv.shape[4:]
        per_request = -(-self.attention.programs // (size * kv_heads))
        num_splits = min(MAX_SPLITS, per_request)
        plan = SplitPlan(split_len=1 << 30, num_splits=num_splits)
        splits = (
            SplitBuffers(size, self.num_heads, head_dim, plan, self.kv.device) if num_splits > 1 else None
        )
        inputs = DeviceInputs(
            num_decodes=size,
            max_query_len=0,
            slot_mapping=self._slot_mapping[:size],
            seq_lens=self._seq_lens[:size],
            cu_seqlens=self._seq_lens[:1],
            places=self._places[:size],
        )
        step = self.attention.graph_step(self.kv, self.scales, inputs, plan, splits)

        def forward() -> Tensor:
            with torch.autocast(self.kv.device.type, enabled=False):
                output = self.model(
                    input_ids=self._tokens[:size].unsqueeze(0),
                    position_ids=self._positions[:size].unsqueeze(0),
                    use_cache=False,
                    vattn_step=step,
                )
            logits: Tensor = output.logits[0]
            return logits

        return _Graph(self.capture.record(forward), splits)

    def _fill(
        self, size: int, packed: PackedTokens, inputs: AttentionInputs, last_tokens: Tensor | None
    ) -> None:
        """Write a step into the buffers; rows behind it become padding."""
        n = len(inputs.seq_lens)

        def write(buffer: Tensor, values: Sequence[int] | np.ndarray | Tensor, padding: int) -> None:
            host = torch.full((size,), padding, dtype=buffer.dtype)
            host[:n] = torch.as_tensor(values, dtype=buffer.dtype)
            buffer[:size].copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)

        write(self._tokens, packed.token_ids, 0)
        write(self._positions, packed.positions, 0)
        write(self._slot_mapping, inputs.slot_mapping, -1)
        write(self._seq_lens, inputs.seq_lens, 0)
        where = torch.from_numpy(places(inputs))
        if self._places.ndim == 1:
            self._places[:n].copy_(where, non_blocking=True)
        else:
            self._places[:n, : where.shape[1]].copy_(where, non_blocking=True)
        if packed.pending:
            assert last_tokens is not None
            at, rows = torch.tensor(packed.pending, device=self.kv.device).unbind(1)
            self._tokens[at] = last_tokens[rows].clamp(min=0)
