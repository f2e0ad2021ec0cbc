"""Decode steps as captured graphs: one launch runs a whole forward pass.

A graph replays the same kernels on the same addresses. So everything that differs between steps is in buffers
that the graph reads: tokens, positions, where to store, lengths, slots or block tables, the split plan. KV
addresses never change, so a graph stays valid as requests grow. No driver call happens inside a capture.

    batch of 5   | r0 | r1 | r2 | r3 | r4 | pad | pad | pad |    graph for 8
    seq_lens       17    3   44    9    2     0     0     0      0: reads nothing, result is zero
    slot_mapping   ..   ..   ..   ..   ..    -1    -1    -1      -1: stores nothing

Padding rows neither read nor write KV, so they need no KV memory.
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
"""Upper bound on the splits per request in a graph's grid. Large batches fill the device without splits."""


def padded_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64 and every 16 beyond; at most `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 16)]
    return [size for size in sizes if size < largest] + [largest]


class PackedTokens(Protocol):
    """A step's tokens on the host."""

    @property
    def token_ids(self) -> Sequence[int]:
        """`[T]` token ids; 0 for a pending token, whose id is not on the host yet."""

    @property
    def positions(self) -> Sequence[int]:
        """`[T]` positions of the tokens in their requests."""

    @property
    def pending(self) -> Sequence[tuple[int, int]]:
        """Pending tokens, as pairs: index in `token_ids`, row in the step in flight that computes it."""


class Capturable(Protocol):
    """An attention implementation whose kernel launches can be captured."""

    @property
    def programs(self) -> int:
        """Number of kernel programs that the device runs at a time."""

    def split_plan(self, seq_lens: list[int], kv_heads: int, num_splits: int | None = None) -> SplitPlan:
        """The plan that splits the long requests of a step."""

    def graph_step(
        self,
        kv: Tensor,
        scales: Tensor | None,
        inputs: DeviceInputs,
        plan: SplitPlan,
        splits: SplitBuffers | None,
    ) -> StepAttention:
        """A step that reads everything from `inputs` and `splits`. Their contents may change later."""


class Capture(ABC):
    """A way to record a forward pass and to run it again."""

    @abstractmethod
    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that replays `forward` on the same buffers and returns its result."""


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
        # "thread_local": the mapper's thread may map pages meanwhile, which does not affect the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class EagerCapture(Capture):
    """Runs the pass anew each time, with the same buffers and padding, on a device without graphs."""

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return forward


class _Graph(NamedTuple):
    replay: Callable[[], Tensor]
    splits: SplitBuffers | None


class DecodeGraphs:
    """Captured decode passes of a model, one per padded batch size. Each is captured when first needed.

    `place_width`: maximum number of blocks in a request's block table; 0 for slots.
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
        """Whether a step holds only decodes, and no more than the largest graph has rows."""
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
        """Capture the pass for `size` rows. All rows are padding during the capture."""
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
        """Write a step into the buffers. The rows behind it become padding."""
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
