"""`vattn top` and `vattn limit`: watch the engines that share a device, and say what they may hold."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vattn.commands import options as opt

File = Annotated[
    Path | None,
    typer.Option("--file", help="The engines' file (LLM(coordinator=…)); default: this user's own."),
]


def top(
    file: File = None,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as JSON and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between views.")] = 1.0,
) -> None:
    """Show engines live: memory by state, requests, tokens per second, hits, stalls, preemptions, swap."""
    from rich.live import Live

    from vattn.scale.coordinator import Coordinator, default_path
    from vattn.scale.top import as_json as to_json
    from vattn.scale.top import view

    coordinator = Coordinator(file or default_path())
    if as_json:
        typer.echo(json.dumps(to_json(coordinator.read()), indent=1))
        return
    console = Console()
    if once:
        if not console.is_terminal:
            console = Console(width=160)
        console.print(view(coordinator.read()))
        return
    with Live(view(coordinator.read()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(view(coordinator.read()), refresh=True)


def limit(
    who: Annotated[str | None, typer.Argument(help="Name or pid of an engine, as `vattn top` shows.")] = None,
    size: Annotated[
        str | None, typer.Argument(help="What it may hold, e.g. 512MiB; 'none': no limit.")
    ] = None,
    total: Annotated[
        str | None, typer.Option(help="What all engines of the device may hold together, or 'none'.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of --total; default: the one there are engines on.")
    ] = None,
    file: File = None,
) -> None:
    """Limit the KV memory of an engine, or of all engines of a device; they follow while they run."""
    from vattn.scale.coordinator import Coordinator, default_path, find
    from vattn.scale.ledger import CoordinatorError

    if (who is None) != (size is None) or (who is None and total is None):
        raise typer.BadParameter("write NAME BYTES, --total BYTES, or both")
    coordinator = Coordinator(file or default_path())
    if total is not None:
        nbytes = _size(total, "--total")
        ledger = coordinator.read()
        if device is None:
            devices = {find(ledger, who).device} if who is not None else {e.device for e in ledger.engines}
            if len(devices) != 1:
                raise CoordinatorError(
                    f"--total is of one device: name it (--device); engines on {sorted(devices) or 'none'}"
                )
            [device] = devices
        coordinator.set_total(device, nbytes)
        typer.echo(f"{device}: " + ("no total" if nbytes is None else f"{nbytes:,} bytes for all engines"))
    if who is not None and size is not None:
        nbytes = _size(size, "BYTES")
        entry = coordinator.limit(who, nbytes)
        typer.echo(f"{entry.name}: " + ("no limit" if nbytes is None else f"{nbytes:,} bytes at most"))


def _size(text: str, option: str) -> int | None:
    return None if text == "none" else opt.parse_bytes(text, option)
