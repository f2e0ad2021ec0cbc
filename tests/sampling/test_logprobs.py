"""Log-probabilities of sampled and prompt tokens: the model's own, whatever the parameters do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vattn.outputs import TokenLogprobs
from vattn.params import SamplingParams
from vattn.sampling import logprobs as module
from vattn.sampling.logprobs import prompt_logprobs, token_logprobs
from vattn.sampling.sampler import Sampler


def random_logits(rows: int, vocab: int = 50) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2


def check(entry: TokenLogprobs, row: Tensor, token: int, count: int) -> None:
    """One position against log_softmax and a full sort."""
    expected = row.double().log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    assert next(iter(entry)) == token
    assert set(entry) == {token, *order[:count]}
    assert [t for t in entry if t != token] == [t for t in order[:count] if t != token]
    for other, value in entry.items():
        assert value.logprob == pytest.approx(expected[other].item(), abs=1e-5)
        assert value.rank == order.index(other) + 1
        assert value.decoded_token is None


@pytest.mark.parametrize("count", [0, 1, 5, 50, -1])
def test_entries_hold_the_token_then_the_most_likely(count: int) -> None:
    logits = random_logits(6)
    tokens = torch.tensor([0, 7, 49, *logits[3:].argmax(-1).tolist()])
    entries = token_logprobs(logits, tokens, [count] * 6)
    for entry, row, token in zip(entries, logits, tokens.tolist(), strict=True):
        check(entry, row, token, 50 if count == -1 else count)


def test_equally_likely_tokens_share_the_best_rank() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert [token_logprobs(logits, torch.tensor([t]), [0])[0][t].rank for t in range(4)] == [3, 1, 1, 4]


def test_each_row_gets_as_many_as_it_asked_for_from_unedited_logits() -> None:
    sampler = Sampler()
    logits = random_logits(5)
    asked = [3, None, 0, 50, 1]
    states = [
        sampler.new_state(
            SamplingParams(
                logprobs=count,
                temperature=0.5 * (row % 2),
                top_k=2,
                repetition_penalty=1.5,
                logit_bias={9: 30.0},
            ),
            [1, 2],
            [3],
        )
        for row, count in enumerate(asked)
    ]
    tokens, entries = sampler.sample(logits, states)
    assert tokens.tolist() == [9] * 5
    assert entries is not None
    for row, count in enumerate(asked):
        entry = entries[row]
        if count is None:
            assert entry is None
        else:
            assert entry is not None
            check(entry, logits[row], 9, count)


def test_low_precision_logits_are_normalised_in_float32() -> None:
    logits = random_logits(2, 4000).bfloat16()
    entry = token_logprobs(logits, torch.tensor([5, 6]), [-1, -1])[0]
    assert sum(math.exp(value.logprob) for value in entry.values()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("chunks", [[9], [1, 8], [4, 1, 4]])
@pytest.mark.parametrize("block", [1, 100, 1 << 24])
def test_prompt_logprobs_join_over_chunks(
    chunks: list[int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vocabulary 50: blocks of 1, 2 and all rows. The first entry is None; entry i is of token i."""
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", block)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    logits = random_logits(len(prompt))
    entries = []
    start = 0
    for length in chunks:
        following = prompt[start + 1 : start + 1 + length]
        entries += prompt_logprobs(logits[start : start + length], following, 2, start=start)
        start += length
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position in range(1, len(prompt)):
        entry = entries[position]
        assert entry is not None
        check(entry, logits[position - 1], prompt[position], 2)


def test_a_prompt_of_one_token_has_nothing_predicted() -> None:
    assert prompt_logprobs(random_logits(0), [], 3) == [None]
