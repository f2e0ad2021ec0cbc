"""Reordering a batch in place: every order of up to four rows, with every repetition."""

from __future__ import annotations

import itertools

import pytest
import torch

from vattn.hf.moves import SPARE, apply_moves, plan_moves


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_row_i_holds_what_row_rows_i_held(count: int) -> None:
    for rows in itertools.product(range(count), repeat=count):
        states = torch.arange(count * 2.0).view(count, 2)
        wanted = states[list(rows)]
        apply_moves(states, plan_moves(rows))
        assert torch.equal(states, wanted), rows


def test_rows_that_stay_are_not_touched() -> None:
    assert plan_moves([0, 1, 2]) == []
    assert plan_moves([0, 0, 2]) == [(1, 0)]
    assert {to for to, _ in plan_moves([0, 1, 1, 3])} == {2}


def test_only_circles_need_a_spare_row() -> None:
    assert plan_moves([0, 0, 1]) == [(2, 1), (1, 0)]
    assert plan_moves([1, 0]) == [(SPARE, 0), (0, 1), (1, SPARE)]
    assert sum(to == SPARE for to, _ in plan_moves([1, 0, 3, 2])) == 2
