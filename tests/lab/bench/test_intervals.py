"""Intervals from ranks, and the sentences drawn from them."""

from __future__ import annotations

import numpy as np
import pytest

from vattn.lab.bench.conclusions import conclusions, ratio, same_tokens
from vattn.lab.bench.intervals import interval


@pytest.mark.parametrize(
    ("n", "rank", "coverage"),
    [
        (1, 1, 0.0),
        (2, 1, 0.5),
        (3, 1, 0.75),
        (5, 1, 0.9375),
        (6, 1, 0.96875),
        (9, 2, 0.9609375),
        (20, 6, 0.9586),
    ],
)
def test_ranks_are_those_of_the_sign_test(n: int, rank: int, coverage: float) -> None:
    found = interval([float(i) for i in range(n, 0, -1)])
    assert (found.low, found.high) == (rank, n + 1 - rank)
    assert found.coverage == pytest.approx(coverage, abs=1e-4)
    assert found.median == (n + 1) / 2 and found.n == n


def test_five_repeats_are_enough_and_four_are_not() -> None:
    assert interval([1.0] * 5).enough and not interval([1.0] * 4).enough


@pytest.mark.parametrize("n", [5, 9, 20])
def test_the_true_median_lies_inside_as_often_as_promised(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = rng.lognormal(0.0, 1.0, (4000, n))  # skewed: nothing is assumed about the noise
    inside = [interval(list(row)) for row in draws]
    share = sum(i.low <= 1.0 <= i.high for i in inside) / len(inside)
    assert share == pytest.approx(inside[0].coverage, abs=0.012)


def repeats(*values: float, metric: str = "output_throughput") -> list[dict[str, float | int | None]]:
    return [{metric: value} for value in values]


def test_ratios_are_taken_within_a_repeat() -> None:
    """A machine that gets slower from repeat to repeat does not hide a constant ratio."""
    found = ratio(repeats(200, 150, 100, 80, 60), repeats(100, 75, 50, 40, 30), "output_throughput")
    assert found is not None and (found.low, found.high) == (2.0, 2.0)


def test_a_clear_difference_is_said_with_its_interval() -> None:
    runs = {"virtual": repeats(11, 12, 13, 12, 11), "paged": repeats(10, 10, 10, 10, 10)}
    assert conclusions(runs, ["output_throughput"]) == [
        "output_throughput: virtual has 1.2 times that of paged (1.1 to 1.3 at 94% over 5 repeats)."
    ]


def test_noise_is_said_to_be_too_large() -> None:
    runs = {"virtual": repeats(9, 12, 13, 12, 11), "paged": repeats(10, 10, 10, 10, 10)}
    [sentence] = conclusions(runs, ["output_throughput"])
    assert sentence == "output_throughput: the noise is too large to tell virtual from paged (0.9 to 1.3)."


def test_too_few_repeats_conclude_nothing() -> None:
    runs = {"virtual": repeats(20, 20, 20), "paged": repeats(10, 10, 10)}
    [sentence] = conclusions(runs, ["output_throughput", "mean_ttft_ms"])
    assert "3 repeats cannot tell" in sentence and "75%" in sentence


def test_what_never_differs_is_said_to_be_the_same() -> None:
    runs = {"a": repeats(3, 3, 3, 3, 3), "b": repeats(3, 3, 3, 3, 3)}
    assert conclusions(runs, ["output_throughput"]) == [
        "output_throughput: the same for a and b in every repeat."
    ]


def test_metrics_that_somebody_lacks_are_left_out() -> None:
    runs = {"virtual": repeats(1, 1, 1, 1, 1), "peer": repeats(1, 1, 1, 1, 1, metric="request_throughput")}
    assert conclusions(runs, ["output_throughput"]) == []


def test_many_comparisons_come_with_a_warning() -> None:
    runs = {f"paged-{i}": repeats(*(i + 9 + 0.1 * k for k in range(5))) for i in range(20)}
    sentences = conclusions(runs, ["output_throughput"])
    assert len(sentences) == 20, "all against the first, and the warning"
    assert "19 comparisons" in sentences[-1] and "by chance" in sentences[-1]


def test_equal_tokens_are_said_to_be_equal() -> None:
    assert same_tokens({"a": ["x", "x"]}) is None
    assert same_tokens({"a": ["x", "x"], "b": ["x", "x"]}) == "All runs produced the same tokens."
    differing = same_tokens({"a": ["x", "x"], "b": ["y", "y"], "c": ["x", "x"]})
    assert differing == "Not all runs produced the same tokens; these did: a, c; b."
    unstable = same_tokens({"a": ["x", "y"], "b": ["x", "y"]})
    assert unstable == "The tokens of a, b differ from repeat to repeat."
