"""The Markdown summary of a run: what was measured on which machine, the bars, and the tables behind them.

    python -m benchmarks.gpu.summary --out DIR STAGE...

Reads gpu-STAGE.json of each stage in DIR and writes gpu-summary.md there. Only what is in those files is in
the summary: a stage that failed leaves its tables out, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import all_bars

DRY = "**dry run: no GPU figure.** Every stage ran on a CPU with tiny shapes, to prove that the scripts run."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, first column to the left."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)] + [""]


def bytes_text(n: float) -> str:
    return f"{n / 2**30:,.2f} GiB" if n >= 2**30 else f"{n / 2**20:,.1f} MiB"


def head(records: Mapping[str, Mapping[str, Any]], dry: bool) -> list[str]:
    machine = (records.get("machine") or {}).get("result") or {}
    environment = machine.get("environment", {})
    device, gpu = machine.get("device", {}), machine.get("gpu")
    driver = gpu.get("driver_version") if isinstance(gpu, dict) else None
    versions = {k: v for k, v in machine.get("versions", {}).items() if v}
    rows = [
        ("date", environment.get("date")),
        ("GPU", "none was used" if dry else device.get("name")),
        ("driver", "none was used" if dry else driver),
        ("commit", environment.get("commit")),
        ("sources", environment.get("sources")),
        ("host", f"{environment.get('cpu')}, {environment.get('cpus')} CPUs" if environment else None),
        ("packages", ", ".join(f"{k} {v}" for k, v in versions.items()) or None),
    ]
    ceilings = machine.get("ceilings")
    if ceilings and not dry:
        copy, matmul = ceilings["copy_bytes_per_s"] / 1e9, ceilings["matmul_flop_per_s"] / 1e12
        rows.append(("copy, read + written", f"{copy:,.0f} GB/s (measured)"))
        rows.append(("bfloat16 matrix product", f"{matmul:,.0f} TFLOP/s (measured)"))
    lines = ["# vattn on a GPU", ""]
    if dry:
        lines += [DRY, ""]
    return lines + table(("", ""), [(name, str(value or "unknown")) for name, value in rows])


def stages(records: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    rows = []
    for name in names:
        record = records.get(name)
        if record is None:
            rows.append((name, "**no record**", ""))
            continue
        status = record["status"] if record["status"] == "ok" else f"**{record['status']}**"
        rows.append((name, status, f"{record['seconds']:.0f} of {record['limit_s']:.0f} s"))
    return ["## Stages", "", *table(("stage", "status", "time"), rows)]


def bars(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [(bar.claim, f"**{bar.status}**", bar.found) for bar in all_bars(results)]
    return ["## Bars", "", *table(("bar", "", "found"), rows)]


def tests(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(
        f"{result[k]:,} {k.replace('_', ' ')}" for k in ("passed", "failed", "skipped", "not_run")
    )
    lines = ["## Kernel tests", "", f"{result['collected']:,} tests: {counts}.", ""]
    lines += [f"- FAILED `{name}`" for name in result["failures"]]
    return [*lines, ""] if result["failures"] else lines


def sanitizer(result: Mapping[str, Any]) -> list[str]:
    if "not_available" in result:
        text = f"Not available: {result['not_available']}. The engine run itself went through without it."
    else:
        errors = "an unknown number of" if result["errors"] is None else result["errors"]
        text = f"{errors} errors in {len(result.get('runs', []))} runs ({result['tool'].splitlines()[0]})."
    return ["## compute-sanitizer", "", text, ""]


def conformance(result: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(f"{n} {outcome}" for outcome, n in result["counts"].items())
    about, odd = result["about"], [r for r in result["rules"] if r["outcome"] != "pass"]
    lines = [
        "## Driver conformance",
        "",
        f"The {about['driver']} driver, granularity {about['granularity']:,}: ",
    ]
    lines[-1] += f"{counts}."
    rows = [(cell(r["statement"]), r["outcome"], cell(r["detail"])) for r in odd]
    return [*lines, "", *(table(("rule", "", "detail"), rows) if rows else [])]


def latencies(result: Mapping[str, Any]) -> list[str]:
    """Every list of rows in the figures of `vattn vmm bench`, with the columns it has."""
    lines = ["## Driver latencies", ""]
    for rows in result.values():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            columns = list(dict.fromkeys(key for row in rows for key in row))
            lines += table(
                [c.replace("_", " ") for c in columns], [[cell(r.get(c)) for c in columns] for r in rows]
            )
    return lines


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def kernels(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for kind, unit, key, share, ceiling in (
        ("decode", "GB/s", "gb_per_s", "share_of_copy", "copy bandwidth"),
        ("prefill", "TFLOP/s", "tflop_per_s", "share_of_matmul", "the matrix product"),
    ):
        problems = [p for p in result["problems"] if p["kind"] == kind]
        timed = {c for p in problems for c, v in p["contestants"].items() if "median_us" in v}
        order = list(dict.fromkeys(c for p in problems for c in p["contestants"] if c in timed))
        if not problems or not order:
            continue
        lines += [f"## Kernels: {kind}", "", f"{unit} (share of {ceiling}), median over rounds.", ""]
        rows = []
        for p in sorted(problems, key=lambda p: (p["heads"]["model"], p["batch"], p["context"])):
            cells = [f"{p['heads']['model']} {p['batch']} x {p['context']:,}"]
            for contestant in order:
                v = p["contestants"].get(contestant, {})
                if "median_us" in v:
                    cells.append(f"{v[key]:,.4g} ({v[share]:.0%})")
                else:
                    cells.append("FAILED" if "failed" in v else "-")
            rows.append(cells)
        names = [c.replace(" @ ", "<br>") for c in order]
        lines += table(("model, batch x tokens", *names), rows)
    failed = {
        (c, v["failed"]): p["name"]
        for p in result["problems"] for c, v in p["contestants"].items() if "failed" in v
    }  # fmt: skip
    lines += [f"- FAILED {c}, last at {at}: {why}" for (c, why), at in failed.items()]
    skipped = {
        (c, v["skipped"].partition(":")[0])
        for p in result["problems"] for c, v in p["contestants"].items() if "skipped" in v
    }  # fmt: skip
    lines += [f"- `-` for {c}: {why}" for c, why in sorted(skipped)]
    reasons: dict[str, list[str]] = {}
    for p in result["not_run"]:
        reasons.setdefault(p["reason"].partition(":")[0], []).append(p["name"])
    lines += [f"- not run ({why}): {', '.join(names)}" for why, names in reasons.items()]
    return [*lines, ""]


def engine(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for model in dict.fromkeys(r["model"] for r in result["runs"]):
        lines += [f"## Engine: {model}", ""]
        workload = result["workloads"].get(model)
        if workload:
            lines += [
                f"{bytes_text(workload['kv_cache_memory_bytes'])} of KV memory each; a step has at most "
                f"{workload['max_num_seqs']} requests and {workload['max_num_batched_tokens']:,} tokens.",
                "",
            ]
        mine = [r for r in result["runs"] if r["model"] == model]
        works = list(dict.fromkeys(r["work"] for r in mine))
        rows = [
            (
                f"{r['work']}, round {r['round']}",
                r["backend"],
                f"{r['output_tokens_per_s']:,.0f}",
                f"{r['ttft_ms']['p50']:,.0f} / {r['ttft_ms']['p99']:,.0f}",
                f"{r['tpot_ms']['p50']:.2f} / {r['tpot_ms']['p99']:.2f}",
                f"{r['map_stall_share']:.3%}",
                f"{sum(r['driver_calls'].values()):,}",
                bytes_text(r["peak_held_bytes"]),
                f"{r['kv_utilization']:.1%}",
                f"{r['preemptions']}",
                f"{r['tokens_equal_share']:.0%}",
            )
            for r in sorted(mine, key=lambda r: (works.index(r["work"]), r["round"]))
        ]
        lines += table(
            (
                "work", "backend", "output tokens/s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "map stall",
                "driver calls", "peak KV held", "KV utilization", "preemptions", "requests with equal tokens",
            ),
            rows,
        )  # fmt: skip
        unbalanced = {
            (r["backend"], r["books"]) for r in result["runs"] if r["books"] not in ("balance", None)
        }
        lines += [f"- the books of {backend} do not balance: {why}" for backend, why in sorted(unbalanced)]
    for entry in result["failed"]:
        lines.append(f"- FAILED {entry['model']}, {entry['backend']}: {entry['reason']}")
    for entry in result["not_run"]:
        lines.append(f"- not run: {entry['model']}, {entry['backend']}: {entry['reason']}")
    return [*lines, ""]


LIMITS = """## What this does not show

