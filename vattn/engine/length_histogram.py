"""Counts the lengths of finished requests in a few buckets. They show which page and block sizes would
have suited the workload."""

from __future__ import annotations

from typing import Any

EXACT = 16
"""Each length below this has its own bucket. Above it, every doubling is divided into 8 buckets."""


def bucket(length: int) -> int:
    """The lower end of the bucket that holds `length`.

    0 1 2 … 15 | 16 18 20 … 30 | 32 36 40 … 60 | 64 …       at most an eighth wide
    """
    if length < EXACT:
        return length
    step = 1 << (length.bit_length() - 4)
    return length - length % step


def bucket_end(low: int) -> int:
    """The exclusive upper end of the bucket that begins at `low`."""
    return low + 1 if low < EXACT else low + (1 << (low.bit_length() - 4))


class LengthHistogram:
    """Counts and token sums per bucket. Lengths up to a million need at most 150 buckets."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums: dict[int, int] = {}

    def add(self, length: int) -> None:
        low = bucket(length)
        self._counts[low] = self._counts.get(low, 0) + 1
        self._sums[low] = self._sums.get(low, 0) + length

    def to_list(self) -> list[dict[str, Any]]:
        """The buckets as `{"low", "high", "count", "tokens"}`, shortest lengths first.

        `high` is inclusive. `tokens` is the sum of the lengths.
        """
        return [
            {"low": low, "high": bucket_end(low) - 1, "count": count, "tokens": self._sums[low]}
            for low, count in sorted(self._counts.items())
        ]
