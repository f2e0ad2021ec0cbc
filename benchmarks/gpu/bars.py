"""The bars: what the figures must show for the claims of this project to hold, computed from the results.

A bar is met, not met, or not measured. Nothing is rounded in its favour, and nothing that was not run counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Results = Mapping[str, Mapping[str, Any]]
"""`result` of each stage, by stage; a stage without one is missing or empty."""

MODELS = ("Llama-3-8B", "Qwen3-1.7B")
LAYOUTS = ("interleaved", "per_layer")
"""The default on CUDA first: an engine's bar is judged on it, the other is shown beside it."""
PAGED = ("paged 16", "paged 64")
DECODE_SHARE, PREFILL_RATIO, STALL_SHARE = 0.85, 0.9, 0.01
DECODE = f"decode {MODELS[0]} 64 x 8192"


@dataclass(frozen=True)
class Bar:
    """One claim, what was found, and where."""

    claim: str
    status: Literal["met", "not met", "not measured"]
    found: str


def _judged(claim: str, met: bool, found: str) -> Bar:
    return Bar(claim, "met" if met else "not met", found)


def all_bars(results: Results) -> list[Bar]:
    """Every bar, in the order of the claims."""
    kernels, engine = results.get("kernels") or {}, results.get("engine") or {}
    bars = [decode_bar(kernels, layout) for layout in LAYOUTS]
    bars += [prefill_bar(kernels, layout) for layout in LAYOUTS]
    for model in MODELS:
        bars += engine_bars(engine, model)
    return [*bars, stall_bar(engine)]


def decode_bar(kernels: Mapping[str, Any], layout: str) -> Bar:
    claim = f"contiguous decode, {layout}: at least {DECODE_SHARE:.0%} of copy bandwidth at batch 64 x 8K"
    timed = _timed(kernels, DECODE).get(f"triton @ virtual {layout}")
    if timed is None:
        return Bar(claim, "not measured", _why_not(kernels, DECODE, f"triton @ virtual {layout}"))
    share = timed["share_of_copy"]
    return _judged(claim, share >= DECODE_SHARE, f"{share:.1%}, {timed['gb_per_s']:,.0f} GB/s")


def prefill_bar(kernels: Mapping[str, Any], layout: str) -> Bar:
    claim = f"contiguous prefill, {layout}: at least {PREFILL_RATIO} x SDPA's flash kernel at every length"
    ratios: dict[int, float] = {}
    for problem in kernels.get("problems", []):
        if problem["kind"] == "prefill" and problem["heads"]["model"] == MODELS[0]:
            timed = _timed(kernels, problem["name"])
            ours, flash = timed.get(f"triton @ virtual {layout}"), timed.get("sdpa flash @ static per_layer")
            if ours and flash:
                ratios[problem["context"]] = flash["median_us"] / ours["median_us"]
    if not ratios:
        return Bar(claim, "not measured", "no length has both")
    worst = min(ratios, key=lambda context: ratios[context])
    lengths = f"{len(ratios)} lengths, {min(ratios):,} to {max(ratios):,}"
    found = f"{ratios[worst]:.2f} at {worst:,} tokens, the worst of {lengths}"
    return _judged(claim, ratios[worst] >= PREFILL_RATIO, found)


def engine_bars(engine: Mapping[str, Any], model: str) -> list[Bar]:
    """Throughput and time per token of `virtual` against the better `paged`, within rounds."""
    runs = [r for r in engine.get("runs", []) if r["model"] == model]
    loads = list(dict.fromkeys(r["work"] for r in runs if r["work"] != "saturation")) or ["low load"]
    throughput = against_paged(
        f"{model}: virtual's throughput at saturation at least that of paged",
        [r for r in runs if r["work"] == "saturation"],
        lambda run: float(run["output_tokens_per_s"]),
    )
    return [throughput] + [
        against_paged(
            f"{model}: virtual's time per token ({work}) at most that of paged",
            [r for r in runs if r["work"] == work],
            lambda run: 1 / run["tpot_ms"]["p50"],
        )
        for work in ["saturation", *loads]
    ]


def against_paged(
    claim: str, runs: Iterable[Mapping[str, Any]], speed: Callable[[Mapping[str, Any]], float]
) -> Bar:
    """Speeds of virtual over those of paged, each ratio within a round; judged by the median."""
    rounds: dict[int, dict[str, float]] = {}
    for run in runs:
        rounds.setdefault(run["round"], {})[run["backend"]] = speed(run)
    texts: list[str] = []
    judged: list[float] = []
    for layout in LAYOUTS:
        ours = f"virtual {layout}"
        for paged in PAGED:
            ratios = [r[ours] / r[paged] for r in rounds.values() if ours in r and paged in r]
            if not ratios:
                continue
            middle = statistics.median(ratios)
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else "one round"
            texts.append(f"{layout} {middle:.3f} x {paged} ({spread})")
            if layout == LAYOUTS[0]:
                judged.append(middle)
    if not judged:
        return Bar(claim, "not measured", "; ".join(["no round has both", *texts]))
    return _judged(claim, min(judged) >= 1.0, "; ".join(texts))


def stall_bar(engine: Mapping[str, Any]) -> Bar:
    claim = f"map stall: less than {STALL_SHARE:.0%} of step time in every run"
    shares = {
        f"{r['model']}, {r['backend']}, {r['work']}, round {r['round']}": r["map_stall_share"]
        for r in engine.get("runs", [])
        if r["backend"].startswith("virtual") and r["model"] in MODELS
    }
    if not shares:
        return Bar(claim, "not measured", "no run on virtual memory")
    worst = max(shares, key=lambda name: shares[name])
    return _judged(
        claim, shares[worst] < STALL_SHARE, f"{shares[worst]:.3%} in the worst of {len(shares)} ({worst})"
    )


def _timed(kernels: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Contestants of a problem that were right and were timed."""
    problems = (p["contestants"] for p in kernels.get("problems", []) if p["name"] == name)
    return {k: v for contestants in problems for k, v in contestants.items() if "median_us" in v}


def _why_not(kernels: Mapping[str, Any], name: str, contestant: str) -> str:
    for problem in kernels.get("problems", []):
        if problem["name"] == name:
            result = problem["contestants"].get(contestant, {})
            return str(result.get("failed") or result.get("skipped") or "not run")
    for problem in kernels.get("not_run", []):
        if problem["name"] == name:
            return str(problem["reason"])
    return "not run"
