"""`vattn replay`: check that an event log's decisions come out again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[Path, typer.Argument(help="An event log, as written by --trace or LLM(trace=…).")],
) -> None:
    """Run the scheduler again over a log, without a model, and compare every decision.

    Needs no GPU, whatever the log is from. Exit status 1 if a decision comes out otherwise.
    """
    from vattn.engine.replay import replay as replay_log

    done = replay_log(file)
    typer.echo(
        f"{done.requests:,} requests, {done.steps:,} steps, {done.preemptions:,} preemptions: "
        f"{done.decisions:,} decisions came out the same"
    )
    if done.divergence is not None:
        typer.echo(f"then they differ: {done.divergence}")
        raise typer.Exit(1)
