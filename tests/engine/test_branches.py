"""Several continuations of one prompt: parallel samples and beams, forked from one computation of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.engines import (
    BACKENDS,
    hf_greedy,
    kv_shape,
    loaded,
    make_llm,
    random_prompts,
    reference_model,
    stepped,
)
from tests.models.tiny import build
from vattn import LLM, BeamSearchParams, SamplingParams
from vattn.errors import RequestError
from vattn.models.loader import load_model
from vattn.outputs import RequestOutput
from vattn.vmm.host import HostDriver

NAME = "llama"
backends = pytest.mark.parametrize("backend", BACKENDS)


def vocab() -> int:
    return loaded(NAME).spec.vocab_size


def sampled(n: int, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"n": n, "temperature": 1.0, "max_tokens": 9, "ignore_eos": True, "seed": 5, **more}
    )


def branches(output: RequestOutput) -> list[list[int]]:
    assert [c.index for c in output.outputs] == list(range(len(output.outputs)))
    return [c.token_ids for c in output.outputs]


def long_llm(backend: str) -> LLM:
    """Of a model that takes long prompts."""
    model = build(NAME)
    model.config.max_position_embeddings = 2048
    options: dict[str, Any] = {**BACKENDS[backend], "kv_cache_memory_bytes": 64 << 20}
    driver = HostDriver(granularity=4096)
    return LLM(load_model(model, device="cpu"), driver=driver, max_num_batched_tokens=2048, **options)


def step_through(llm: LLM, request_id: str) -> RequestOutput:
    """Run one request to its end, the books checked after every step."""
    last = None
    while llm.engine.has_work:
        for output in stepped(llm).step():
            if output.request_id == request_id:
                last = output
        llm.check()
    assert last is not None and last.finished
    return last


# ---------------------------------------------------------------------------- parallel samples
@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The eight branches of a prompt, from an engine that runs one request at a time."""
    with make_llm(NAME, "static-interleaved", max_num_seqs=1) as llm:
        [output] = llm.generate(random_prompts(1, [37], vocab()), sampled(8), use_tqdm=False)
    assert len({tuple(b) for b in branches(output)}) == 8, "branches draw independent numbers"
    return branches(output)


@backends
def test_branches_are_the_same_on_every_backend(backend: str, alone: list[list[int]]) -> None:
    [prompt] = random_prompts(1, [37], vocab())
    with make_llm(NAME, backend) as llm:
        stepped(llm).add_request("r", prompt, sampled(8))
        output = step_through(llm, "r")
        assert branches(output) == alone
        assert output.metrics.num_output_tokens == 72 and output.metrics.num_branches == 8
        stats, m = llm.metrics().kv_stats, llm.metrics()
        assert stats.forks == 7 and m.finished_requests == 1
        # The prompt once; of each fork its last token again.
        assert m.computed_tokens == 37 + 7 + 8 * 8
        assert branches(llm.generate([prompt], sampled(8), use_tqdm=False)[0]) == alone, (
            "again, from the cache"
        )


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-16", "static-per_layer"])
@pytest.mark.parametrize("limits", ["slots", "memory", "no caching"])
def test_branches_that_find_no_place_wait(backend: str, limits: str, alone: list[list[int]]) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3}
    if limits == "memory":
        options = {"kv_cache_memory_bytes": 100 * kv_shape(NAME).token_bytes, "max_model_len": 60}
    if limits == "no caching" and not backend.startswith("static"):
        options["enable_prefix_caching"] = False
    [prompt] = random_prompts(1, [37], vocab())
    with make_llm(NAME, backend, **options) as llm:
        stepped(llm).add_request("r", prompt, sampled(8))
        assert branches(step_through(llm, "r")) == alone


