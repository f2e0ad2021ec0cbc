"""Workloads: lengths, structure, and that they can be made again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.from_options import choose_workload
from vattn.lab.bench.lengths import Lengths
from vattn.lab.bench.synthetic import (
    BeamSearchWorkload,
    ChatWorkload,
    ParallelSamplingWorkload,
    SharedPrefixWorkload,
)
from vattn.lab.bench.workload import RandomWorkload, Workload

FEW = Lengths("uniform", 2, 5)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("64", Lengths("fixed", 64, 64)),
        ("16:512", Lengths("loguniform", 16, 512)),
        ("uniform:16:128", Lengths("uniform", 16, 128)),
        ("fixed:9", Lengths("fixed", 9, 9)),
        ("bimodal:32:1024:0.2", Lengths("bimodal", 32, 1024, 0.2)),
        ("bimodal:32:1024", Lengths("bimodal", 32, 1024, 0.5)),
    ],
)
def test_lengths_are_written_like_this(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "x", "5:3", "0", "uniform:1:2:0.5", "zipf:1:2", "bimodal:1:2:1.5", "-3"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


def test_log_uniform_lengths_spread_evenly_over_powers_of_two() -> None:
    drawn = Lengths("loguniform", 16, 1023).draw(np.random.default_rng(0), 6000)
    octaves = Counter(n.bit_length() for n in drawn)
    assert set(octaves) == {5, 6, 7, 8, 9, 10}
    assert all(900 < count < 1100 for count in octaves.values())


def test_bimodal_lengths_are_two_with_the_share_asked_for() -> None:
    drawn = Lengths("bimodal", 10, 500, 0.2).draw(np.random.default_rng(0), 5000)
    assert set(drawn) == {10, 500}
    assert drawn.count(500) / 5000 == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    "workload",
    [
        RandomWorkload(9, (3, 20), (2, 5), 1),
        SharedPrefixWorkload(9, 3, 8, FEW, FEW, 1),
        ChatWorkload(3, 3, FEW, FEW, 4, 1.0, 1),
        ParallelSamplingWorkload(5, 3, FEW, FEW, 1),
    ],
    ids=lambda w: w.name,
)
def test_a_seed_makes_the_same_requests_again(workload: Workload) -> None:
    requests = workload.generate(100)
    assert requests == workload.generate(100)
    assert all(0 <= t < 100 for r in requests for t in r.prompt_token_ids)
    assert workload.describe()["name"] == workload.name
    assert workload.describe()["seed"] == 1


def test_random_lengths_stay_in_their_ranges() -> None:
    requests = RandomWorkload(200, (3, 20), (2, 5)).generate(100)
    assert {len(r.prompt_token_ids) for r in requests} <= set(range(3, 21))
    assert {r.output_len for r in requests} == {2, 3, 4, 5}


def test_a_group_shares_its_prefix_and_nothing_else() -> None:
    requests = SharedPrefixWorkload(40, 4, 16, Lengths("fixed", 8, 8), FEW).generate(1000)
    groups = Counter(tuple(r.prompt_token_ids[:16]) for r in requests)
    assert sorted(groups.values()) == [10, 10, 10, 10]
    assert len({tuple(r.prompt_token_ids[16:]) for r in requests}) == 40
    first_four = [tuple(r.prompt_token_ids[:16]) for r in requests[:8]]
    assert first_four[:4] != first_four[4:], "in random order, not in turn"


def test_sessions_have_every_turn_in_order_and_a_system_prompt_first() -> None:
    workload = ChatWorkload(3, 4, Lengths("fixed", 5, 5), Lengths("fixed", 2, 2), prefix_len=7, think_s=2.0)
    requests = workload.generate(1000)
    assert workload.max_len == 7 + 4 * 7
    for session in range(3):
        turns = [r for r in requests if r.session == f"chat-{session}"]
        assert [len(r.prompt_token_ids) for r in turns] == [12, 5, 5, 5]
        assert turns[0].prompt_token_ids[:7] == requests[0].prompt_token_ids[:7]
        assert turns[0].think_s == 0.0 and all(r.think_s > 0 for r in turns[1:])


def test_think_times_are_exponential_with_that_mean() -> None:
    requests = ChatWorkload(500, 5, FEW, FEW, think_s=3.0).generate(50)
    times = np.array([r.think_s for r in requests[500:]])
    assert times.mean() == pytest.approx(3.0, rel=0.1) and times.std() == pytest.approx(3.0, rel=0.1)


def test_parallel_sampling_asks_for_n_outputs() -> None:
    assert {(r.n, r.beams) for r in ParallelSamplingWorkload(5, 3, FEW, FEW).generate(50)} == {(3, False)}
    assert {(r.n, r.beams) for r in BeamSearchWorkload(5, 3, FEW, FEW).generate(50)} == {(3, True)}


def test_names_choose_workloads() -> None:
    for name in ("random", "shared-prefix", "chat", "parallel-sampling", "beam-search"):
        assert choose_workload(name, requests=3).describe()["name"] == name
    with pytest.raises(ConfigError, match="zipf"):
        choose_workload("zipf")


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomWorkload(0),
        lambda: RandomWorkload(seed=-1),
        lambda: RandomWorkload(prompt_len=(9, 3)),
        lambda: SharedPrefixWorkload(3, 0, 8, FEW, FEW),
        lambda: SharedPrefixWorkload(3, 1, 0, FEW, FEW),
        lambda: ChatWorkload(3, 0, FEW, FEW),
        lambda: ChatWorkload(3, 1, FEW, FEW, think_s=-1),
        lambda: ParallelSamplingWorkload(3, 0, FEW, FEW),
    ],
)
def test_impossible_workloads_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
