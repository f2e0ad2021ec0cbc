"""Batches with known keys and values, laid out as a contiguous cache, as blocks, or in 8 bits.

The truth is a list of dense tensors, one per request. A cache made from it holds NaN wherever no token lies:
behind each request's end, in slots and blocks of nobody, and in the padding of its strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.kernels import contiguous, paged, reference
from vattn.kernels.launch import KVScales
from vattn.kernels.split import SplitBuffers, SplitPlan
from vattn.kernels.tables import Tile

SMALL = Tile(16, 16, 4, 2)
"""Tiles so small that short contexts have several: the interpreter takes its time for each."""

LAYOUTS = ("interleaved", "per_layer", "odd")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of outputs around 1: one unit in the last place, rounding of the weights to 16 bits included."""
TF32_TOLERANCE = 3e-3


@dataclass
class Batch:
    """q `[tokens, q_heads, head_dim]`; keys and values: per request `[seq_len, kv_heads, head_dim]`."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    query_lens: list[int]

    @property
    def seq_lens(self) -> list[int]:
        return [len(k) for k in self.keys]

    @property
    def cu_seqlens(self) -> list[int]:
        return [sum(self.query_lens[:b]) for b in range(len(self.query_lens) + 1)]

    def expected(self, scale: float | None = None) -> Tensor:
        """float64 output; zeros for requests without tokens."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        scale = self.q.shape[2] ** -0.5 if scale is None else scale
        for b, length in enumerate(self.seq_lens):
            rows = slice(self.cu_seqlens[b], self.cu_seqlens[b + 1])
            if length:
                out[rows] = reference.attend(self.q[rows], self.keys[b], self.values[b], scale)
        return out


