"""Rules about prompts: what they do to their own first token, and to the tokens of others."""

from __future__ import annotations

import numpy as np

from vattn.lab.doctor.case import Case
from vattn.lab.doctor.finding import Finding
from vattn.units import number, percent, seconds

LEAST = 8
TTFT_SHARE = 0.5
MANY_TOKENS = 10
"""A prefill is long if one could have decoded so many tokens instead."""
SLOWER = 4.0


def long_prefill(case: Case) -> Finding | None:
    """Most of the TTFT is computing the prompt, and it grows with the prompt."""
    rows = [
        (
            r["arrival_s"],
            r["first_scheduled_s"],
            r["first_token_s"],
            r["prompt_len"] - (r.get("cached_tokens") or 0),
        )
        for r in case.requests
        if r.get("first_scheduled_s") is not None and r.get("first_token_s") is not None
    ]
    gaps = [gap for r in case.requests for gap in (r.get("itl_s") or ())]
    if len(rows) < LEAST or not gaps:
        return None
    arrival, scheduled, first, computed = (np.array(c, np.float64) for c in zip(*rows, strict=True))
    prefill, ttft = first - scheduled, first - arrival
    share = float(prefill.sum() / ttft.sum()) if ttft.sum() > 0 else 0.0
    usual, gap = float(np.median(prefill)), float(np.median(gaps))
    long = float(np.percentile(prefill, 75)) >= MANY_TOKENS * gap
    alike = float(computed.std()) < 0.05 * float(computed.mean()) or float(prefill.std()) == 0
    follows = alike or float(np.corrcoef(computed, prefill)[0, 1]) >= 0.5
    if share < TTFT_SHARE or not long or not follows:
        return None
    chunk = case.max_num_batched_tokens
    evidence = [
        f"{percent(share)} of the TTFT is prefill, the rest queue (threshold {percent(TTFT_SHARE)})",
        f"a prefill takes {seconds(usual)} (median), a token afterwards {seconds(gap)}",
        f"prompts have {number(float(np.median(computed)))} tokens to compute (median, without those cached)",
    ]
    if not alike:
        evidence.append(
            f"correlation of prompt length and prefill: {float(np.corrcoef(computed, prefill)[0, 1]):.2f}"
        )
    advice = ["prefix hits: keep common beginnings (system prompts, conversations) word for word the same"]
    if chunk and float(np.median(computed)) > chunk:
        steps = float(np.median(np.ceil(computed / chunk)))
        evidence.append(f"a prompt takes {number(steps)} steps of {chunk:,} tokens")
        advice.insert(
            0, f"larger chunks (max_num_batched_tokens > {chunk:,}): fewer steps, but longer ones for all"
        )
    advice.append("more compute for prompts: faster devices, or some that only do prefill")
    return Finding(
        "long-prefill",
        "problem",
        "The first token takes long because the prompts are long: prefill is the limit.",
        tuple(evidence),
        tuple(advice),
        {"share": share},
    )


def prefill_in_the_way(case: Case) -> Finding | None:
    """Those who decode wait while prompts of others are computed."""
    s = case.steps
    if s is None:
        return None
    mixed, pure = (s.decodes > 0) & (s.tokens > s.decodes), (s.decodes > 0) & (s.tokens == s.decodes)
    if int(mixed.sum()) < LEAST or int(pure.sum()) < LEAST:
        return None
    slow, usual = float(np.percentile(s.duration_s[mixed], 90)), float(np.median(s.duration_s[pure]))
    share = float(s.decodes[mixed].sum() / s.decodes[mixed | pure].sum())
    if usual <= 0 or slow < SLOWER * usual or share < 0.01:
        return None
    tokens = float(np.median((s.tokens - s.decodes)[mixed]))
    evidence = (
        f"a step that only decodes takes {seconds(usual)}, one with a prompt chunk {seconds(slow)} "
        f"(90th percentile): {number(slow / usual)} times as long (threshold {number(SLOWER)})",
        f"{percent(share)} of all decoded tokens came from such steps; chunks had {number(tokens)} tokens",
    )
    advice = (
        f"smaller chunks (max_num_batched_tokens < {case.max_num_batched_tokens}) even out ITL, raise TTFT",
    )
    return Finding(
        "prefill-in-the-way",
        "advice",
        "Prompts of others hold up decoding: ITL has a long tail.",
        evidence,
        advice,
        {"ratio": slow / usual, "share": share},
    )