- One GPU of one kind, one run of the script; ratios between engines are taken within rounds, figures are not
  averaged over days or machines.
- Models have random weights of real shapes: speed is that of trained ones, text is not. In bfloat16 backends
  with other kernels or another batch composition round differently, so tokens may part; that they are equal
  in float32 is what the tests show.
- All requests of a workload arrive at once, so its time to first token is mostly queueing.
- Kernel rates count each byte and operation once, as the ceilings do; both come from the same process.
"""


def render(records: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """The whole page."""
    dry = any(record["dry"] for record in records.values())
    results = {name: record["result"] for name, record in records.items() if record["result"]}
    lines = head(records, dry) + bars({} if dry else results) + stages(records, names)
    if dry:
        lines += ["The tables below hold CPU figures of tiny shapes. They say nothing about any GPU.", ""]
    parts: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "conformance": conformance,
        "tests": tests,
        "sanitizer": sanitizer,
        "vmm": latencies,
        "kernels": kernels,
        "engine": engine,
    }
    for name, part in parts.items():
        if name not in results:
            continue
        try:
            lines += part(results[name])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Half a result, from a stage that was ended: the rest of the page still counts.
            lines += [f"## {name}", "", f"incomplete: {type(error).__name__}: {error}", ""]
    return "\n".join([*lines, LIMITS])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("stages", nargs="+")
    options = parser.parse_args()
    files = {name: options.out / f"gpu-{name}.json" for name in options.stages}
    records = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    text = render(records, options.stages)
    (options.out / "gpu-summary.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
