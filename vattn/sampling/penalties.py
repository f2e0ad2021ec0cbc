"""Presence, frequency and repetition penalties: which tokens a request has seen, kept up token by token.

Only logits of tokens already seen change, so nothing here is as long as the vocabulary:

    per request, on the host      ids     | 17 | 4 | 96 | 8 | spare |   prompt first (repetition only),
    (`TokenCounts`, survives      written |  0 | 2 |  0 | 1 |       |   then outputs as they first appear
     preemption)

    per batch, on the device      index   | row * V + id of every request's tokens | new ones | spare |
    (`PenaltyPlan`, remade when   owner   | which request each belongs to          |          |       |
     other requests run)          written | how often each was written             |          |       |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vattn.params import SamplingParams
from vattn.sampling.token_counts import TokenCounts

Int64s = npt.NDArray[np.int64]


class PenalisedRow:
    """A request under penalties: its row of the logits, its counts and its output."""

    __slots__ = ("applied", "base", "built", "counts", "late", "outputs", "params", "row")

    def __init__(self, row: int, params: SamplingParams, counts: TokenCounts, outputs: Sequence[int]) -> None:
        self.row = row
        self.params = params
        self.counts = counts
        self.outputs = outputs
        self.applied = len(outputs)
        """Output tokens that the plan's tensors hold."""
        counts.update(outputs)
        self.base = 0
        """Where the plan holds this request's first entry; the `built` first are neighbours."""
        self.built = len(counts.ids)
        self.late: list[int] = []
        """Where the plan holds the entries after those."""

    def place(self, slot: int) -> int | None:
        """Where the plan holds entry `slot` of the counts; None if nowhere yet."""
        if slot < self.built:
            return self.base + slot
        late = slot - self.built
        return self.late[late] if late < len(self.late) else None


class PenaltyPlan:
    """The penalties of one batch. In steady state a step moves a few integers per row to the device."""

    def __init__(self, rows: Sequence[PenalisedRow], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        self._used = 0
        for row in rows:
            row.base = self._used
            self._used += row.built
        entries = np.concatenate(
            [
                np.stack(
                    [row.row * vocab_size + row.counts.ids, np.full(row.built, number), row.counts.written]
                )
                for number, row in enumerate(rows)
            ],
            axis=1,
        )
        # [0] flat index into the logits, [1] number of the request, [2] times written
        self._entries = torch.from_numpy(entries).to(device)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._repetition = column([row.params.repetition_penalty for row in rows])
        self._frequency = column([row.params.frequency_penalty for row in rows])
        self._presence = column([row.params.presence_penalty for row in rows])

    def advance(self) -> None:
        """Take in the tokens written since the last call."""
        news: list[tuple[int, int, int]] = []  # place, flat index, number of the request
        for number, row in enumerate(self._rows):
            if row.applied == len(row.outputs):
                continue
            row.counts.update(row.outputs)
            for position in range(row.applied, len(row.outputs)):
                token = row.outputs[position]
                place = row.place(row.counts.slots[token])
                if place is None:
                    place = self._used
                    row.late.append(place)
                    self._used += 1
                news.append((place, row.row * self._vocab_size + token, number))
            row.applied = len(row.outputs)
        if not news:
            return
        if self._used > self._entries.shape[1]:
            spare = torch.zeros(3, max(256, self._used), dtype=torch.int64, device=self._device)
            self._entries = torch.cat([self._entries, spare], dim=1)
        places, index, owner = torch.tensor(news, dtype=torch.int64, device=self._device).unbind(1)
        self._entries[0].index_copy_(0, places, index)
        self._entries[1].index_copy_(0, places, owner)
        self._entries[2].index_add_(0, places, torch.ones_like(places))

    def apply(self, logits: Tensor) -> None:
        """Penalise contiguous float32 logits `[B, V]` in place."""
        index, owner, written = self._entries[:, : self._used]
        flat = logits.view(-1)
        value = flat[index]
        repetition = self._repetition[owner]
        value = torch.where(value > 0, value / repetition, value * repetition)
        value -= self._frequency[owner] * written
        value -= self._presence[owner] * (written > 0)
        flat[index] = value  # entries are distinct, so the order of writes does not matter
