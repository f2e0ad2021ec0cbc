"""`vattn doctor`: whether KV memory is the bottleneck, and what else may be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    file: Annotated[
        Path, typer.Argument(help="A record of vattn bench or simulate --json, or an LLM.snapshot() as JSON.")
    ],
    run: Annotated[str | None, typer.Option(help="Only the run of this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say whether KV memory is the bottleneck and what else may be, with the evidence for every sentence.

    Marks: ! it costs now, + better is to be had, - good to know. The exit status is 0 whatever is found.
    """
    import json

    from vattn.errors import ConfigError
    from vattn.lab.bench.bench_record import load_json
    from vattn.lab.doctor.diagnose import diagnose_record
    from vattn.lab.doctor.text import lines

    found = diagnose_record(load_json(file), str(file))
    if run is not None:
        names = ", ".join(diagnosis.name for diagnosis in found)
        found = [diagnosis for diagnosis in found if diagnosis.name == run]
        if not found:
            raise ConfigError(f"--run {run}: {file} has {names or 'no runs that were repeated'}")
    if as_json:
        typer.echo(json.dumps([diagnosis.to_dict() for diagnosis in found], indent=2))
        return
    for at, diagnosis in enumerate(found):
        typer.echo(("\n" if at else "") + "\n".join(lines(diagnosis)))
    if not found:
        typer.echo(f"{file} holds nothing to diagnose: its runs served no requests")
