"""Rules about memory."""

from __future__ import annotations

from vattn.lab.doctor.case import Case
from vattn.lab.doctor.finding import Finding
from vattn.units import nbytes, number, percent

WAITS = 0.10
"""Of the time, requests waiting for memory: more is a bottleneck."""
PREEMPTED = 0.05
"""Preemptions per request that finished, or recomputed tokens of all computed."""
RESERVED = 0.30
IDLE = 0.50


def cache_full(case: Case) -> Finding | None:
    """Requests wait although seats and tokens are left."""
    waits = case.waits()
    if case.budget is None or waits.memory < WAITS:
        return None
    s = case.steps
    assert s is not None
    evidence = [
        f"for {percent(waits.memory)} of the time requests waited with seats and tokens to spare "
        f"(threshold {percent(WAITS)})",
        f"live requests needed up to {percent(case.full)} of the {nbytes(case.budget)} budget",
        f"{number(float(s.running.mean()))} of at most {case.max_num_seqs} requests ran on average, up to "
        f"{number(float(s.waiting.max()))} waited",
    ]
    if case.preemptions:
        evidence.append(f"{number(case.preemptions)} preemptions")
    numbers = {"memory_wait_share": waits.memory, "peak_in_use_share": case.full}
    sentence = "The KV cache is full while requests wait: memory limits how many run at once."
    return Finding("cache-full", "problem", sentence, tuple(evidence), _more_room(case), numbers)


def _more_room(case: Case) -> tuple[str, ...]:
    s, advice = case.steps, list[str]()
    if s is not None and (wasted := s.waste(s.tail_waste) + s.waste(s.external_waste)) >= RESERVED:
        advice.append(
            f"first stop wasting {percent(wasted)} of it: see the findings on reservation and sizes"
        )
    advice.append("give the cache more memory (kv_cache_memory_bytes=…), or more devices")
    heads, kv_heads = case.model.get("num_heads"), case.model.get("num_kv_heads")
    if heads and heads == kv_heads:
        advice.append(
            f"a model with grouped-query or latent attention: this one keeps K and V of all its {heads} heads"
        )
    elif heads and kv_heads:
        advice.append(f"a model with fewer KV heads (this has {kv_heads} for {heads}), or latent attention")
    if case.kv_dtype not in ("int8", "fp8_e4m3"):
        wide = "float32" in (case.kv_dtype, str(case.model.get("dtype")))
        advice.append(f"quantise the KV (kv_cache_dtype='int8'): about {3.5 if wide else 1.9}x the tokens")
    advice.append("shorter contexts or outputs (max_model_len=…, max_tokens), or fewer requests at once")
    return tuple(advice)


def preemption(case: Case) -> Finding | None:
    """Requests lose their memory again and again."""
    per_request = (
        case.preemptions / case.finished if case.finished else (1.0 if case.preemptions >= 1 else 0.0)
    )
    again = case.recomputed_tokens / case.computed_tokens if case.computed_tokens else 0.0
    if per_request < PREEMPTED and again < PREEMPTED:
        return None
    evidence = [
        f"{number(case.preemptions)} preemptions, {number(per_request)} per finished request "
        f"(threshold {percent(PREEMPTED)})"
    ]
    if case.recomputed_tokens:
        evidence.append(
            f"{number(case.recomputed_tokens)} tokens were computed again: {percent(again)} of all"
        )
    advice = ["lower max_num_seqs, so that those who run can finish, or give the cache more memory"]
    if case.swap_bytes:
        evidence.append(f"{nbytes(case.swap_bytes)} were swapped, in {number(case.swap_s)} s")
    elif case.preemption == "recompute":
        advice.append(
            "preemption='auto' copies the KV to host memory where that is cheaper than computing it again"
        )
    numbers = {"preemptions_per_request": per_request, "recomputed_share": again}
    return Finding(
        "preemption",
        "problem",
        "Requests are preempted often: work is thrown away or moved.",
        tuple(evidence),
        tuple(advice),
        numbers,
    )


def reserved(case: Case) -> Finding | None:
    """Static rows hold room for tokens that never come."""
    if case.steps is None:
        return None
    share = case.steps.waste(case.steps.external_waste)
    if share < RESERVED:
        return None
    mean = _mean_length(case)
    evidence = [
        f"{percent(share)} of the mapped memory was reserved and never used (threshold {percent(RESERVED)})"
    ]
    if mean and case.unit_tokens:
        evidence.append(
            f"a row holds {number(case.unit_tokens)} tokens, a request ended with {number(mean)} on average"
        )
    advice = (
        "kv_backend='paged' or 'virtual' give memory out as requests grow",
        "with static rows: max_model_len=… close to the longest request there is",
    )
    return Finding(
        "static-reservation",
        "problem" if case.waits().memory >= WAITS else "advice",
        "Most of the memory is reserved for tokens that never come.",
        tuple(evidence),
        advice,
        {"share": share},
    )


def _mean_length(case: Case) -> float | None:
    total = sum(n.times for n in case.lengths)
    return sum((n.prompt + n.output) * n.times for n in case.lengths) / total if total else None


def idle(case: Case) -> Finding | None:
    """Most of the cache is never needed."""
    if case.steps is None or not case.budget or case.full >= IDLE or case.waits().memory >= 0.01:
        return None
    if case.preemptions:
        return None
    peak = float(case.steps.in_use.max())
    evidence = (
        f"live requests never needed more than {nbytes(peak)} of {nbytes(case.budget)}: {percent(case.full)} "
        f"(threshold {percent(IDLE)})",
    )
    advice = (
        "the memory can serve something else, or keep more prefixes; a cache of twice the peak is ample",
    )
    return Finding(
        "cache-idle", "note", "The KV cache is mostly idle.", evidence, advice, {"peak_share": case.full}
    )


def swapping(case: Case) -> Finding | None:
    """Copies to and from host memory take time."""
    share = case.swap_s / case.busy_s if case.busy_s else 0.0
    if share < 0.05:
        return None
    evidence = (
        f"{number(case.swap_s)} s for {nbytes(case.swap_bytes)}: {percent(share)} of the time (threshold 5%)",
    )
    return Finding(
        "swap",
        "problem",
        "Swapping KV to host memory takes a good part of the time.",
        evidence,
        ("preemption='recompute' or 'auto'", "fewer requests at once (max_num_seqs=…)"),
        {"share": share},
    )
