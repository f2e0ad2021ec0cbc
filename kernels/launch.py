"""Shared by every launch: check operands and turn them into kernel arguments.

Kernels trust the strides they are given (in elements). Operands that would make a kernel read or write
outside its tensors are refused here, before the launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .tables import Tile, head_rows

LOG2E = math.log2(math.e)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED = (torch.int8, torch.float8_e4m3fn)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True)
class KVScales:
    """float32 factors that turn stored 8-bit keys and values back into numbers: value = stored * scale.

    Either `[kv_heads]`, static, one per head, or `[rows, positions, kv_heads]` like the cache itself, one per
    token and head, with any strides. k and v have the same shape and strides.
    """

    k: Tensor
    v: Tensor

    @property
    def per_token(self) -> bool:
        return self.k.ndim == 3

    def check(self, cache: Tensor) -> None:
        """Raise ValueError unless these scales fit a cache `[rows, positions, kv_heads, head_dim]`."""
        heads = tuple(cache.shape[2:3])
        if self.k.shape not in (heads, tuple(cache.shape[:3])):
            raise ValueError(
                f"scales have shape {tuple(self.k.shape)}; expected {heads}, one per KV head, or "
                f"{tuple(cache.shape[:3])}, one per token and head"
            )
        if self.v.shape != self.k.shape or self.v.stride() != self.k.stride():
            raise ValueError("the scales of k and v must have the same shape and strides")
        if not self.per_token and not self.k.is_contiguous():
            raise ValueError("scales per head must be contiguous")
        if self.k.dtype != torch.float32 or self.v.dtype != torch.float32:
            raise ValueError(f"scales must be float32, not {self.k.dtype} and {self.v.dtype}")


def scale_kind(scales: KVScales | None) -> str:
    """The constexpr SCALES of a kernel."""
    if scales is None:
        return "none"
    return "token" if scales.per_token else "head"


def scale_pointers(scales: KVScales | None) -> tuple[Tensor | None, Tensor | None]:
    """k_scale and v_scale of a kernel."""
    return (scales.k, scales.v) if scales else (None, None)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    return bool(triton.knobs.runtime.interpret)


def capability() -> int:
    """Compute capability of the current device, 90 for 9.0; 0 in the interpreter. RuntimeError if no GPU."""
    if interpreted():
        return 0
    try:
        driver = triton.runtime.driver.active
    except RuntimeError as error:
        raise RuntimeError(
            "Triton kernels need a GPU, and none is visible; to interpret them slowly on the CPU, set "
            "TRITON_INTERPRET=1 before Python starts"
        ) from error
    return int(driver.get_current_target().arch)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def check_cache(k: Tensor, v: Tensor, scales: KVScales | None) -> None:
    """Raise ValueError unless k and v are a cache a kernel can read or write."""
    if k.ndim != 4 or k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(
            f"k and v must be [rows, positions, kv_heads, head_dim] with equal shapes and strides, not "
            f"{tuple(k.shape)} strides {k.stride()} and {tuple(v.shape)} strides {v.stride()}"
        )
    if k.stride(3) != 1:
        raise ValueError(f"head_dim must be the dense dimension of k and v, not of stride {k.stride(3)}")
    if not MIN_HEAD_DIM <= k.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {k.shape[3]} is outside {MIN_HEAD_DIM}..{MAX_HEAD_DIM}")
    if k.dtype != v.dtype or k.dtype not in (*FLOATS, *QUANTISED):
        raise ValueError(f"k and v are {k.dtype} and {v.dtype}; expected one of {(*FLOATS, *QUANTISED)}")
    if (k.dtype in QUANTISED) != (scales is not None):
        raise ValueError(f"{k.dtype} keys and values {'need' if scales is None else 'take no'} scales")
    if scales is not None:
        scales.check(k)


@dataclass(frozen=True)
class Operands:
    """Checked q, k, v and scales of one attention launch."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scales: KVScales | None
    softmax_scale: float

    @staticmethod
    def check(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, scales: KVScales | None, out: Tensor | None
    ) -> Operands:
        """q `[tokens, q_heads, head_dim]`, k and v `[rows, positions, kv_heads, head_dim]`, or ValueError."""
        check_cache(k, v, scales)
        if q.ndim != 3 or q.shape[2] != k.shape[3] or q.stride(2) != 1:
            raise ValueError(
                f"q must be [tokens, q_heads, {k.shape[3]}] with a dense last dimension, not "
                f"{tuple(q.shape)} strides {q.stride()}"
            )
        if q.shape[1] % k.shape[2]:
            raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[2]} KV heads evenly")
        if q.dtype not in FLOATS or (k.dtype in FLOATS and q.dtype != k.dtype):
            raise ValueError(f"q is {q.dtype} but k and v are {k.dtype}")
        scale = q.shape[2] ** -0.5 if scale is None else scale
        if not scale > 0:
            raise ValueError(f"the softmax scale must be positive, not {scale}")
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        elif out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1:
            raise ValueError(f"out is {tuple(out.shape)} {out.dtype}; expected {tuple(q.shape)} {q.dtype}")
        if k.dtype == torch.float8_e4m3fn and capability() < 89:
            # No conversion instruction before sm_89 (nor in the interpreter): the kernels widen the bits.
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        return Operands(q, k, v, out, scales, scale)

    @property
    def q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def block_d(self) -> int:
        return next_power_of_2(self.q.shape[2])

    @property
    def itemsize(self) -> int:
        return self.k.element_size()

    @property
    def block_h(self) -> int:
        """Query heads of a decode tile."""
        return head_rows(self.group, self.block_d)

    def decode_grid(self, num_splits: int) -> tuple[int, int, int]:
        # KV heads first: neighbouring programs read neighbouring bytes of the same tokens.
        return self.kv_heads * -(-self.group // self.block_h), self.q.shape[0], num_splits

    def packs(self, tile: Tile) -> bool:
        """Whether a prefill tile holds all query heads of a KV head: if that fills three quarters of it."""
        return tile.block_m // self.group * self.group * 4 >= tile.block_m * 3

    def prefill_grid(self, tile: Tile, max_query_len: int, requests: int) -> tuple[int, int, int]:
        packs = self.packs(tile)
        tokens = tile.block_m // self.group if packs else tile.block_m
        return max(1, -(-max_query_len // tokens)), self.kv_heads if packs else self.q_heads, requests

    def scale_arguments(self) -> tuple[Any, ...]:
        """k_scale, v_scale, qk_scale of a kernel."""
        return *scale_pointers(self.scales), self.softmax_scale * LOG2E

    def qo_strides(self) -> tuple[int, ...]:
        return self.q.stride(0), self.q.stride(1), self.out.stride(0), self.out.stride(1)

    def kv_strides(self) -> tuple[int, ...]:
        """Strides of row, position and head: of k and v, then of the scales (0 if they have none)."""
        scale_strides = self.scales.k.stride() if self.scales and self.scales.per_token else (0, 0, 0)
        return *self.k.stride()[:3], *scale_strides

    def constants(self, tile: Tile) -> dict[str, Any]:
        """The constexprs and options all attention kernels share."""
        exact = interpreted() or self.q.dtype != torch.float32
        # ptxas would spill a few registers of 8-bit kernels to fit one more program on an SM.
        options = {"maxnreg": 255} if self.itemsize == 1 else {}
        return options | {
            "enable_fp_fusion": True,
            "GROUP": self.group,
            "HEAD_DIM": self.q.shape[2],
            "BLOCK_D": self.block_d,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "SCALES": scale_kind(self.scales),
            "WIDE": self.k.stride(1) * tile.block_n >= 2**31,
            # Arithmetic on bfloat16 is wrong in the interpreter, which holds it as 16-bit integers.
            "UPCAST": interpreted() and (self.q.dtype == torch.bfloat16 or self.k.dtype not in FLOATS),
            "PRECISION": "ieee" if exact else "tf32",
            "num_warps": tile.warps,
        }


def check_int32(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` is int32, dense in its last dimension and of this shape (-1: any)."""
    fits = tensor.ndim == len(shape) and all(n in (-1, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
        raise ValueError(f"{name} must be int32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
