"""Filters and draws on rows of logits, against transformers' warpers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import vattn.sampling.draw as draw_module
from vattn.params import SamplingParams
from vattn.sampling.draw import Filters, draw, filtered_weights

VOCAB = 300


def random_logits(rows: int, vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * spread


def weights_of(logits: Tensor, *params: SamplingParams) -> Tensor:
    return filtered_weights(logits, Filters.of(params, logits.shape[1], logits.device))


def reference_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        logits = warper(torch.empty(len(logits), 0, dtype=torch.long), logits)
    return logits.double().softmax(-1)


CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.5, "min_p": 0.01, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.001, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.01, "top_p": 0.9, "top_k": 50},
]


@pytest.mark.parametrize("case", CASES)
def test_filters_keep_what_transformers_warpers_keep(case: dict[str, Any]) -> None:
    params = SamplingParams(**case)
    logits = random_logits(20)
    weights = weights_of(logits, *[params] * 20).double()
    expected = reference_probabilities(logits, params)
    assert torch.equal(weights > 0, expected.float() > 0)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-9)


def test_each_row_has_its_own_filters() -> None:
    params = [SamplingParams(**case) for case in CASES]
    logits = random_logits(len(params))
    together = weights_of(logits, *params)
    for row, own in enumerate(params):
        assert torch.equal(together[row], weights_of(logits[row : row + 1], own)[0])


def test_a_nucleus_wider_than_the_first_guess_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(0.99, 0), (0.5, 0), (1, 0), (0.9, 200), (0.9, 3), (0.001, 0)]
    params = [SamplingParams(top_p=p, top_k=k) for p, k in asked]
    logits = random_logits(len(asked), spread=0.5)
    wide = weights_of(logits, *params)
    monkeypatch.setattr(draw_module, "NUCLEUS_GUESS", 4)
    assert torch.equal(weights_of(logits, *params), wide)
    assert (wide[2] > 0).sum() == VOCAB


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0]])
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.86)):
        assert (weights_of(logits, params) > 0).tolist() == [[False, True, True, True, True, True]]


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_the_ends_of_the_unit_interval_stay_within_the_possible(uniform: float, token: int) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    filters = Filters.of([SamplingParams()], 5, logits.device)
    assert draw(logits, filters, torch.tensor([[uniform]], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("rows", [2, 7, 33])
@pytest.mark.parametrize("case", [{}, {"top_p": 0.9}, {"top_p": 0.97, "top_k": 2000, "min_p": 0.001}])
def test_equal_rows_weigh_the_same_bit_for_bit(rows: int, case: dict[str, Any]) -> None:
    """With a vocabulary that no vector width divides, so that rows start at every alignment."""
    row = random_logits(1, 10_007, spread=1.0)
    params = SamplingParams(**case)
    assert torch.equal(
        weights_of(row.repeat(rows, 1), *[params] * rows), weights_of(row, params).expand(rows, -1)
    )
