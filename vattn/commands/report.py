"""`vattn report`: a recorded benchmark as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    file: Annotated[Path, typer.Argument(metavar="BENCH.json", help="From vattn bench or simulate --json.")],
    html: Annotated[Path, typer.Option("--html", help="Where the page goes.")],
    page_map: Annotated[
        list[Path] | None,
        typer.Option("--page-map", help="A recording of page maps, drawn as well; may be repeated."),
    ] = None,
) -> None:
    """Draw a benchmark: memory, requests and latencies over time, and every figure as a table.

    The page is one file that loads nothing, readable without JavaScript, in light and dark, and on paper.
    """
    from vattn.lab.bench.bench_record import load_bench
    from vattn.lab.bench.bench_report import check_drawable
    from vattn.lab.page_maps.recorder import Recording
    from vattn.lab.report.page import report_html

    check_drawable(html)
    bench = load_bench(file)
    recordings = [Recording.load(path) for path in page_map or ()]
    page = report_html(bench, recordings)
    html.write_text(page, encoding="utf-8")
    typer.echo(f"{html}: {len(page.encode()) / 1024:,.0f} KiB")
