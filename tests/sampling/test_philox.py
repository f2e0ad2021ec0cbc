"""Counter-based random numbers: the published generator, and independence of everything but the key."""

from __future__ import annotations

import numpy as np
import pytest

from vattn.sampling.philox import derive_seed, philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_the_reference_implementation(counter: str, key: str, expected: str) -> None:
    """From `kat_vectors` of the Random123 library, philox4x32 with 10 rounds."""

    def words(text: str) -> np.ndarray:
        return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)

    assert np.array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_a_number_depends_on_its_own_key_only() -> None:
    together = uniforms([1, 2**64 - 1, 7], [0, 3, 1], [5, 0, 2**40])
    alone = [
        uniforms([1], [0], [5])[0],
        uniforms([2**64 - 1], [3], [0])[0],
        uniforms([7], [1], [2**40])[0],
    ]
    assert together.tolist() == alone


def test_seed_branch_and_position_each_change_the_number() -> None:
    grid = [(seed, branch, k) for seed in (0, 1, 2**32) for branch in (0, 1, 9) for k in (0, 1, 2**32)]
    numbers = uniforms(*map(list, zip(*grid, strict=True)))
    assert len(set(numbers.tolist())) == len(grid)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = uniforms([42] * 20_000, [0] * 20_000, range(20_000))
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square, 49 degrees of freedom: p = 2e-5
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_derived_seeds_are_distinct_and_not_the_draws_of_the_root() -> None:
    seeds = [derive_seed(7, number) for number in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(7, 3) == seeds[3] != derive_seed(8, 3)
    first = int(uniforms([7], [0], [0])[0] * 2**53)
    assert first != seeds[0] >> 11
