"""Counter-based random numbers: number k of a request is a function of (seed, branch, k) and nothing else.

A generator with state would tie a request's tokens to what ran beside it and to how often it was started
over. Philox4x32-10 has none: it enciphers a counter with a key (J. K. Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11; also the generator of CUDA's cuRAND and of torch on CUDA).

    key      | seed, low 32 bits | seed, high 32 bits |
    counter  | position | position >> 32 | branch | purpose |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_ROUNDS = 10

_TOKENS, _SEEDS = 0, 1
"""Purposes: draws of tokens never meet draws of seeds, even if a request is seeded with the root seed."""


def philox4x32(counter: UInt64s, key: UInt64s) -> UInt64s:
    """Encipher counters: `[4, N]` words by keys `[2, N]`, each word below 2**32, into `[4, N]` words."""
    even, odd = counter[0::2], counter[1::2]  # words 0, 2 and words 1, 3
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        # The other product's halves: its high half is mixed in, its low half is the new odd word.
        even = (product >> _SHIFT)[::-1] ^ odd ^ key
        odd = (product & _MASK)[::-1]
        key = (key + _WEYL) & _MASK
    words = np.empty_like(counter)
    words[0::2], words[1::2] = even, odd
    return words


def _draw(seeds: UInt64s, positions: UInt64s, branches: UInt64s, purpose: int) -> UInt64s:
    purposes = np.full_like(positions, purpose)
    counter = np.stack([positions & _MASK, positions >> _SHIFT, branches & _MASK, purposes])
    return philox4x32(counter, np.stack([seeds & _MASK, seeds >> _SHIFT]))


def uniforms(
    seeds: Sequence[int], branches: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per request, 53 bits each: for its output token number `position`, from 0.

    `seeds` are in [0, 2**64), `branches` in [0, 2**32).
    """
    words = _draw(
        np.array(seeds, dtype=np.uint64),
        np.array(positions, dtype=np.uint64),
        np.array(branches, dtype=np.uint64),
        _TOKENS,
    )
    numbers: npt.NDArray[np.float64] = (((words[0] << _SHIFT) | words[1]) >> np.uint64(11)).astype(np.float64)
    return numbers * np.float64(2.0**-53)


def derive_seed(root: int, number: int) -> int:
    """The seed, in [0, 2**64), of the engine's unseeded request `number`; `root` is the engine's own."""
    zero = np.zeros(1, dtype=np.uint64)
    words = _draw(zero + np.uint64(root), zero + np.uint64(number), zero, _SEEDS)
    return int(words[0, 0]) << 32 | int(words[1, 0])
