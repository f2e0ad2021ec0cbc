"""Places the K and V of one layer in address ranges that grow together, with strides over them.

transformers needs `[batch, heads, tokens, dim]`. There are two ways to grow it along tokens without a copy:

    heads    one range per K or V, sequence and head: each head is dense, as in its own tensor
             K  s0 h0  | t0 t1 t2 …            2 x batch x heads ranges; a layer grows by a page in each
             K  s0 h1  | t0 t1 t2 …
             V  s1 h1  | t0 t1 t2 …
    tokens   one range for the whole layer: a token's K and V of every sequence and head together
             | t0: K s0h0 s0h1 s1h0 s1h1  V s0h0 …  | t1: K …      a layer grows by one page

Attention reads a head from front to back. On a CPU with 4 KiB pages, reading the dense form is 1.3 to 2 times
faster. On a GPU both are equally fast, and a driver page of 2 MiB in every range would be mostly empty. So
the default is `heads` on CPU and `tokens` on CUDA.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

LayoutName = Literal["auto", "heads", "tokens"]
LAYOUTS = ("auto", "heads", "tokens")
_ALIGNMENT = 16  # bytes; kernels load vectors of this size


class Part(NamedTuple):
    """K or V: `[batch, heads, tokens, dim]`. Steps are (ranges, bytes): a step may lead to another range."""

    dtype: torch.dtype
    batch: int
    heads: int
    dim: int
    range: int  # the one of sequence 0, head 0
    offset: int  # bytes from the start of a token
    token_bytes: int  # from a token to the next
    batch_step: tuple[int, int]
    head_step: tuple[int, int]

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Shape of that many tokens."""
        return self.batch, self.heads, tokens, self.dim

    def accepts(self, states: torch.Tensor) -> bool:
        """True if these states can be written here."""
        batch, heads, _, dim = states.shape
        return batch == self.batch and heads == self.heads and dim == self.dim and states.dtype is self.dtype

    def __str__(self) -> str:
        return f"[batch={self.batch}, heads={self.heads}, tokens, dim={self.dim}] of {self.dtype}"

    def stride(self, pitch: int) -> tuple[int, int, int, int]:
        """Strides in elements, ranges being `pitch` bytes apart."""
        itemsize = self.dtype.itemsize
        batch, head = (ranges * pitch + size for ranges, size in (self.batch_step, self.head_step))
        return batch // itemsize, head // itemsize, self.token_bytes // itemsize, 1


class Plan(NamedTuple):
    """The layout of a whole layer. `ranges` holds the bytes that a token takes in each range."""

    device: torch.device
    key: Part
    value: Part
    ranges: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all ranges."""
        return sum(self.ranges)

    def accepts(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """True if these states can be appended."""
        return self.key.accepts(key) and self.value.accepts(value) and key.shape[2] == value.shape[2]


def plan_heads(key: torch.Tensor, value: torch.Tensor) -> Plan:
    """A range per K or V, sequence and head, for states of these shapes and dtypes."""

    def part(states: torch.Tensor, first: int) -> Part:
        batch, heads, _, dim = states.shape
        token = dim * states.dtype.itemsize
        return Part(states.dtype, batch, heads, dim, first, 0, token, (heads, 0), (1, 0))

    count = key.shape[0] * key.shape[1]
    parts = part(key, 0), part(value, count)
    return Plan(key.device, *parts, tuple(part.token_bytes for part in parts for _ in range(count)))


def plan_tokens(key: torch.Tensor, value: torch.Tensor) -> Plan:
    """One range, for states of these shapes and dtypes."""
    count = key.shape[0] * key.shape[1]
    widths = [states.shape[-1] * states.dtype.itemsize for states in (key, value)]
    second = _align(count * widths[0])
    token = _align(second + count * widths[1])

    def part(states: torch.Tensor, offset: int, width: int) -> Part:
        batch, heads, _, dim = states.shape
        return Part(states.dtype, batch, heads, dim, 0, offset, token, (0, heads * width), (0, width))

    return Plan(key.device, part(key, 0, widths[0]), part(value, second, widths[1]), (token,))


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
