"""The roofline: which of its two sides a step leans on, and what each parameter moves."""

from __future__ import annotations

import pytest

from vattn.errors import ConfigError
from vattn.lab.simulator.cost import Efficiency, Mapping, Roofline
from vattn.lab.simulator.gpus import find_gpu
from vattn.lab.simulator.known_models import find_model
from vattn.lab.simulator.work import StepWork, chunk_pairs

MODEL, GPU = find_model("llama-3-8b"), find_gpu("h100")
TOKEN_BYTES = 131_072
PERFECT = Efficiency(1, 1, 1, 1, paged_decode=1, paged_prefill=1, step_seconds=0, request_seconds=0)


def roofline(efficiency: Efficiency = PERFECT, *, tp: int = 1, paged: bool = False) -> Roofline:
    return Roofline(
        MODEL, GPU, tp=tp, weight_bytes=2, kv_token_bytes=TOKEN_BYTES // tp, paged=paged,
        mapping=Mapping(hidden=True), overlap=True, efficiency=efficiency,
    )  # fmt: skip


def decode(requests: int, length: int) -> StepWork:
    return StepWork(requests, requests, requests, requests * length, 0, 0, requests, 0.0)


def prefill(tokens: int) -> StepWork:
    return StepWork(tokens, 0, 1, 0, tokens, chunk_pairs(0, tokens), 1, 0.0)


def test_one_decode_streams_the_weights_and_its_kv() -> None:
    read = 2 * (MODEL.active_params + MODEL.head_params) + 1000 * TOKEN_BYTES
    assert roofline().step(decode(1, 1000)).duration == pytest.approx(read / GPU.bandwidth)


def test_a_long_prompt_is_bound_by_flops() -> None:
    n = 4096
    linear = 2 * (MODEL.active_params * n + MODEL.head_params)
    attention = 4 * MODEL.num_heads * MODEL.head_dim * MODEL.num_layers * n * (n + 1) / 2
    assert roofline().step(prefill(n)).duration == pytest.approx((linear + attention) / GPU.flops)


@pytest.mark.parametrize(
    ("work", "knob"),
    [
        (decode(1, 10), "linear_bandwidth"),
        (prefill(4096), "linear_flops"),
        (decode(256, 8000), "kv_bandwidth"),
    ],
)
def test_halving_an_efficiency_slows_the_steps_that_lean_on_it(work: StepWork, knob: str) -> None:
    half = Efficiency(**{**vars(PERFECT), knob: 0.5})
    assert roofline(half).step(work).duration > 1.8 * roofline().step(work).duration


def test_a_paged_kernel_pays_its_factor_on_attention_alone() -> None:
    slower = Efficiency(**{**vars(PERFECT), "paged_decode": 1.5})
    contiguous, paged = (roofline(slower, paged=p).step(decode(64, 1000)).duration for p in (False, True))
    assert paged - contiguous == pytest.approx(0.5 * 64_000 * TOKEN_BYTES / GPU.bandwidth)


def test_two_devices_halve_the_work_and_talk_twice_a_layer() -> None:
    alone, both = (roofline(tp=tp).step(decode(8, 1000)).duration for tp in (1, 2))
    talk = 2 * MODEL.num_layers * (PERFECT.link_latency + 8 * MODEL.hidden_size * 2 / GPU.link_bandwidth)
    assert both == pytest.approx(alone / 2 + talk)


def test_chunks_of_a_prompt_have_as_many_pairs_as_the_whole() -> None:
    assert sum(chunk_pairs(start, 100) for start in (0, 100, 200)) == chunk_pairs(0, 300) == 300 * 301 // 2


@pytest.mark.parametrize("wrong", [{"linear_flops": 0}, {"kv_bandwidth": 1.2}, {"step_seconds": -1}])
def test_impossible_efficiencies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Efficiency(**wrong)