@pytest.mark.parametrize("backend", ["virtual-interleaved", "virtual-per_layer", "paged-16"])
def test_eight_branches_of_a_long_prompt_hold_little_more_than_one(backend: str) -> None:
    """At their first token: less than 1.3 times the KV of n=1."""
    [prompt] = random_prompts(2, [1024], vocab())
    held = {}
    for n in (1, 8):
        with long_llm(backend) as llm:
            stepped(llm).add_request("r", prompt, sampled(n, max_tokens=4))
            while not llm.engine.metrics.output_tokens >= n:
                stepped(llm).step()
                llm.check()
            usage = llm.memory_usage()
            held[n] = usage.in_use
            assert (usage.shared_saved > 6 * 1000 * kv_shape(NAME).token_bytes) == (n == 8)
    assert held[8] < 1.3 * held[1]


def test_one_token_each_is_enough_to_fork() -> None:
    with make_llm(NAME, "virtual-interleaved") as llm:
        [output] = llm.generate([[7]], sampled(3, max_tokens=1), use_tqdm=False)
        assert [len(b) for b in branches(output)] == [1, 1, 1]
        llm.check()


def test_best_of_returns_the_most_likely() -> None:
    [prompt] = random_prompts(3, [12], vocab())
    with make_llm(NAME, "paged-16") as llm:
        [every] = llm.generate([prompt], sampled(6, logprobs=0), use_tqdm=False)
        [best] = llm.generate([prompt], sampled(2, best_of=6), use_tqdm=False)
    order = sorted(every.outputs, key=lambda c: -(c.cumulative_logprob or 0.0))
    assert branches(best) == [c.token_ids for c in order[:2]]
    assert best.outputs[0].cumulative_logprob is None, "nobody asked for log-probabilities"
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)


def test_streams_show_all_branches() -> None:
    with make_llm(NAME, "virtual-interleaved") as llm:
        moments = list(llm.stream([1, 2, 3], sampled(3, max_tokens=4)))
        assert moments[-1].finished and not any(m.finished for m in moments[:-1])
        assert [len(b) for b in branches(moments[-1])] == [4, 4, 4]
        counts = [sum(map(len, branches(m))) for m in moments]
        assert counts == sorted(counts) and counts[0] <= 3


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_aborting_a_request_aborts_its_branches(after: int) -> None:
    with make_llm(NAME, "virtual-interleaved", max_num_batched_tokens=64) as llm:
        stepped(llm).add_request("r", [3] * 100, sampled(5))
        for _ in range(after):
            stepped(llm).step()
        assert llm.engine.abort("r")
        [output] = stepped(llm).taken()
        assert {c.finish_reason for c in output.outputs} == {"abort"}
        assert not llm.engine.has_work and not llm.engine.knows("r")
        llm.check()
        assert llm.memory_usage().in_use == 0


# ---------------------------------------------------------------------------- beams
def hf_beams(
    prompt: list[int], params: BeamSearchParams, eos: int | None = None
) -> list[tuple[list[int], float]]:
    """transformers' own beam search: (output tokens, score), best first."""
    ids = torch.tensor([prompt])
    out = reference_model(NAME).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=eos,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        if eos is not None and eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]
        texts.append((tokens, score))
    return texts


def assert_same(output: RequestOutput, want: Sequence[tuple[list[int], float]]) -> None:
    assert branches(output) == [tokens for tokens, _ in want]
    assert [c.score for c in output.outputs] == pytest.approx([score for _, score in want], abs=1e-4)


@backends
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_transformers(backend: str, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True)
    prompts = random_prompts(11, [19, 1, 33], vocab())
    with make_llm(NAME, backend) as llm:
        for i, prompt in enumerate(prompts):
            stepped(llm).add_request(str(i), prompt, params)
        done: dict[str, RequestOutput] = {}
        while llm.engine.has_work:
            done.update({o.request_id: o for o in stepped(llm).step()})
            llm.check()
        assert llm.memory_usage().in_use == 0
    for i, prompt in enumerate(prompts):
        if width == 1:  # transformers takes another path there: greedy
            assert len(branches(done[str(i)])) == 1
            want = [(_greedy(prompt, 8), done[str(i)].outputs[0].score or 0.0)]
        else:
            want = hf_beams(prompt, params)
        assert_same(done[str(i)], want)


