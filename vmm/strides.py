"""How far apart the elements of a tensor lie, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last one; 0 for an empty tensor."""
    if any(size == 0 for size in shape):
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize
