"""Rules about time: what limits an engine whose memory does not."""

from __future__ import annotations

import numpy as np

from vattn.lab.doctor.case import Array, Case
from vattn.lab.doctor.finding import Finding
from vattn.units import number, percent, seconds

WAITS = 0.10
STALL = 0.05
BANDWIDTH = 0.40
FIXED = 0.60
LEAST_STEPS = 40


def seats(case: Case) -> Finding | None:
    """All seats are taken while memory is left."""
    waits = case.waits()
    if waits.seats < WAITS or case.max_num_seqs is None:
        return None
    evidence = (
        f"for {percent(waits.seats)} of the time requests waited while all {case.max_num_seqs} seats were "
        f"taken (threshold {percent(WAITS)})",
        f"live requests needed at most {percent(case.full)} of the KV budget",
    )
    advice = (f"raise max_num_seqs={case.max_num_seqs}; if steps then take too long, compute is the limit",)
    return Finding(
        "seats",
        "problem",
        "Requests wait for a seat: max_num_seqs is the limit, not memory.",
        evidence,
        advice,
        {"share": waits.seats},
    )


def token_budget(case: Case) -> Finding | None:
    """Steps are as large as they may be, and still requests wait."""
    waits = case.waits()
    s, most = case.steps, case.max_num_batched_tokens
    if s is None or most is None or waits.tokens < WAITS:
        return None
    evidence = [
        f"for {percent(waits.tokens)} of the time requests waited in steps of the full {most:,} tokens "
        f"(threshold {percent(WAITS)})",
        f"live requests needed at most {percent(case.full)} of the KV budget",
    ]
    if case.arrival_rate and case.throughput and case.throughput < 0.95 * case.arrival_rate:
        evidence.append(f"{number(case.arrival_rate)} requests/s came, {number(case.throughput)} were served")
    full, small = s.tokens >= 0.99 * most, s.tokens <= 0.25 * most
    advice = ["more or faster devices, or shorter prompts: prefix hits cost nothing"]
    if full.any() and small.any():
        a, b = float(np.median(s.duration_s[full])), float(np.median(s.duration_s[small]))
        evidence.append(f"a full step takes {seconds(a)}, one of at most {most // 4:,} tokens {seconds(b)}")
        if b > 0.5 * a:
            advice.insert(0, f"raise max_num_batched_tokens={most}: a full step costs little more")
    return Finding(
        "compute",
        "problem",
        "Compute is the limit: steps are full of tokens and requests wait for the next.",
        tuple(evidence),
        tuple(advice),
        {"share": waits.tokens},
    )


def _fit(columns: list[Array], y: Array) -> tuple[Array, Array] | None:
    """Least squares: coefficients and their standard errors; None where columns can't be told apart."""
    matrix = np.stack([np.ones_like(y), *columns], axis=1)
    scale = np.abs(matrix).max(axis=0)
    if (scale == 0).any() or np.linalg.cond(matrix / scale) > 1e4:
        return None
    scaled = matrix / scale
    found, *_ = np.linalg.lstsq(scaled, y, rcond=None)
    left = y - scaled @ found
    variance = float((left**2).sum()) / max(1, y.size - scaled.shape[1])
    errors = np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled)) * variance)
    return found / scale, errors / scale


def _decode_steps(case: Case) -> tuple[Array, Array, Array] | None:
    """Seconds, requests and KV tokens of steps that only decode, without the slowest percent."""
    s = case.steps
    if s is None or not case.token_bytes:
        return None
    chosen = (s.decodes > 0) & (s.tokens == s.decodes)
    if int(chosen.sum()) < LEAST_STEPS:
        return None
    chosen &= s.duration_s <= np.percentile(s.duration_s[chosen], 99)
    return s.duration_s[chosen], s.decodes[chosen], s.logical[chosen] / case.token_bytes


def kv_bandwidth(case: Case) -> Finding | None:
    """Decode steps take longer the more KV there is to read."""
    found = _decode_steps(case)
    if found is None:
        return None
    y, decodes, tokens = found
    same = float(decodes.min()) == float(decodes.max())
    fit = _fit([tokens] if same else [decodes, tokens], y)
    if fit is None:
        return None
    slope, error = float(fit[0][-1]), float(fit[1][-1])
    share = slope * float(tokens.mean()) / float(y.mean())
    if share < BANDWIDTH or slope < 3 * error:
        return None
    low, high = np.percentile(tokens, (10, 90))
    evidence = [
        f"over {y.size:,} decode steps every 1,000 tokens of KV add {seconds(slope * 1e3)} "
        f"(± {seconds(error * 2e3)})",
        f"that is {percent(min(1.0, share))} of a step at the mean of {number(float(tokens.mean()))} tokens "
        f"(threshold {percent(BANDWIDTH)}; 10% to 90%: {number(float(low))} to {number(float(high))})",
    ]
    if case.token_bytes:
        evidence.append(f"read at {number(case.token_bytes / slope / 1e9)} GB/s")
    advice = (
        "fewer bytes per token: kv_cache_dtype='int8', a model with fewer KV heads or latent attention",
        "shorter contexts, or a device with more memory bandwidth; more cache would not help",
    )
    return Finding(
        "kv-bandwidth",
        "problem",
        "TPOT grows with the context: decoding is limited by reading the KV.",
        tuple(evidence),
        advice,
        {"share": share, "seconds_per_token": slope},
    )


def fixed_cost(case: Case) -> Finding | None:
    """A decode step costs nearly the same, however many requests it serves."""
    found = _decode_steps(case)
    if found is None or case.max_num_seqs is None:
        return None
    y, decodes, tokens = found
    if float(decodes.min()) == float(decodes.max()) or float(decodes.mean()) > 0.5 * case.max_num_seqs:
        return None
    if case.waits().in_all >= WAITS:  # more can't run, for another reason
        return None
    fit = _fit([decodes, tokens], y) or _fit([decodes], y)
    if fit is None or fit[0][0] < 3 * fit[1][0]:
        return None
    fixed = float(fit[0][0])
    share = fixed / float(y.mean())
    if share < FIXED:
        return None
    evidence = (
        f"of {seconds(float(y.mean()))} a decode step, {seconds(fixed)} are there whatever runs: "
        f"{percent(min(1.0, share))} (threshold {percent(FIXED)})",
        f"{number(float(decodes.mean()))} of at most {case.max_num_seqs} requests decoded on average",
    )
    advice = (
        "more requests at once cost little: send more, or let several clients share the engine",
        "smaller weights: a smaller model, or quantised ones"
        if case.simulated or case.device.startswith("cpu")
        else "captured graphs and overlap hide launches: leave enforce_eager=None and overlap=None",
    )
    return Finding(
        "fixed-cost",
        "advice",
        "Steps are small: weights and launches are paid for few requests.",
        evidence,
        advice,
        {"share": share},
    )


def mapping(case: Case) -> Finding | None:
    """Steps wait for pages to be mapped."""
    share = case.map_stall_s / case.busy_s if case.busy_s else 0.0
    if share < STALL:
        return None
    evidence = (
        f"steps waited {seconds(case.map_stall_s)} for pages: {percent(share)} of their time "
        f"(threshold {percent(STALL)})",
    )
    advice = [
        "larger pages mean fewer calls (page_bytes=…), kv_layout='interleaved' one call where there were many"
    ]
    if not case.background_mapping:
        advice.insert(0, "background_mapping=True maps the next steps' pages while this one computes")
    return Finding(
        "map-stall", "problem", "Mapping pages holds up the steps.", evidence, tuple(advice), {"share": share}
    )


def barrier(case: Case) -> Finding | None:
    """Static batches: who is done waits for the slowest."""
    if not case.barrier or len(case.lengths) < 2:
        return None
    outputs = np.array([n.output for n in case.lengths])
    evidence = (
        f"outputs have {number(float(outputs.mean()))} tokens on average, {number(float(outputs.max()))} at "
        "most: seats of short ones stay empty until the longest is done",
        "batching=static: a batch starts when the one before is over",
    )
    return Finding(
        "static-batching", "problem", "Requests wait for whole batches.", evidence, ("batching=continuous",)
    )
