"""vLLM's definitions, checked on timelines written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vattn.errors import ConfigError
from vattn.lab.bench.serving import Samples, serving_metrics, summary
from vattn.lab.bench.slo import Slo
from vattn.lab.bench.timeline import Timeline, duration


def timeline(arrival: float, *tokens: float, prompt: int = 10, error: str | None = None) -> Timeline:
    return Timeline(
        "r", arrival, prompt, [list(tokens)], finished_s=tokens[-1] if tokens else arrival, error=error
    )


def test_one_request() -> None:
    t = timeline(1.0, 1.5, 1.75, 2.25)
    assert t.ttft == 0.5
    assert t.e2el == 1.25
    assert t.itl == [0.25, 0.5]
    assert t.tpots == [0.375], "(e2el - ttft) / (tokens - 1)"
    assert t.output_len == 3


def test_one_token_has_no_tpot_and_no_itl() -> None:
    t = timeline(0.0, 0.5)
    assert t.tpots == [] and t.itl == [] and t.ttft == t.e2el == 0.5
    metrics = serving_metrics([t], 1.0)
    assert metrics["mean_tpot_ms"] is None and metrics["p99_itl_ms"] is None
    assert metrics["mean_ttft_ms"] == 500.0


def test_throughputs_count_successes_over_the_whole_duration() -> None:
    done = [timeline(0.0, 0.5, 1.0, prompt=7), timeline(1.0, 2.0, 3.0, 4.0, prompt=5)]
    failed = timeline(0.0, 0.25, prompt=100, error="no memory")
    assert duration([*done, failed]) == 4.0
    metrics = serving_metrics([*done, failed], 4.0)
    assert (metrics["duration"], metrics["completed"], metrics["failed"]) == (4.0, 2, 1)
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (12, 5)
    assert metrics["request_throughput"] == 0.5
    assert metrics["output_throughput"] == 1.25
    assert metrics["total_token_throughput"] == 4.25
    assert "request_goodput" not in metrics, "it needs limits"


def test_itls_are_pooled_over_requests_and_tpots_are_one_each() -> None:
    metrics = serving_metrics([timeline(0.0, 1.0, 1.1), timeline(0.0, 1.0, 2.0, 3.0, 4.0)], 4.0)
    assert metrics["mean_itl_ms"] == pytest.approx((100 + 3 * 1000) / 4)
    assert metrics["mean_tpot_ms"] == pytest.approx((100 + 1000) / 2)


def test_summary_has_numpys_percentiles_and_the_populations_std() -> None:
    s = summary(Samples(np.arange(1, 102) / 1000))  # 1 .. 101 ms
    assert s["mean"] == s["median"] == s["p50"] == pytest.approx(51)
    assert (s["p90"], s["p95"], s["p99"]) == (pytest.approx(91), pytest.approx(96), pytest.approx(100))
    assert s["std"] == pytest.approx(((101**2 - 1) / 12) ** 0.5)
    assert set(summary(Samples(np.array([]))).values()) == {None}


def test_every_key_of_vllm_is_there() -> None:
    metrics = serving_metrics([timeline(0.0, 0.1, 0.2)], 1.0, Slo(ttft=200))
    for name in ("ttft", "tpot", "itl", "e2el"):
        for key in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            assert isinstance(metrics[f"{key}_{name}_ms"], float)
    assert metrics["request_goodput"] == 1.0


def test_several_outputs_have_a_tpot_each_and_share_the_ttft() -> None:
    t = Timeline("r", 0.0, 4, [[1.0, 2.0, 3.0], [1.5, 2.0]], finished_s=3.0)
    assert t.ttft == 1.0 and t.e2el == 3.0 and t.output_len == 5
    assert t.tpots == [1.0, 0.5] and t.itl == [1.0, 1.0, 0.5]


# ---------------------------------------------------------------------- goodput
@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft=500), True),
        (Slo(ttft=499), False),
        (Slo(tpot=375), True),
        (Slo(tpot=374), False),
        (Slo(e2el=1250), True),
        (Slo(e2el=1249), False),
        (Slo(ttft=500, tpot=374), False),
    ],
)
def test_a_good_request_keeps_every_limit_and_may_reach_it(slo: Slo, good: bool) -> None:
    assert slo.good(timeline(1.0, 1.5, 1.75, 2.25)) is good


def test_a_single_token_has_tpot_zero_for_goodput() -> None:
    assert Slo(tpot=0).good(timeline(0.0, 5.0))


def test_failed_requests_are_never_good() -> None:
    assert not Slo(ttft=1e9).good(timeline(0.0, 0.1, error="no memory"))
    assert not Slo(ttft=1e9).good(Timeline("r", 0.0, 4))


def test_goodput_is_good_requests_a_second() -> None:
    metrics = serving_metrics([timeline(0.0, 0.1, 0.2), timeline(0.0, 0.9, 2.0)], 2.0, Slo(ttft=200))
    assert metrics["request_goodput"] == 0.5


def test_limits_are_written_as_in_vllm() -> None:
    assert Slo.parse(["ttft:200", "tpot:50.5"]) == Slo(ttft=200.0, tpot=50.5)
    assert Slo.parse(["e2el:5000"]) == Slo(e2el=5000.0)
    assert Slo.parse([]) is None
    assert Slo(ttft=200.0).to_dict() == {"ttft": 200.0}


@pytest.mark.parametrize(
    "pairs", [["itl:3"], ["ttft"], ["ttft:"], ["ttft:x"], ["ttft:-1"], ["ttft:inf"], ["ttft:1", "ttft:2"]]
)
def test_bad_limits_are_refused(pairs: list[str]) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        Slo.parse(pairs)
