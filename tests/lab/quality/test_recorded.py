"""The recorded figures: they meet the bar, and the documentation quotes them as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RUNS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/quality_cpu.json").read_text())["runs"]
NAMES = {"float32": "float32", "int8": "int8", "float8_e4m3fn": "e4m3"}


def test_int8_per_token_and_head_meets_the_bar() -> None:
    [run] = [r for r in RUNS if (r["kv_cache_dtype"], r["kv_scales"]) == ("int8", "token")]
    assert run["positions"] > 1000
    assert run["agreement"] >= 0.95 and abs(run["perplexity_change"]) <= 0.01


@pytest.mark.parametrize("run", RUNS[1:], ids=lambda run: f"{run['kv_cache_dtype']}-{run['kv_scales']}")
def test_the_documentation_quotes_them(run: dict[str, Any]) -> None:
    start = f"| {NAMES[run['kv_cache_dtype']]} | {run['kv_scales']} |"
    [line] = [x for x in (ROOT / "docs/quantisation.md").read_text().splitlines() if x.startswith(start)]
    change = f"{100 * run['perplexity_change']:+.2f} ± {100 * run['perplexity_change_error']:.2f} %"
    assert [cell.strip() for cell in line.split("|")[3:-1]] == [
        f"{100 * run['bytes_vs_bf16']:.1f} %",
        f"{run['kl_mean']:.4f}",
        f"{run['kl_p99']:.3f}",
        f"{run['kl_max']:.3f}",
        f"{100 * run['agreement']:.1f} %",
        f"{run['perplexity']:.2f}",
        change.replace("-", "−"),
        f"{sum(d is not None for d in run['divergence'])} of {len(run['divergence'])}",
    ]
