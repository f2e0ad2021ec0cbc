"""Where a token's K and V lie: sizes, strides and the two contiguous layouts.

Every backend presents its memory as ONE strided tensor

    kv[layer, 2, row, position, kv_head, head_dim]        2 = (K, V)

so kernels need only a base pointer and strides, and a layout is only a choice of strides. One layer's K (or
V) of one token, all heads, always lies together. In this file that is called a *unit*:

    unit   | h0: D values | h1: D values | … | h0 h1 …  float32 scales | pad to 16 bytes |
                                               quantised per token and head only

    interleaved   a row holds whole tokens                  row s
                  +----------- token 0 -----------+------- token 1 ----
                  | L0 K | L0 V | L1 K | L1 V | … | L0 K | L0 V | …
                  +-------------------------------+--------------------
    per_layer     2 x layers ranges, each holding     range (layer, K or V)
                  one layer's K or V of every row     | row 0: t0 t1 t2 … | row 1: t0 t1 …
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vattn.kv.books.units import UnitLayout

if TYPE_CHECKING:
    import torch

SCALE_BYTES = 4  # a float32


class KVLayout(StrEnum):
    """How a contiguous row is laid out (vAttention, section 5, uses `per_layer`)."""

    INTERLEAVED = "interleaved"
    PER_LAYER = "per_layer"


class NamedDtype(NamedTuple):
    """What a `KVShape` asks of a dtype: its name and size. Stands for torch's where nothing is computed."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


def dtype_by_name(name: str) -> Any:
    """A dtype that needs no torch. Raises KeyError for a name that KV memory does not know."""
    sizes = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
    return NamedDtype(name, sizes[name])


@dataclass(frozen=True)
class KVShape:
    """The KV of one token: `num_layers` x (K, V) x `num_kv_heads` x `head_dim` elements of `dtype`.

    Only the name and `itemsize` of `dtype` are used here, so a numpy dtype works if nothing is computed.

    `scale_bytes`: 4 if each token and head has its own float32 scale beside its values, else 0.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale_bytes: int = 0

    @property
    def quantised(self) -> bool:
        """Whether values are stored in 8 bits and need scales, beside them or static."""
        return str(self.dtype).removeprefix("torch.") in ("int8", "float8_e4m3fn")

    @cached_property
    def head_elems(self) -> int:
        """Values of one layer's K (or V) of one token."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes of one layer's K (or V) of one token.

        With scales it is a multiple of 16, so that scales are aligned and values can be read with 16-byte
        loads.
        """
        values = self.head_elems * self.dtype.itemsize
        if not self.scale_bytes:
            return values
        return -(-(self.scale_offset + self.num_kv_heads * self.scale_bytes) // 16) * 16

    @property
    def scale_offset(self) -> int:
        """Offset of the scales in a unit, in bytes: behind the values, aligned."""
        return -(-self.head_elems * self.dtype.itemsize // SCALE_BYTES) * SCALE_BYTES

    @property
    def unit_elems(self) -> int:
        """Elements of one unit: the distance between neighbouring units."""
        return self.unit_bytes // self.dtype.itemsize

    @cached_property
    def token_elems(self) -> int:
        return 2 * self.num_layers * self.unit_elems

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, scales and padding included: layers x 2 x unit."""
        return 2 * self.num_layers * self.unit_bytes


@dataclass(frozen=True)
class RowLayout:
    """The geometry of `rows` contiguous rows of at most `max_tokens` tokens each.

    A row consists of `ranges` separate address ranges (1 if interleaved, 2 x layers if per-layer). Each
    range of a row spans `row_bytes`, a multiple of the page AND of the token stride, so that
    (row, position) flattens to one index with one stride. The padding is address space, not memory.
    """

    kind: KVLayout
    shape: KVShape
    rows: int
    max_tokens: int
    page_bytes: int

    @cached_property
    def ranges(self) -> int:
        return 1 if self.kind is KVLayout.INTERLEAVED else 2 * self.shape.num_layers

    @cached_property
    def token_elems(self) -> int:
        """Elements between two tokens of a row (the token stride)."""
        per_layer = self.kind is KVLayout.PER_LAYER
        return self.shape.unit_elems if per_layer else self.shape.token_elems

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token within one range."""
        return self.token_elems * self.shape.dtype.itemsize

    @cached_property
    def row_tokens(self) -> int:
        """Positions between two rows: `max_tokens` rounded up so that rows start on pages."""
        unit = math.lcm(self.page_bytes, self.token_bytes) // self.token_bytes
        return math.ceil(self.max_tokens / unit) * unit

    @property
    def row_bytes(self) -> int:
        """Bytes of address space of one range of one row."""
        return self.row_tokens * self.token_bytes

    @cached_property
    def units(self) -> UnitLayout:
        """How tokens lie on the units of the books. Here such a unit is a page in each range of a row."""
        return UnitLayout(self.token_bytes, self.page_bytes, self.ranges, self.max_tokens)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Shape of `memory[layer, 2, row, position, unit_elems]`."""
        return (self.shape.num_layers, 2, self.rows, self.row_tokens, self.shape.unit_elems)

    @property
    def memory_strides(self) -> tuple[int, ...]:
        """Strides of `memory`, in elements."""
        unit, row = self.shape.unit_elems, self.row_tokens * self.token_elems
        if self.kind is KVLayout.INTERLEAVED:
            return (2 * unit, unit, row, self.token_elems, 1)
        return (2 * self.rows * row, self.rows * row, row, self.token_elems, 1)


def default_page_bytes(kind: KVLayout, shape: KVShape, granularity: int) -> int:
    """The default page size in bytes: the driver's granularity, doubled until it holds 16 tokens or is 2 MiB.

    16 tokens is the size of a vLLM block. They are whole tokens if interleaved (2 MiB hold 16 tokens of
    Llama-3-8B), tokens of one range if per-layer. Smaller pages would save little memory and, on a CPU, need
    a driver call every few tokens.
    """
    want = 16 * (shape.unit_bytes if kind is KVLayout.PER_LAYER else shape.token_bytes)
    page = granularity
    while page < want and page < 2 << 20:
        page *= 2
    return page
