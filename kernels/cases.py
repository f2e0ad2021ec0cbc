"""The kernels that the static check compiles: which public functions it calls, with which shapes.

A case is named kind/where/types/head size, for example `decode/paged-16/bf16/d128`. Tensors are small
and their values never read; strides and alignment are those of an engine with 32 layers, interleaved, so that
a token's neighbour is far away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import contiguous, paged
from .launch import KVScales
from .split import SplitBuffers, SplitPlan
from .store import store
from .tables import prefill_tile

LAYERS = 32
KV_HEADS = 8
REQUESTS = 4

TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "int8": (torch.bfloat16, torch.int8),
    "int8-token": (torch.bfloat16, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "fp8-token": (torch.bfloat16, torch.float8_e4m3fn),
}
"""Types of q and of the cache. 8-bit caches have scales per head, or per token and head (`-token`)."""


Launch = Callable[[int], None]


@dataclass(frozen=True)
class Case:
    """One kernel to compile: `launch(capability)` calls it. Representative cases do for a quick check."""

    name: str
    launch: Launch
    representative: bool = False


def _cache(positions: int, types: str, head_dim: int) -> tuple[Tensor, Tensor, KVScales | None]:
    """k, v and scales of one layer, strided as in an interleaved cache of many layers."""
    dtype = TYPES[types][1]
    scales = None
    if types.endswith("-token"):
        factors = torch.empty(2, positions, LAYERS, 2, KV_HEADS)[:, :, 0]
        scales = KVScales(factors[:, :, 0], factors[:, :, 1])
    elif types in ("int8", "fp8"):
        scales = KVScales(torch.empty(KV_HEADS), torch.empty(KV_HEADS))
    kv = torch.empty(2, positions, LAYERS, 2, KV_HEADS, head_dim, dtype=dtype)[:, :, 0]
    return kv[:, :, 0], kv[:, :, 1], scales


def _int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def decode(where: str, types: str, head_dim: int, group: int = 4, split: bool = True) -> Launch:
    block_size = int(where.partition("-")[2] or 64)

    def launch(capability: int) -> None:
        k, v, scales = _cache(block_size, types, head_dim)
        q = torch.empty(REQUESTS, KV_HEADS * group, head_dim, dtype=TYPES[types][0])
        splits = SplitBuffers(REQUESTS, q.shape[1], head_dim, SplitPlan(256, 4), "cpu") if split else None
        lengths = _int32(REQUESTS)
        if where == "contiguous":
            contiguous.decode(q, k, v, slots=_int32(REQUESTS), seq_lens=lengths, scales=scales, splits=splits)
        else:
            table = _int32(REQUESTS, 7)
            paged.decode(q, k, v, block_table=table, seq_lens=lengths, scales=scales, splits=splits)

    return launch


def prefill(where: str, types: str, head_dim: int, group: int = 4, pointers: bool = False) -> Launch:
    """pointers: without TMA where the table would use it."""
    block_size = int(where.partition("-")[2] or 64)

    def launch(capability: int) -> None:
        k, v, scales = _cache(block_size, types, head_dim)
        q = torch.empty(64, KV_HEADS * group, head_dim, dtype=TYPES[types][0])
        cu_seqlens, lengths = _int32(REQUESTS + 1), _int32(REQUESTS)
        if where == "contiguous":
            block_d = 1 << (head_dim - 1).bit_length()
            tile = prefill_tile(capability, block_d, k.element_size(), tma=False) if pointers else None
            contiguous.prefill(
                q, k, v, cu_seqlens=cu_seqlens, slots=_int32(REQUESTS), seq_lens=lengths, max_query_len=64,
                scales=scales, tile=tile,
            )  # fmt: skip
        else:
            paged.prefill(
                q, k, v, cu_seqlens=cu_seqlens, block_table=_int32(REQUESTS, 7), seq_lens=lengths,
                max_query_len=64, scales=scales,
            )  # fmt: skip

    return launch


def storing(types: str, head_dim: int) -> Launch:
    def launch(capability: int) -> None:
        k_cache, v_cache, scales = _cache(64, types, head_dim)
        new = torch.empty(REQUESTS, KV_HEADS, head_dim, dtype=TYPES[types][0])
        store(new, new, k_cache, v_cache, torch.zeros(REQUESTS, dtype=torch.int64), scales)

    return launch


def all_cases() -> list[Case]:
    """bfloat16 at every head size in every place, the other types at the usual sizes, odd shapes once."""
    cases: list[Case] = []
    places = ("contiguous", "paged-16", "paged-64", "paged-256")

    def attention(where: str, types: str, head_dim: int, group: int = 4) -> None:
        suffix = f"{where}/{types}/d{head_dim}" + (f"/group{group}" if group != 4 else "")
        shape = (where, types, head_dim, group)
        cases.append(Case(f"decode/{suffix}", decode(*shape), suffix in QUICK_DECODE))
        cases.append(Case(f"prefill/{suffix}", prefill(*shape), suffix in QUICK_PREFILL))

    for head_dim in (128, 64, 256):
        for where in places:
            attention(where, "bf16", head_dim)
        for types in TYPES:
            if types != "bf16":
                attention("contiguous", types, head_dim)
                attention("paged-16", types, head_dim)
    for head_dim in (32, 80, 96, 112):
        attention("contiguous", "bf16", head_dim)
        attention("paged-16", "bf16", head_dim)
    attention("contiguous", "int8", 32)
    for group in (1, 7, 32, 48):
        attention("contiguous", "bf16", 128, group)
        attention("paged-16", "bf16", 128, group)
    attention("contiguous", "bf16", 256, 32)
    for head_dim in (64, 128, 256):
        name = f"prefill/contiguous-pointers/bf16/d{head_dim}"
        cases.append(Case(name, prefill("contiguous", "bf16", head_dim, pointers=True), head_dim == 128))
    cases.append(Case("decode/contiguous-unsplit/bf16/d128", decode("contiguous", "bf16", 128, split=False)))
    for types in ("bf16", "int8", "int8-token", "fp8", "fp8-token"):
        cases.append(Case(f"store/{types}/d128", storing(types, 128), types in ("bf16", "fp8-token")))
    return cases


QUICK_DECODE = {
    "contiguous/bf16/d128", "paged-16/bf16/d128", "paged-256/bf16/d128", "contiguous/fp16/d128",
    "contiguous/bf16/d64", "contiguous/bf16/d256", "contiguous/bf16/d80", "paged-16/int8-token/d128",
    "contiguous/fp8/d128", "contiguous/bf16/d128/group32", "paged-16/fp32/d128",
}  # fmt: skip
QUICK_PREFILL = {
    "contiguous/bf16/d128", "paged-16/bf16/d128", "contiguous/bf16/d64", "contiguous/bf16/d256",
    "contiguous/fp16/d128", "contiguous/int8-token/d128", "contiguous/bf16/d128/group7",
    "contiguous/fp32/d64", "contiguous/fp32/d128", "paged-16/fp32/d128", "paged-16/fp32/d256",
}  # fmt: skip
"""What a quick check compiles: each kind of kernel, and the shapes closest to their limits."""
