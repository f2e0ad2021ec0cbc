"""`vattn bench experiment`: a question about KV memory, its answer as JSON, figure and three sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vattn.commands import options as opt


def experiment(
    name: Annotated[
        str, typer.Argument(help="Which; 'list' names them all with the questions they answer.")
    ] = "list",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="As for other benchmarks; default smollm2, with --smoke tiny."),
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    repeats: Annotated[int, typer.Option(help="Measured runs of what is timed; 3 conclude nothing.")] = 5,
    smoke: Annotated[bool, typer.Option("--smoke", help="Seconds only, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the figure here (PNG; needs matplotlib).")] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: read this record, draw and conclude again.")
    ] = None,
) -> None:
    """Answer one of the field's questions about KV memory on this machine."""
    from vattn.errors import ConfigError
    from vattn.lab.bench import bench_report as reports
    from vattn.lab.experiments import panels, record
    from vattn.lab.experiments.registry import EXPERIMENTS, experiment

    console = Console()
    if name == "list":
        for known in EXPERIMENTS:
            console.print(f"{known.name:12} {known.question}", highlight=False)
        return
    asked = experiment(name)
    reports.check_writable(json_file)
    panels.check_figure(figure)
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    if from_file is not None:
        if json_file is not None:
            raise ConfigError("--from runs nothing, so there is nothing to write with --json")
        made = record.read(from_file, asked)
        made["findings"] = list(asked.findings(made["parts"]))
    else:
        from vattn.lab.bench.tiny import TINY, load_for_bench
        from vattn.lab.experiments.setting import Setting

        with console.status("loading the model") as status:
            loaded = load_for_bench(model or (TINY if smoke else "smollm2"), device, dtype)
            setting = Setting(loaded, smoke, min(repeats, 2) if smoke else repeats, status.update)
            made = record.make(asked, setting)
    console.print(asked.question, style="bold", highlight=False)
    for sentence in made["findings"]:
        console.print(f"- {sentence}", highlight=False)
    if json_file is not None:
        reports.write(json_file, made)
        console.print(f"the record was written to {json_file}")
    if figure is not None:
        panels.save(asked, made["parts"], figure)
        console.print(f"the figure was written to {figure}")
