"""From logits to tokens, against transformers' logits processors and plain reference code."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vattn.params import SamplingParams
from vattn.sampling.philox import uniforms
from vattn.sampling.sampler import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    Sampler,
    SamplingState,
    sampling_failure,
)

VOCAB = 300
EOS = 2


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def state_of(
    sampler: Sampler,
    prompt: Sequence[int] = (),
    outputs: list[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    branch: int = 0,
    **params: Any,
) -> SamplingState:
    return sampler.new_state(
        SamplingParams(**params),
        list(prompt),
        [] if outputs is None else outputs,
        bad_words=bad_words,
        branch=branch,
    )


def sample(sampler: Sampler, logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
    tokens: list[int] = sampler.sample(logits, states).token_ids.tolist()
    return tokens


# ---------------------------------------------------------------------- the reference, a row at a time
def reference_scores(row: Tensor, state: SamplingState) -> Tensor:
    """Scores of one row after all processors, in the documented order, by transformers' classes."""
    params = state.params
    prompt, outputs = list(state.prompt_token_ids), list(state.output_token_ids)
    seen = torch.tensor([prompt + outputs], dtype=torch.long)
    written = torch.tensor([outputs], dtype=torch.long)
    scores = row[None].float().clone()
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if state.bad_words:
        scores = NoBadWordsLogitsProcessor([list(w) for w in state.bad_words])(written, scores)
    if params.min_tokens and state.terminal_ids:
        hold = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, sorted(state.terminal_ids))
        scores = hold(seen, scores)
    if params.repetition_penalty != 1.0 and seen.numel():
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    for token, count in Counter(outputs).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.greedy:
        return scores[0]
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        scores = warper(seen, scores)
    return scores[0]


def reference_token(row: Tensor, state: SamplingState) -> tuple[int, float]:
    """The token by a plain inverse of the cumulative distribution, and how near u was to a border."""
    scores = reference_scores(row, state)
    if state.params.greedy:
        best = scores.topk(2).values.tolist()
        return int(scores.argmax()), best[0] - best[1]
    cumulative = list(itertools.accumulate(scores.double().softmax(-1).tolist()))
    u = uniforms([state.seed], [state.branch], [len(state.output_token_ids)])[0] * cumulative[-1]
    return bisect.bisect_right(cumulative, u), min(abs(u - border) for border in cumulative)


# ---------------------------------------------------------------------- greedy
def test_greedy_is_the_argmax_in_every_dtype() -> None:
    sampler = Sampler()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        logits = random_logits(6).to(dtype)
        states = [state_of(sampler, temperature=0, top_k=1 + i, top_p=0.5) for i in range(6)]
        result = sampler.sample(logits, states)
        assert result.token_ids.dtype == torch.int64
        assert result.token_ids.tolist() == logits.float().argmax(-1).tolist()
        assert result.logprobs is None


