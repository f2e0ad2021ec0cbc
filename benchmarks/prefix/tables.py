"""The tables of the README and docs/sharing.md, from the JSON: python benchmarks/prefix/tables.py FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def branches(report: dict[str, Any]) -> str:
    lines = ["| | page or block | KV of one output | n=8 | beam 4 |", "|---|---:|---:|---:|---:|"]
    for name, figures in report["branches"].items():
        kv = figures["kv"]
        unit = f"{kv['page_bytes'] >> 10} KiB" if "page_bytes" in kv else f"{kv['block_size']} tokens"
        system = name.removesuffix(f"-{unit.replace(' ', '')}").removesuffix("-2MiB")
        one = figures["n=1"]["in_use_bytes"] / 2**20
        ratios = [f"{figures[f'{kind} / n=1']:.2f}" for kind in ("n=8", "beam 4")]
        lines.append(f"| {system} | {unit} | {one:.1f} MiB | {' | '.join(ratios)} |")
    return "\n".join(lines)


def shared_prefix(report: dict[str, Any]) -> str:
    lines = [
        "| | computed tokens, off / on | TTFT p50, off / on | KV in use at most, off / on |",
        "|---|---:|---:|---:|",
    ]
    for name, figures in report["shared_prefix"].items():
        runs = figures["rounds"][0]
        tokens = " / ".join(f"{runs[k]['computed_tokens']:,}" for k in ("off", "on"))
        peak = " / ".join(f"{runs[k]['peak_in_use_bytes'] / 2**20:,.0f} MiB" for k in ("off", "on"))
        ratio = figures["ttft_p50_ratio"]
        spread = f" ({ratio['low']:.1f}-{ratio['high']:.1f})" if ratio["n"] > 1 else ""
        lines.append(f"| {name} | {tokens} | {ratio['median']:.1f} times{spread} | {peak} |")
    return "\n".join(lines)


if __name__ == "__main__":
    recorded = json.loads(Path(sys.argv[1]).read_text())
    print(shared_prefix(recorded), branches(recorded), sep="\n\n")
