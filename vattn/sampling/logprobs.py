"""Log-probabilities of tokens under the model's own distribution, in the shape users know from vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.outputs import Logprob, TokenLogprobs
from vattn.params import WHOLE_VOCABULARY

_BLOCK_ELEMENTS = 1 << 24
"""Prompt logits are taken in blocks of about this many elements, to bound what is held in float32."""


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Per row of `logits` `[N, V]`: the entry of `token_ids[i]`, then of the `counts[i]` most likely tokens.

    A count of -1 means the whole vocabulary. A row has `count` entries, or one more when its own token is
    not among the most likely. Waits for the device.
    """
    if not counts:
        return []
    vocab_size = logits.shape[1]
    widths = [vocab_size if count == WHOLE_VOCABULARY else min(count, vocab_size) for count in counts]
    logits = logits.float()
    log_total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > own).sum(-1).add_(1).tolist()
    own_logprobs = (own - log_total).squeeze(1).tolist()
    top = logits.topk(max(widths), dim=-1)
    top_logprobs = (top.values - log_total).tolist()
    top_ids = top.indices.tolist()
    entries = []
    for row, (token, width) in enumerate(zip(token_ids.tolist(), widths, strict=True)):
        entry = {token: Logprob(own_logprobs[row], ranks[row])}
        for place in range(width):
            other = top_ids[row][place]
            if other != token:
                entry[other] = Logprob(top_logprobs[row][place], place + 1)
        entries.append(entry)
    return entries


def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], count: int, *, start: int = 0
) -> list[TokenLogprobs | None]:
    """Entries of a prompt, or of one chunk of it.

        position         start     start + 1   …   start + N - 1
        logits[i]   of     0           1                N - 1
        predicts         start + 1  start + 2       start + N       = next_token_ids

    `logits` `[N, V]` are those of N positions from `start` on, `next_token_ids` the N tokens that follow
    them. The chunk at 0 begins with None, for the first token, which nothing predicts: the lists of all
    chunks joined have one entry per prompt token.
    """
    entries: list[TokenLogprobs | None] = [None] if start == 0 else []
    block = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    following = torch.tensor(list(next_token_ids), dtype=torch.int64, device=logits.device)
    for first in range(0, len(next_token_ids), block):
        rows = slice(first, first + block)
        ids = following[rows]
        entries += token_logprobs(logits[rows], ids, [count] * len(ids))
    return entries