def test_an_all_greedy_batch_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the logits, no random number, nothing per row."""
    import vattn.sampling.sampler as module

    def forbidden(*_: object) -> None:
        raise AssertionError("not needed for greedy sampling")

    for name in ("draw", "uniforms", "token_logprobs", "LogitEdits"):
        monkeypatch.setattr(module, name, forbidden)
    sampler = Sampler()
    states = [state_of(sampler, temperature=0, stop="x", ignore_eos=True, max_tokens=9) for _ in range(4)]
    assert sample(sampler, random_logits(4), states) == random_logits(4).argmax(-1).tolist()


def test_logits_are_left_as_they_are() -> None:
    sampler = Sampler(eos_token_ids=[EOS])
    logits = random_logits(3)
    before = logits.clone()
    rows = [
        state_of(sampler, [1, 2], [3], repetition_penalty=2.0, temperature=0),
        state_of(sampler, logit_bias={4: 5.0}, min_tokens=3, top_p=0.5),
        state_of(sampler, temperature=0.7, logprobs=2, bad_words=[[7]]),
    ]
    sample(sampler, logits, rows)
    assert torch.equal(logits, before)


def test_logits_of_inference_mode_and_with_gradients_are_taken() -> None:
    sampler = Sampler()
    rows = [state_of(sampler, temperature=0), state_of(sampler, logit_bias={1: 1.0}, top_p=0.9)]
    with torch.inference_mode():
        logits = random_logits(2) * 1.0
    assert sample(sampler, logits, rows) == sample(sampler, random_logits(2).requires_grad_(), rows)


def test_a_shape_that_does_not_fit_is_an_error() -> None:
    sampler = Sampler()
    with pytest.raises(ValueError, match=r"logits are \(2, 300\), expected \(1, vocabulary\)"):
        sampler.sample(random_logits(2), [state_of(sampler)])


def test_tiny_temperatures_above_greedy_neither_overflow_nor_mix() -> None:
    sampler = Sampler()
    logits = random_logits(4) * 1e34  # divided by the temperature first, these would be infinite
    states = [
        state_of(sampler, temperature=1e-5, top_p=p, top_k=k) for p, k in [(1, 0), (0.9, 0), (1, 9), (0.5, 5)]
    ]
    assert sample(sampler, logits, states) == logits.argmax(-1).tolist()


# ---------------------------------------------------------------------- bans, biases, penalties
def test_the_repetition_penalty_covers_prompt_and_output_the_others_only_output() -> None:
    sampler = Sampler()

    def best(logits: list[float], **params: Any) -> int:
        state = state_of(sampler, [0], [1, 1], temperature=0, **params)
        return sample(sampler, torch.tensor([logits]), [state])[0]

    assert best([4.0, 3.0, 2.5]) == 0
    assert best([4.0, 3.0, 2.5], repetition_penalty=2.0) == 2  # 2, 1.5, 2.5
    assert best([-4.0, -3.0, -5.0], repetition_penalty=2.0) == 2  # -8, -6, -5
    assert best([3.0, 3.5, 2.8], presence_penalty=0.6) == 0  # 3, 2.9, 2.8
    assert best([3.0, 3.5, 2.8], presence_penalty=0.4) == 1  # once, though written twice
    assert best([3.0, 3.5, 2.8], frequency_penalty=0.3) == 0  # 3, 3.5 - 2 * 0.3, 2.8


def test_min_tokens_hides_eos_and_stop_tokens_until_reached() -> None:
    sampler = Sampler(eos_token_ids=[EOS, 5])
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 5], logits[0, 6], logits[0, 1] = 9.0, 8.0, 7.0, 1.0
    outputs: list[int] = []
    state = state_of(
        sampler, outputs=outputs, temperature=0, min_tokens=2, stop_token_ids=[6], ignore_eos=True
    )
    taken = []
    for _ in range(4):
        outputs += sample(sampler, logits, [state])
        taken = list(outputs)
    assert taken == [1, 1, EOS, EOS]


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    sampler = Sampler()
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    outputs: list[int] = []
    state = state_of(sampler, [0, 1], outputs, [[0], [1, 2], [3, 1, 2], [2, 3]], temperature=0)
    # 0 never; the prompt's 1 counts for nothing; then 2 after 1 never
    assert sample(sampler, logits, [state]) == [1]
    outputs += [1]
    assert sample(sampler, logits, [state]) == [1]
    outputs[:] = [2]
    assert sample(sampler, torch.tensor([[0.0, 0, 0, 9, 1]]), [state]) == [4]


edit_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.8]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.1]),
        "top_k": st.sampled_from([0, 1, 3, 12, 60]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3]),
        "seed": st.integers(0, 2**64 - 2),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, 39), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 39), st.floats(-20, 20), max_size=4),
    },
)
tokens_of_40 = st.lists(st.integers(0, 39), max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        **draw(edit_params),
        "prompt": draw(tokens_of_40),
        "bad_words": draw(st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=3), max_size=4)),
        "branch": draw(st.integers(0, 2)),
    }


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(requests(), min_size=1, max_size=5),
    st.lists(st.integers(1, 31), min_size=1, max_size=8),
    st.integers(0, 2**31),
)
def test_every_step_agrees_with_transformers_whoever_is_in_the_batch(
    asked: list[dict[str, Any]], members: list[int], seed: int
) -> None:
    """Requests join, pause (as after a preemption) and come back; counts and bans keep step."""
    sampler = Sampler(seed=seed, eos_token_ids=[EOS])
    outputs: list[list[int]] = [[] for _ in asked]
    states = [state_of(sampler, outputs=out, **req) for out, req in zip(outputs, asked, strict=True)]
    for step, mask in enumerate(members):
        batch = [i for i in range(len(states)) if mask >> i & 1]
        for repeat in range(2):  # twice with the same batch: the second step runs on the kept plan
            logits = random_logits(len(batch), 40, seed + 2 * step + repeat)
            got = sample(sampler, logits, [states[i] for i in batch])
            for i, row, token in zip(batch, logits, got, strict=True):
                expected, margin = reference_token(row, states[i])
                assert token == expected or margin < 1e-4
                outputs[i].append(token)


def test_token_counts_are_kept_not_rebuilt() -> None:
    """Each output token is read a fixed number of times, however long the output grows."""

    class CountingList(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            CountingList.reads += 1
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("the output must not be walked")

    outputs = CountingList()
    sampler = Sampler()
    state = state_of(
        sampler, range(100), outputs, temperature=0, repetition_penalty=1.2, presence_penalty=0.1
    )
    steps = 200
    for step in range(steps):
        outputs.append(sample(sampler, random_logits(1, seed=step), [state])[0])
    assert CountingList.reads <= 2 * steps


# ---------------------------------------------------------------------- random streams
def test_the_distribution_is_that_of_the_softmax() -> None:
    """Chi-square of 20,000 draws over 10 tokens; 9 degrees of freedom, p(>35) = 6e-5; the seed is fixed."""
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.0, -2.0, 0.3, 1.7, -0.4, 0.9]])
    sampler = Sampler()
    outputs: list[int] = []
    state = state_of(sampler, outputs=outputs, temperature=0.8, seed=11)
    batch, draws = 200, 20_000
    branches = [
        dataclasses.replace(state, output_token_ids=outputs, branch=branch) for branch in range(batch)
    ]
    counts: Counter[int] = Counter()
    for _ in range(draws // batch):
        counts.update(sample(sampler, logits.expand(batch, -1), branches))
        outputs.append(0)
    expected = (logits[0] / 0.8).double().softmax(-1) * draws
    chi_square = sum(
        (counts[token] - expected[token].item()) ** 2 / expected[token].item() for token in range(10)
    )
    assert chi_square < 35


def test_impossible_tokens_are_never_drawn() -> None:
    sampler = Sampler()
    logits = torch.full((64, 1000), -math.inf)
    logits[:, 17], logits[:, 981] = 0.0, 0.0
    states = [state_of(sampler, temperature=1.0) for _ in range(64)]
    assert set(sample(sampler, logits, states)) == {17, 981}


def run_alone(row_of: Any, steps: int, **params: Any) -> list[int]:
    sampler = Sampler(eos_token_ids=[EOS])
    outputs: list[int] = []
    state = state_of(sampler, [1, 2, 3], outputs, **params)
    for step in range(steps):
        outputs += sample(sampler, row_of(step)[None], [state])
    return outputs


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(requests(), min_size=2, max_size=6),
    st.integers(0, 2**63),
    st.lists(st.permutations(range(6)), min_size=6, max_size=6),
    st.sampled_from([61, 1027]),
)
def test_seeded_tokens_do_not_depend_on_the_batch(
    others: list[dict[str, Any]], seed: int, orders: list[list[int]], vocab: int
) -> None:
    """Same seed and logits: same tokens alone, or in any place of any batch, or after a pause."""
    mine: dict[str, Any] = {**others[0], "seed": seed, "temperature": 0.9, "prompt": [1, 2, 3]}
    bad_words = mine.pop("bad_words")
    branch = mine.pop("branch")
    mine.pop("prompt")

    def row_of(step: int) -> Tensor:
        return random_logits(1, vocab, seed=step, spread=2.0)[0]

    alone = run_alone(row_of, len(orders), bad_words=bad_words, branch=branch, **mine)

    sampler = Sampler(seed=5, eos_token_ids=[EOS])
    outputs: list[int] = []
    state = state_of(sampler, [1, 2, 3], outputs, bad_words, branch, **mine)
    rest = [state_of(sampler, outputs=[], **request) for request in others[1:]]
    for step, order in enumerate(orders):
        company = [rest[i] for i in order if i < len(rest)]
        place = order[0] % (len(company) + 1)
        batch = [*company[:place], state, *company[place:]]
        logits = random_logits(len(batch), vocab, seed=1000 + step)
        logits[place] = row_of(step)
        if order[1] == 0 and company:  # the others go on without it for a step
            sample(sampler, random_logits(len(company), vocab), company)
        outputs.append(sample(sampler, logits, batch)[place])
    assert outputs == alone


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_equal_rows_get_equal_tokens_at_any_batch_size(rows: int) -> None:
    """Bit for bit, with a vocabulary that no vector width divides, in one block of rows and in two."""
    row = random_logits(1, 10_007, spread=1.0)
    sampler = Sampler()
    for params in ({}, {"top_p": 0.9}, {"top_k": 40}, {"top_p": 0.97, "top_k": 2000, "min_p": 0.001}):
        single = sample(sampler, row, [state_of(sampler, seed=3, **params)])
        states = [state_of(sampler, seed=3, **params) for _ in range(rows)]
        assert sample(sampler, row.expand(rows, -1), states) == single * rows


def test_unseeded_requests_differ_and_follow_the_root_seed() -> None:
    def run(root: int) -> list[int]:
        sampler = Sampler(seed=root)
        return sample(sampler, torch.zeros(8, 10_000), [state_of(sampler) for _ in range(8)])

    assert run(1) == run(1) != run(2)
    assert len(set(run(1))) == 8


def test_branches_of_one_seed_are_independent_and_reproducible() -> None:
    def run(sampler: Sampler) -> list[int]:
        states = [state_of(sampler, seed=9, branch=branch) for branch in range(8)]
        return sample(sampler, torch.zeros(8, 10_000), states)

    assert run(Sampler(seed=1)) == run(Sampler(seed=2))
    assert len(set(run(Sampler()))) == 8


# ---------------------------------------------------------------------- rows that can't be sampled
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"logprobs": 2}])
def test_broken_logits_fail_their_row_only(params: dict[str, Any]) -> None:
    sampler = Sampler()
    logits = random_logits(5)
    logits[0, 7] = math.nan
    logits[1] = -math.inf
    logits[3, 7] = math.inf
    states = [state_of(sampler, seed=1, **params) for _ in range(5)]
    whole = sampler.sample(random_logits(5), states).token_ids.tolist()
    result = sampler.sample(logits, states)
    assert result.token_ids.tolist() == [NOT_FINITE, NOT_FINITE, whole[2], NOT_FINITE, whole[4]]
    if params.get("logprobs"):
        assert result.logprobs is not None
        assert [entry is None for entry in result.logprobs] == [True, True, False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_ban_everything_are_told_from_broken_logits(temperature: float) -> None:
    sampler = Sampler()
    everything = [[token] for token in range(10)]
    logits = random_logits(3, 10)
    logits[2] = math.nan
    states = [
        state_of(sampler, bad_words=everything, temperature=temperature),
        state_of(sampler, bad_words=everything[:9], temperature=temperature),
        state_of(sampler, bad_words=everything, temperature=temperature),
    ]
    assert sample(sampler, logits, states) == [NOTHING_ALLOWED, 9, NOT_FINITE]


def test_failures_say_what_to_do() -> None:
    assert sampling_failure(0) is None
    assert "dtype='float32'" in (sampling_failure(NOT_FINITE) or "")
    assert "bad_words" in (sampling_failure(NOTHING_ALLOWED) or "")


# ---------------------------------------------------------------------- devices
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_draws_the_same_tokens() -> None:
    logits = random_logits(12, 32_000)
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_p": 0.7},
        {"logit_bias": {5: 3.0}, "min_tokens": 3, "stop_token_ids": [6]},
    ] * 2
    results = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(seed=3, eos_token_ids=[EOS])
        outputs: list[list[int]] = [[] for _ in asked]
        states = [state_of(sampler, [1, 2], out, **p) for out, p in zip(outputs, asked, strict=True)]
        for step in range(4):
            got = sample(sampler, logits.roll(step, 1).to(device), states)
            for out, token in zip(outputs, got, strict=True):
                out.append(token)
        results.append(outputs)
    assert results[0] == results[1]


# ---------------------------------------------------------------------- rows and their neighbours
odd_ids = st.sampled_from([-VOCAB - 1, -VOCAB, -2, -1, 0, EOS, VOCAB - 1, VOCAB, VOCAB + 1, 2 * VOCAB, 10**9])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    eos=st.frozensets(odd_ids, max_size=4),
    bad=st.lists(st.lists(odd_ids, min_size=1, max_size=2), max_size=3),
    prompt=st.lists(odd_ids, max_size=4),
    bias=st.dictionaries(odd_ids.filter(lambda token: token >= 0), st.floats(-50, 50), max_size=3),
)
def test_tokens_that_have_no_logit_never_reach_into_another_row(
    eos: frozenset[int], bad: list[list[int]], prompt: list[int], bias: dict[int, float]
) -> None:
    """Whatever ids a request names, the rows around it give what they give alone."""
    logits = random_logits(3, seed=5)
    plain = {"temperature": 0.0, "logprobs": 3, "min_tokens": 2, "repetition_penalty": 1.2}
    sampler, odd_sampler = Sampler(eos_token_ids=[EOS]), Sampler(eos_token_ids=eos)
    alone = [sampler.sample(logits[row : row + 1], [state_of(sampler, [5], **plain)]) for row in (0, 2)]
    states = [state_of(sampler, [5], **plain) for _ in range(3)]
    states[1] = state_of(odd_sampler, prompt, bad_words=bad, logit_bias=bias, **plain)
    batch = sampler.sample(logits, states)
    assert batch.logprobs is not None
    for row, single in zip((0, 2), alone, strict=True):
        assert single.logprobs is not None
        assert batch.token_ids[row] == single.token_ids[0]
        assert batch.logprobs[row] == single.logprobs[0]