def make_batch(
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Random numbers; a decode batch (one query token each) unless query_lens are given."""
    g = torch.Generator().manual_seed(seed)
    query_lens = list(query_lens or [1] * len(seq_lens))
    q = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=g).to(dtype)
    keys, values = (
        [torch.randn(n, kv_heads, head_dim, generator=g).to(dtype) for n in seq_lens] for _ in range(2)
    )
    return Batch(q, keys, values, query_lens)


def empty_kv(
    layout: str, rows: int, positions: int, tail: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """k and v `[rows, positions, *tail]` of the middle one of three layers, all NaN (-1 for integers)."""
    fill = float("nan") if dtype.is_floating_point else -1
    if layout == "interleaved":
        kv = torch.full((rows, positions, 3, 2, *tail), fill, dtype=torch.float32).to(dtype)
        return kv[:, :, 1, 0], kv[:, :, 1, 1]
    if layout == "per_layer":
        kv = torch.full((3, 2, rows, positions, *tail), fill, dtype=torch.float32).to(dtype)
        return kv[1, 0], kv[1, 1]
    # "odd": no stride is a multiple of anything, and rows lie further apart than their tokens need.
    kv = torch.full((rows, positions + 1, 2, *tail[:-1], tail[-1] + 3), fill, dtype=torch.float32).to(dtype)
    return kv[:, :positions, 0, ..., : tail[-1]], kv[:, :positions, 1, ..., : tail[-1]]


@dataclass
class Contiguous:
    """A batch in slots; `decode` and `prefill` call the kernels under test and return CPU tensors."""

    batch: Batch
    k: Tensor
    v: Tensor
    slots: list[int]
    device: torch.device
    scales: KVScales | None = None

    def place(self) -> dict[str, Tensor]:
        return {"slots": torch.tensor(self.slots, dtype=torch.int32, device=self.device)}

    kernels = contiguous


@dataclass
class Paged:
    """A batch in blocks."""

    batch: Batch
    k: Tensor
    v: Tensor
    tables: list[list[int]]
    device: torch.device
    scales: KVScales | None = None

    def place(self) -> dict[str, Tensor]:
        width = max(1, *(len(t) for t in self.tables)) + 1
        # What lies behind a request's blocks must not be read: a number that is no block.
        rows = [t + [2**30] * (width - len(t)) for t in self.tables]
        return {"block_table": torch.tensor(rows, dtype=torch.int32, device=self.device)}

    kernels = paged


Placed = Contiguous | Paged


def place_contiguous(batch: Batch, device: torch.device, layout: str = "interleaved") -> Contiguous:
    """Slots in mixed order with one of nobody; each has room for a few tokens more than any needs."""
    order = torch.randperm(len(batch.keys) + 1, generator=torch.Generator().manual_seed(1))
    slots = order[: len(batch.keys)].tolist()
    tail = batch.keys[0].shape[1:]
    k, v = empty_kv(layout, len(slots) + 1, max(batch.seq_lens) + 5, tail, batch.keys[0].dtype)
    for slot, keys, values in zip(slots, batch.keys, batch.values, strict=True):
        k[slot, : len(keys)] = keys
        v[slot, : len(values)] = values
    return Contiguous(batch, to(k, device), to(v, device), slots, device)


def place_paged(
    batch: Batch, device: torch.device, block_size: int = 8, layout: str = "interleaved"
) -> Paged:
    """Blocks in mixed order, with one of nobody."""
    counts = [-(-n // block_size) for n in batch.seq_lens]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(2)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    tail = batch.keys[0].shape[1:]
    k, v = empty_kv(layout, sum(counts) + 1, block_size, tail, batch.keys[0].dtype)
    for table, keys, values in zip(tables, batch.keys, batch.values, strict=True):
        for t in range(len(keys)):
            k[table[t // block_size], t % block_size] = keys[t]
            v[table[t // block_size], t % block_size] = values[t]
    return Paged(batch, to(k, device), to(v, device), tables, device)


def to(x: Tensor, device: torch.device) -> Tensor:
    """Move a strided view with everything between its elements, so that strides stay as they are."""
    if device.type == "cpu":
        return x
    span = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
    return span.as_strided(x.shape, x.stride(), x.storage_offset())


def decode(
    placed: Placed,
    plan: SplitPlan | None = None,
    *,
    tile: Tile | None = SMALL,
    scale: float | None = None,
) -> Tensor:
    """Run the decode kernel; on a GPU with the shipped tiles, which fit nothing smaller."""
    q = placed.batch.q.to(placed.device)
    splits = SplitBuffers(*q.shape, plan, placed.device) if plan else None
    if splits:
        splits.partial.fill_(float("nan"))
        splits.lse.fill_(float("nan"))
    lengths = torch.tensor(placed.batch.seq_lens, dtype=torch.int32, device=placed.device)
    out = placed.kernels.decode(
        q, placed.k, placed.v, seq_lens=lengths, scale=scale, scales=placed.scales, splits=splits, tile=tile,
        **placed.place(),
    )  # fmt: skip
    return out.cpu()


def prefill(placed: Placed, *, tile: Tile | None = SMALL, scale: float | None = None) -> Tensor:
    """Run the prefill kernel on the batch's chunks."""
    batch = placed.batch
    out = placed.kernels.prefill(
        batch.q.to(placed.device), placed.k, placed.v,
        cu_seqlens=torch.tensor(batch.cu_seqlens, dtype=torch.int32, device=placed.device),
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32, device=placed.device),
        max_query_len=max(batch.query_lens), scale=scale, scales=placed.scales, tile=tile, **placed.place(),
    )  # fmt: skip
    return out.cpu()


def assert_close(
    got: Tensor, expected: Tensor, *, on: torch.device | str = "cpu", factor: float = 1.0
) -> None:
    """Equal to rounding: a unit in the last place of the output type, and what tf32 loses on a GPU."""
    tolerance = TOLERANCE[got.dtype] * factor
    if got.dtype == torch.float32 and torch.device(on).type == "cuda":
        tolerance = TF32_TOLERANCE * factor
    scale = expected.abs().clamp(min=1.0)
    worst = ((got.double() - expected.double()).abs() / scale).max().item() if got.numel() else 0.0
    assert got.isfinite().all(), "the output is not finite"
    assert worst <= tolerance, f"off by {worst:.2e}, {tolerance:.2e} allowed"
