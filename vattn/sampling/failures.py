"""Negative numbers that replace a token and say why a request got none."""

from __future__ import annotations

NOT_FINITE = -1
"""In place of a token: the model's logits hold a NaN or an infinity, or nothing but -inf."""

NOTHING_ALLOWED = -2
"""In place of a token: the request's own parameters ban every token the model allows."""


def sampling_failure(token_id: int) -> str | None:
    """Why a request got no token; None for a token."""
    if token_id == NOT_FINITE:
        return (
            "the model's logits are not finite (NaN, inf, or -inf for every token): the weights may be "
            "damaged, or dtype= overflows; try dtype='float32'"
        )
    if token_id == NOTHING_ALLOWED:
        return "bad_words, logit_bias or min_tokens leave no token to choose from"
    return None
