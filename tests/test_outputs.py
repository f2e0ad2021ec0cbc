"""What a request gives back, and how its latencies are defined."""

from __future__ import annotations

import pytest

from vattn.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_latencies_follow_from_the_four_times() -> None:
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=12.0,
        finished_time=15.0,
        num_output_tokens=7,
    )
    assert metrics.queue_time == pytest.approx(0.5)
    assert metrics.ttft == pytest.approx(2.0)
    assert metrics.tpot == pytest.approx(3.0 / 6)
    assert metrics.e2e_latency == pytest.approx(5.0)


def test_latencies_are_none_until_known() -> None:
    metrics = RequestMetrics(arrival_time=1.0)
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.e2e_latency) == (None, None, None, None)
    metrics.first_token_time = 2.0
    metrics.num_output_tokens = 5
    assert metrics.ttft == 1.0
    assert metrics.tpot is None


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = RequestMetrics(arrival_time=0.0, first_token_time=1.0, finished_time=1.0, num_output_tokens=1)
    assert metrics.tpot is None
    assert metrics.e2e_latency == 1.0


def test_an_output_is_finished_when_it_has_a_reason() -> None:
    assert not CompletionOutput(index=0, text="a", token_ids=[1]).finished
    assert CompletionOutput(index=0, text="a", token_ids=[1], finish_reason="length").finished


def test_cached_tokens_are_those_of_the_metrics() -> None:
    output = RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=[1, 2],
        outputs=[],
        finished=False,
        metrics=RequestMetrics(arrival_time=0.0, num_cached_tokens=1),
    )
    assert output.num_cached_tokens == 1
    assert output.prompt_logprobs is None and output.error is None


def test_a_logprob_reads_like_vllms() -> None:
    entry = Logprob(-0.5, rank=1, decoded_token=" a")
    assert (entry.logprob, entry.rank, entry.decoded_token) == (-0.5, 1, " a")
    assert Logprob(-0.5).decoded_token is None
