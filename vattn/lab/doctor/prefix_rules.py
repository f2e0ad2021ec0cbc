"""The rule about prompts that begin alike."""

from __future__ import annotations

from vattn.lab.doctor.case import Case
from vattn.lab.doctor.finding import Finding
from vattn.units import number, percent

HITS = 0.5
ENOUGH = 0.1
"""Of all prompt tokens: with less in common there is nothing to gain."""


def missed_prefixes(case: Case) -> Finding | None:
    """Prompts have much in common, and most of it is computed again."""
    prompts = sum(n.prompt * n.times for n in case.lengths)
    if not case.shareable or not prompts or case.shareable < ENOUGH * prompts:
        return None
    rate = case.prefix_hits / case.shareable
    if rate >= HITS:
        return None
    evidence = [
        f"about {number(case.shareable)} of {number(prompts)} prompt tokens repeat earlier ones; "
        f"{number(case.prefix_hits)} were found in the cache: {percent(rate)} (threshold {percent(HITS)})"
    ]
    advice = []
    if case.backend == "static":
        advice.append("static rows can't be shared: kv_backend='paged' or 'virtual'")
    elif not case.caching:
        advice.append("prefix caching is off: enable_prefix_caching=True")
    if case.prefix_unshared:
        evidence.append(
            f"{number(case.prefix_unshared)} tokens were not shared because of the size of a page or block"
        )
        advice.append("smaller pages or blocks (page_bytes=…, block_size=…), or kv_layout='interleaved'")
    if case.prefix_evictions:
        evidence.append(f"{number(case.prefix_evictions)} entries gave way to running requests")
        advice.append("more KV memory, or fewer requests at once, so that prefixes stay")
    if case.backend != "static" and case.caching and case.unit_tokens and not case.prefix_unshared:
        evidence.append(
            f"a page or block holds {number(case.unit_tokens)} tokens: shorter prefixes are not kept"
        )
    if not advice:
        advice.append("send requests that begin alike close to each other")
    sentence = "Prompts begin alike, but little of it is found in the prefix cache."
    return Finding("prefix-missed", "problem", sentence, tuple(evidence), tuple(advice), {"hit_share": rate})
