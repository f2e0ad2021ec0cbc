"""Which tokens a request has seen, and how often it has written each: what penalties are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class TokenCounts:
    """How often one request has written each token, and which tokens its prompt holds.

    `update` costs O(1) per new token, amortised; the prompt is read once.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self.slots = {token: slot for slot, token in enumerate(distinct)}
        """Where a token stands in `ids` and `written`."""
        self.counted = 0
        """Output tokens taken in."""
        self._ids: Int64s = np.array(distinct, dtype=np.int64)
        self._written: Int64s = np.zeros(len(distinct), dtype=np.int64)

    @property
    def ids(self) -> Int64s:
        """Distinct tokens, in the order in which they were first seen."""
        return self._ids[: len(self.slots)]

    @property
    def written(self) -> Int64s:
        """Per entry of `ids`, its occurrences in the output."""
        return self._written[: len(self.slots)]

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Take in the output tokens that have come since the last call."""
        for position in range(self.counted, len(output_token_ids)):
            token = output_token_ids[position]
            slot = self.slots.setdefault(token, len(self.slots))
            if slot == len(self._ids):
                spare: Int64s = np.zeros(max(64, slot), dtype=np.int64)
                self._ids = np.concatenate([self._ids, spare])
                self._written = np.concatenate([self._written, spare])
            self._ids[slot] = token
            self._written[slot] += 1
        self.counted = len(output_token_ids)
