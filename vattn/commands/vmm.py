"""`vattn vmm`: is the virtual memory of this device what vattn needs, and what do its calls cost?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vattn.commands import options as opt
from vattn.units import nbytes

app = typer.Typer(help="Test and measure the virtual memory of a device.", no_args_is_help=True)
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
STYLES = {"pass": "green", "fail": "bold red", "not supported": "yellow"}


@app.command()
def test(device: opt.Device = "auto", json_file: Json = None) -> None:
    """Check the rules that vattn relies on, each in a process that may crash. Status 1 if any fails."""
    from vattn.lab.bench.environment import environment
    from vattn.vmm.conformance.specification import RULES
    from vattn.vmm.conformance.suite import Suite, spec_of

    console = Console()
    with console.status("opening the driver") as status, Suite(spec_of(_resolve(device))) as suite:
        results = []
        for result in suite.run_all():
            results.append(result)
            status.update(f"{len(results)} of {len(RULES)} rules checked, last {result.rule}")
        about = suite.about
    counts = {kind: sum(result.outcome == kind for result in results) for kind in STYLES}
    table = Table(
        title=f"{about['driver']} driver, granularity {nbytes(about['granularity'])}, "
        f"{nbytes(about['total'])} of memory"
    )
    table.add_column("rule", overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for result in results:
        table.add_row(result.rule, f"[{STYLES[result.outcome]}]{result.outcome}[/]", result.detail)
    console.print(table)
    console.print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    for rule, result in zip(RULES, results, strict=True):
        if result.outcome == "fail":
            console.print(f"[bold red]fail[/] {rule.statement} ({rule.source})")
    if json_file is not None:
        rules = [
            {**result._asdict(), "statement": rule.statement, "source": rule.source}
            for rule, result in zip(RULES, results, strict=True)
        ]
        _write(json_file, {"about": about, "rules": rules, "counts": counts, "environment": environment()})
        console.print(f"results written to {json_file}")
    if counts["fail"]:
        raise typer.Exit(1)


@app.command()
def bench(
    device: opt.Device = "auto",
    page: Annotated[
        list[str] | None, typer.Option("--page", help="Page size, e.g. 64KiB; may be given several times.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few rounds only, to see that it runs.")] = False,
    json_file: Json = None,
) -> None:
    """Time every driver call by page size and span, also while the device computes."""
    pages = [size for text in page or () if (size := opt.parse_bytes(text, "--page")) is not None]

    from vattn.errors import ConfigError
    from vattn.lab.bench.bench_report import FORMAT
    from vattn.lab.bench.environment import environment
    from vattn.vmm.bench.run import bench as run

    console = Console()
    with console.status("opening the driver") as status:
        try:
            report = run(_resolve(device), pages, smoke=smoke, progress=status.update)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    console.print(*_calls(report), _grants(report), _overlap(report))
    if json_file is not None:
        head = {"format": FORMAT, "kind": "vmm", "environment": environment()}
        _write(json_file, {**head, **report})
        console.print(f"figures written to {json_file}")


def _calls(report: dict[str, Any]) -> Iterator[Table]:
    """Median and 99th percentile of each call: a table per page size, a column per span."""
    rows = report["calls"]
    for page in dict.fromkeys(row["page_bytes"] for row in rows):
        mine = {(row["call"], row["span"]): row for row in rows if row["page_bytes"] == page}
        spans = list(dict.fromkeys(span for _, span in mine))
        table = Table(title=f"{report['driver']} driver, pages of {nbytes(page)}: microseconds, median / p99")
        table.add_column("call")
        for span in spans:
            table.add_column(f"{span} page{'s' * (span > 1)}", justify="right")
        table.add_column("samples", justify="right")
        for call in dict.fromkeys(call for call, _ in mine):
            found = [mine[call, span] for span in spans]
            cells = [f"{c['median_us']:,.1f} / {c['p99_us']:,.1f}" for c in found]
            table.add_row(call, *cells, ", ".join(str(c["n"]) for c in found))
        yield table


def _grants(report: dict[str, Any]) -> Table:
    table = Table(title="access to pages whose memory is there: microseconds, medians")
    for name in ("page", "pages", "one call each", "one call", "ratio"):
        table.add_column(name, justify="right")
    for row in report["grants"]:
        each, once = row["one_each_us"], row["one_call_us"]
        page = nbytes(row["page_bytes"])
        table.add_row(page, str(row["span"]), f"{each:,.1f}", f"{once:,.1f}", f"{each / once:.1f}")
    return table


def _overlap(report: dict[str, Any]) -> Table:
    table = Table(title="mapping while the device computes: microseconds")
    for name in ("page", "what", "median", "p99", "n"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in report["overlap"]:
        page = nbytes(row["page_bytes"])
        table.add_row(page, row["call"], f"{row['median_us']:,.1f}", f"{row['p99_us']:,.1f}", f"{row['n']:,}")
    return table


def _resolve(device: str) -> str:
    """The device; for "auto" the GPU where torch sees one."""
    if device.partition(":")[0] in ("cpu", "cuda"):
        return device
    if device != "auto":
        raise typer.BadParameter(f"{device!r} is none of auto, cpu, cuda, cuda:N", param_hint="--device")
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