def _greedy(prompt: list[int], n: int) -> list[int]:
    return hf_greedy(reference_model(NAME), [prompt], [n])[0]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_ends_of_texts_are_those_of_transformers(penalty: float, early: Any) -> None:
    """With an EOS that is likely: finished texts, length penalty and early stopping matter."""
    model = loaded(NAME)
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=penalty, early_stopping=early)
    for seed in range(4):
        [prompt] = random_prompts(seed, [15], vocab())
        eos = hf_beams(prompt, BeamSearchParams(beam_width=3, max_tokens=5))[1][0][2]
        with LLM(
            replace(model, eos_token_ids=frozenset([eos])),
            kv_cache_memory_bytes=32 << 20,
            driver=HostDriver(granularity=4096),
        ) as llm:
            [output] = llm.beam_search([prompt], params, use_tqdm=False)
        assert_same(output, hf_beams(prompt, params, eos))
        assert {c.finish_reason for c in output.outputs} <= {"stop", "length"}


@pytest.mark.parametrize(
    "backend", ["virtual-interleaved", "virtual-overlap", "paged-7", "static-interleaved"]
)
@pytest.mark.parametrize("limits", ["slots", "memory"])
def test_beams_under_exhaustion(backend: str, limits: str) -> None:
    """Fewer places than beams, or memory for hardly more than one: other beams wait, results are equal."""
    options: dict[str, Any] = {"max_num_seqs": 2}
    if limits == "memory":
        options = {"kv_cache_memory_bytes": 90 * kv_shape(NAME).token_bytes, "max_model_len": 64}
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    [prompt] = random_prompts(12, [45], vocab())
    with make_llm(NAME, backend, **options) as llm:
        stepped(llm).add_request("b", prompt, params)
        greedy_params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        stepped(llm).add_request("g", prompt[:20], greedy_params)
        done: dict[str, RequestOutput] = {}
        for _ in range(2000):
            if not llm.engine.has_work:
                break
            done.update({o.request_id: o for o in stepped(llm).step()})
            llm.check()
    assert_same(done["b"], hf_beams(prompt, params))
    assert branches(done["g"]) == [_greedy(prompt[:20], 6)]


@pytest.mark.parametrize("backend", ["virtual-interleaved", "paged-16"])
def test_beams_of_a_long_prompt_hold_little_more_than_one_request(backend: str) -> None:
    [prompt] = random_prompts(2, [1024], vocab())
    held = []
    for width in (1, 4):
        with long_llm(backend) as llm:
            stepped(llm).add_request("r", prompt, BeamSearchParams(beam_width=width, max_tokens=6))
            for _ in range(2):
                stepped(llm).step()
                llm.check()
            held.append(llm.memory_usage().in_use)
    assert held[1] < 1.3 * held[0]


def test_temperature_flattens_the_scores() -> None:
    [prompt] = random_prompts(12, [10], vocab())
    logits = reference_model(NAME)(torch.tensor([prompt])).logits[0, -1].detach()
    for temperature in (0.0, 0.5, 2.0):
        with make_llm(NAME, "paged-16") as llm:
            params = BeamSearchParams(beam_width=3, max_tokens=1, temperature=temperature, ignore_eos=True)
            [output] = llm.beam_search([prompt], params, use_tqdm=False)
        best = torch.log_softmax(logits / (temperature or 1.0), -1).topk(3)
        assert branches(output) == [[t] for t in best.indices.tolist()]
        got = [c.cumulative_logprob for c in output.outputs]
        assert got == pytest.approx(best.values.tolist(), abs=1e-4)


def test_what_is_no_beam_search_is_refused() -> None:
    for wrong in (
        {"beam_width": 0},
        {"beam_width": 2, "max_tokens": 0},
        {"beam_width": 2, "early_stopping": 3},
    ):
        with pytest.raises(RequestError):
            BeamSearchParams(**wrong)
    with make_llm(NAME, "paged-16") as llm:
        with pytest.raises(RequestError, match="BeamSearchParams"):
            llm.beam_search([[1]], SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="vocabulary"):
            llm.beam_search([[1]], BeamSearchParams(beam_width=10**6))
        assert not llm.engine.has_work
