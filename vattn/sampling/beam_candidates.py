"""Finds the candidate tokens of each beam in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.sampling.beam import Candidate


def best_candidates(logits: Tensor, k: int, temperatures: Sequence[float]) -> list[list[Candidate]]:
    """The `k` most likely next tokens of each row of `logits` `[B, V]`, best first.

    A row with a NaN or without any finite logit has no candidates.
    """
    scaled = logits.float() / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    logprobs, tokens = scaled.log_softmax(-1).topk(min(k, logits.shape[1]), -1)
    finite = logits.amax(-1).isfinite().tolist()
    return [
        [Candidate(*pair) for pair in zip(row, values, strict=True)] if sound else []
        for row, values, sound in zip(tokens.tolist(), logprobs.tolist(), finite, strict=True)
    ]
