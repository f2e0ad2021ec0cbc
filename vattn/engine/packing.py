"""Packs the tokens of scheduled requests into one batch, and maps logit rows back to requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vattn.engine.request import Request
from vattn.engine.scheduler import Scheduled


class PromptRows(NamedTuple):
    """The logit rows of prompt positions of a request that asked for `prompt_logprobs`."""

    request: Request
    start: int
    """Position in the prompt of the first row's token."""
    rows: slice
    """Rows of the step's logits."""
    next_token_ids: list[int]
    """The token that follows each row's position."""


class PackedBatch(NamedTuple):
    """A step's tokens, chunk after chunk, and the positions that need logits."""

    token_ids: list[int]
    """Token ids; 0 where the token is pending."""
    pending: list[tuple[int, int]]
    """For each pending token: (index in the packed tokens, row in the step in flight)."""
    positions: list[int]
    logit_rows: list[int]
    """Indices into the packed tokens. The rows of the step's logits are in this order."""
    sample_rows: list[int]
    """Rows of the step's logits that give next tokens, in the order of the items that sample."""
    prompt_rows: list[PromptRows]


def pack(items: Sequence[Scheduled]) -> PackedBatch:
    """Pack the tokens of a step. Only rows that are read get logits, because computing logits is most of a
    small model's work."""
    token_ids: list[int] = []
    pending: list[tuple[int, int]] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    for item in items:
        request, length = item
        start, first = request.num_computed, len(token_ids)
        end = start + length
        token_ids += request.token_ids[start:end]
        if end > len(request.token_ids):
            assert request.pending_row is not None
            pending.append((len(token_ids), request.pending_row))
            token_ids.append(0)
        positions += range(start, end)
        # Rows before `wanted_from` were already computed before a preemption.
        wanted_from = max(start, len(request.prompt_logprobs) - 1)
        wanted = range(wanted_from, min(end, len(request.prompt_token_ids) - 1))
        if request.params.prompt_logprobs is not None and wanted:
            rows = slice(len(logit_rows), len(logit_rows) + len(wanted))
            next_ids = request.prompt_token_ids[wanted.start + 1 : wanted.stop + 1]
            prompt_rows.append(PromptRows(request, wanted.start, rows, next_ids))
            logit_rows += range(first + wanted.start - start, first + wanted.stop - start)
        if item.samples:
            sample_rows.append(len(logit_rows))
            logit_rows.append(first + length - 1)
    return PackedBatch(token_ids, pending, positions, logit_rows, sample_rows, prompt_rows)
