"""The measurement itself: a model against itself, against worse storage, and figures checked another way."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.engine.engines import hf_greedy, loaded, make_llm, random_prompts, reference_model
from vattn import LLM, SamplingParams
from vattn.errors import CapacityError, ConfigError
from vattn.kv.base import Chunk
from vattn.lab.quality import calibrate
from vattn.lab.quality.measure import first_difference, forced_logits, measure
from vattn.lab.quality.session import prompts_of, run, texts_of
from vattn.models.loader import load_model

NAME = "llama"


def texts(*lengths: int) -> list[list[int]]:
    return random_prompts(7, lengths, loaded(NAME).spec.vocab_size)


@pytest.fixture
def exact() -> Iterator[LLM]:
    with make_llm(NAME, "virtual-interleaved", max_model_len=200) as llm:
        yield llm


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_forced_logits_are_the_model_s_own(exact: LLM, chunk: int) -> None:
    [ids] = texts(50)
    got = torch.cat([logits.clone() for logits in forced_logits(exact, ids, chunk)])
    with torch.inference_mode():
        want = reference_model(NAME)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    exact.check()
    assert exact.memory_usage().in_use == 0


def test_a_text_too_long_for_the_cache_is_refused(exact: LLM) -> None:
    with pytest.raises(CapacityError, match="no room for 300 tokens"):
        next(forced_logits(exact, texts(300)[0]))


def test_a_model_does_not_differ_from_itself(exact: LLM) -> None:
    with make_llm(NAME, "paged-7", max_model_len=200) as other:
        found = measure(exact, [other], texts(70, 33), texts(5, 9), max_tokens=6, chunk=16)
    assert [q.positions for q in found] == [103, 103]
    for q in found:
        assert q.agreement == 1 and q.divergence == [None, None]
        assert q.kl_max < 1e-6 and abs(q.perplexity_change) < 1e-5


def test_perplexity_is_that_of_the_text_s_own_tokens(exact: LLM) -> None:
    ids = texts(40)[0]
    [found] = measure(exact, [], [ids], [ids[:3]], max_tokens=2, chunk=16)
    [output] = exact.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    entries = (output.prompt_logprobs or [])[1:]
    nll = [-entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True) if entry]
    assert len(nll) == 39
    assert found.perplexity == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)


def test_coarser_storage_measures_worse(exact: LLM) -> None:
    ranges = calibrate(loaded(NAME), texts(150))
    coarse = calibrate(loaded(NAME), texts(150), headroom=20)
    options = {"max_model_len": 200, "kv_cache_dtype": "int8"}
    with (
        make_llm(NAME, "virtual-interleaved", **options) as token,
        make_llm(NAME, "virtual-interleaved", kv_scales=ranges, **options) as static,
        make_llm(NAME, "virtual-interleaved", kv_scales=coarse, **options) as bad,
    ):
        found = measure(exact, [token, static, bad], texts(150), texts(5, 9), max_tokens=12)
    assert [q.kv_scales for q in found] == [None, "token", "static", "static"]
    assert 0 < found[1].kl_mean < found[2].kl_mean < found[3].kl_mean
    assert found[3].agreement < found[1].agreement <= 1
    assert found[2].bytes_vs_bf16 == 0.5 < found[1].bytes_vs_bf16


def test_divergence_counts_output_tokens(exact: LLM) -> None:
    """Free generation is the engine's: the reference's tokens are transformers'."""
    prompts = texts(5, 9)
    expected = hf_greedy(reference_model(NAME), prompts, [12, 12])
    with make_llm(NAME, "paged-16", max_model_len=200, kv_cache_dtype="fp8_e4m3") as coarse:
        found = measure(exact, [coarse], texts(20), prompts, max_tokens=12)
        own = coarse.generate(
            prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
    tokens = [list(o.outputs[0].token_ids) for o in own]
    assert found[1].divergence == [first_difference(a, b) for a, b in zip(expected, tokens, strict=True)]


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1


def test_calibration_finds_the_largest_key_and_value_of_every_head() -> None:
    model, ids = loaded(NAME), texts(60, 40)
    ranges = calibrate(model, ids)
    largest = torch.zeros(model.spec.num_layers, 2, model.spec.num_kv_heads)
    with make_llm(NAME, "static-interleaved", max_model_len=64) as llm:
        for text in ids:
            for _ in forced_logits(llm, text, 64):
                kv = llm.engine.kv.tensor
            largest = torch.maximum(largest, kv[:, :, _row(llm), : len(text)].abs().amax((2, 4)))
    torch.testing.assert_close(torch.stack([ranges.k, ranges.v], 1), largest)
    doubled = calibrate(model, ids, headroom=2.0)
    torch.testing.assert_close(doubled.k, ranges.k * 2)


def _row(llm: LLM) -> int:
    """The row that the next request gets, and the last one had."""
    kv = llm.engine.kv
    kv.attach("probe", [0])
    [row] = kv.begin_step([Chunk("probe", 0, 1)]).slots  # type: ignore[attr-defined]
    kv.free("probe")
    return int(row)


def test_texts_are_cut_to_what_was_asked_for() -> None:
    model = loaded(NAME)  # no tokenizer
    with pytest.raises(ConfigError, match="the model came without"):
        texts_of(model, "some text", 10, 10)
    with pytest.raises(ConfigError, match="no text to calibrate"):
        calibrate(model, [])
    assert prompts_of([list(range(100))], 2) == [list(range(24)), list(range(48, 72))]


@pytest.mark.smollm2
def test_int8_keeps_smollm2_s_answers() -> None:
    """Per token and head: the same next token at 95 % of positions at least, perplexity within 1 %."""
    model = load_model("smollm2", device="cpu")
    found = run(
        model,
        [("int8", "token")],
        None,
        texts_of(model, None, 400, 400),
        num_prompts=1,
        max_tokens=4,
        chunk=64,
    )
    exact, int8 = found
    assert exact.positions == int8.positions == 400
    assert int8.agreement >= 0.95
    assert abs(int8.perplexity_change) <= 0.01
    assert int8.perplexity_change == pytest.approx(int8.perplexity / exact.perplexity - 1)
    assert 0 < int8.perplexity_change_error < 0.01
    assert int8.kl_mean < 0.01
    assert int8.token_bytes < 0.28 * exact.token_bytes
