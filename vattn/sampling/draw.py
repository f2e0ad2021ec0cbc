"""Chooses one token per row of logits: the most likely one, or a random one from a filtered distribution.

Random tokens come from the inverse of the cumulative distribution in vocabulary order:

    values    (logits - max) / temperature, so 0 at most
    floor     the largest of  log(min_p)
                              the top_k-th largest value
                              the smallest value of the top_p nucleus of what those two leave
    weights   exp(values), 0 below the floor
    token     the first whose cumulative weight exceeds u * total

This needs one random number per row; Gumbel noise with an argmax needs one per token of the vocabulary. Every
operation is within a row, and sums are in float64, so a row's token does not depend on other rows. Tokens as
likely as the last kept one are kept too, so the result does not depend on how a sort breaks ties.

On the CPU, order statistics, argmax and masking go through numpy, whose vectorised loops are 3 to 15 times
faster there than torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vattn.params import SamplingParams

NUCLEUS_GUESS = 1024
"""Candidates among which the top_p nucleus is looked for first; rows that need more take more."""

BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Logits drawn from at a time, by device: on the CPU a few rows, whose temporaries stay in its cache; on a
GPU enough to fill it, with some 20 bytes of temporaries each."""


def argmax_rows(logits: Tensor) -> Tensor:
    """Most likely token of each row `[B, V]`, the lowest id among equals, or a NaN's; int64 `[B]`."""
    if logits.device.type == "cpu":
        wide = logits.float() if logits.itemsize < 4 else logits
        return torch.from_numpy(wide.detach().numpy().argmax(-1))
    return logits.argmax(-1)


def largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest of each row `[R, V]`, in falling order: float32 `[R, count]`."""
    if values.device.type == "cpu":
        vocab_size = values.shape[1]
        top = np.partition(values.numpy(), vocab_size - count, axis=-1)[:, vocab_size - count :]
        top.sort(axis=-1)
        return torch.from_numpy(top[:, ::-1].copy())
    return values.topk(count, dim=-1).values


def keep(weights: Tensor, values: Tensor, floor: Tensor) -> None:
    """Zero the weights `[R, V]` of tokens whose value is below their row's floor `[R, 1]`, in place."""
    if weights.device.type == "cpu":
        array = weights.numpy()
        np.multiply(array, values.numpy() >= floor.numpy(), out=array)
    else:
        weights.mul_(values >= floor)


class Filters(NamedTuple):
    """The parameters of R random rows as columns `[R, 1]`; None where no row uses one."""

    temperature: Tensor
    min_p: Tensor | None
    """Its logarithm; -inf = all."""
    top_k: Tensor | None
    """int64; 0 = all."""
    top_p: Tensor | None
    """float64; 1 = all."""
    max_k: int

    def rows(self, block: slice) -> Filters:
        """The parameters of some of the rows."""

        def cut(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[block]

        return Filters(self.temperature[block], cut(self.min_p), cut(self.top_k), cut(self.top_p), self.max_k)

    @staticmethod
    def of(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        min_p = [math.log(p.min_p) if p.min_p else -math.inf for p in params]
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        top_p = [p.top_p for p in params]
        return Filters(
            temperature=column([p.temperature for p in params], torch.float32),
            min_p=column(min_p, torch.float32) if max(min_p) > -math.inf else None,
            top_k=column(top_k, torch.int64) if any(top_k) else None,
            top_p=column(top_p, torch.float64) if min(top_p) < 1.0 else None,
            max_k=max(top_k),
        )


def filtered_weights(logits: Tensor, filters: Filters) -> Tensor:
    """The weight of each token in the draw: float32 `[R, V]`, not normalised, zero where filtered out.

    `logits`, float32 `[R, V]`, are not changed. A row without a finite maximum yields NaN.
    """
    # The maximum goes first: exact, and no temperature can overflow what is left.
    values = (logits - logits.amax(-1, keepdim=True)).div_(filters.temperature)
    # On the CPU softmax works row by row, so equal rows give equal bits wherever they stand; elementwise
    # loops may treat the ends of a thread's share differently.
    weights = values.softmax(-1) if values.device.type == "cpu" else values.exp()

    # Filters compare values, not weights: those underflow to masses of zeros at low temperatures.
    floor = filters.min_p
    top = None
    if filters.top_k is not None:
        top = largest(values, max(filters.max_k, _guess(filters, values)))
        kth = top.gather(1, (filters.top_k - 1).clamp(min=0)).masked_fill_(filters.top_k == 0, -math.inf)
        floor = kth if floor is None else torch.maximum(floor, kth)
    if floor is not None:
        keep(weights, values, floor)
    if filters.top_p is not None:
        if top is None:
            top = largest(values, _guess(filters, values))
        # What the kept tokens weigh, in units of the most likely one, whose value is 0. They are the first
        # in falling order, so the nucleus ends among them and `top` needs no floor.
        total = weights.sum(-1, keepdim=True, dtype=torch.float64) / weights.amax(-1, keepdim=True)
        keep(weights, values, _nucleus_floor(values, top, total * filters.top_p, filters.top_p))
    return weights


def _guess(filters: Filters, values: Tensor) -> int:
    return min(NUCLEUS_GUESS, values.shape[1]) if filters.top_p is not None else 0


def _nucleus_floor(values: Tensor, top: Tensor, wanted: Tensor, top_p: Tensor) -> Tensor:
    """Smallest value of each row's nucleus, `[R, 1]`; -inf where top_p is 1.

    The nucleus is the shortest prefix of the falling order that weighs at least `wanted`, where a token
    weighs exp(value). `top` are each row's largest values; where they weigh too little, more are taken.
    """
    weights = top.double().exp_()
    upto = weights.cumsum(-1)
    floor = top.masked_fill(upto - weights >= wanted, math.inf).amin(-1, keepdim=True)
    floor.masked_fill_(top_p >= 1.0, -math.inf)
    if top.shape[1] < values.shape[1]:
        more = (upto[:, -1:] < wanted) & (top_p < 1.0)
        rows = more.squeeze(1).nonzero().squeeze(1)
        if rows.numel():
            wider = largest(values[rows], min(top.shape[1] * 16, values.shape[1]))
            floor[rows] = _nucleus_floor(values[rows], wider, wanted[rows], top_p[rows])
    return floor


def draw(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """One token per row of float32 logits `[R, V]`; `uniform` float64 `[R, 1]` in [0, 1). int64 `[R]`.

    A row without a finite maximum yields an arbitrary number: the caller must look for those.
    """
    rows = max(1, BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    blocks = [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]
    return torch.cat([_draw(logits[block], filters.rows(block), uniform[block]) for block in blocks])


def _draw(logits: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    cumulative = filtered_weights(logits, filters).double().cumsum_(-1)
    # Strictly greater, so never a token of weight zero; u < 1 keeps the target below the total.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
