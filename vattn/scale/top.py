"""Shows the coordinator file as a table for people and as JSON for scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vattn.scale.coordinator import targets
from vattn.scale.ledger import CoordinatorError, EngineEntry, Ledger
from vattn.units import nbytes

BAR = 30
PARTS = (
    ("in_use", "in use", "█", "blue"),
    ("cached", "cached", "▓", "green"),
    ("parked", "parked", "▒", "yellow"),
    ("free", "free", "░", "bright_black"),
)
"""Field, name, mark and colour of each part of a bar; what is left of the budget is not created yet."""
SILENT_S = 5.0
"""An engine with work that has not written for so long is stuck, stopped, or in a very long step."""


IDLE_S = 2.0
"""An engine is idle if its last report, this many seconds old, said that no work is left."""


def bar(memory: Mapping[str, int], budget: int) -> Text:
    """A bar of memory by state, as a share of the budget. A state that holds memory gets at least one mark.

    ████▓▓▒░······
    """
    text = Text()
    whole = max(budget, memory.get("physical", 0), 1)
    for name, _, mark, colour in PARTS:
        nbytes = memory.get(name, 0)
        width = max(1, round(nbytes / whole * BAR)) if nbytes else 0
        text.append(mark * min(width, BAR - len(text)), style=colour)
    text.append("·" * (BAR - len(text)), style="bright_black")
    return text


def state(entry: EngineEntry, now: float) -> str:
    """The engine's state (running, idle or silent), from its last report and the report's age."""
    age = now - entry.seen
    if entry.error is not None:
        return "error"
    if not entry.status:
        return "starting" if age < SILENT_S else "idle"
    if not entry.status.get("running") and not entry.status.get("waiting") and age >= IDLE_S:
        return "idle"
    return "running" if age < SILENT_S else f"silent {age:.0f} s"


def view(ledger: Ledger, now: float | None = None) -> RenderableType:
    """Every engine in two lines, and the totals."""
    now = time.time() if now is None else now
    table = Table(box=None, padding=(0, 1), header_style="bold", expand=False)
    table.add_column("engine", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("memory", min_width=BAR, no_wrap=True)
    for name in ("in use / budget", "run / wait", "tok/s", "hits", "stall", "preempt", "swap"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in ledger.engines:
        status = entry.status
        rates, memory = status.get("rates", {}), status.get("memory", {})
        idle = state(entry, now) in ("idle", "starting")
        table.add_row(
            f"{entry.name} ({entry.pid})",
            state(entry, now),
            bar(memory, entry.budget),
            f"{nbytes(entry.in_use)} / {nbytes(entry.budget)}",
            f"{status.get('running', 0)} / {status.get('waiting', 0)}",
            "0" if idle else f"{rates.get('output_tokens_per_s', 0):,.0f}",
            _percent(rates.get("prefix_hit_rate")),
            _percent(rates.get("map_stall_share")),
            f"{status.get('preemptions', 0):,}",
            nbytes(status.get("swap_used_bytes", 0)),
        )
        if entry.limit is not None or entry.error:
            limit = "" if entry.limit is None else f"limit {nbytes(entry.limit)}"
            table.add_row("", Text(entry.error or limit, style="red" if entry.error else "dim"))
    return Group(table if ledger.engines else Text("no engine is running"), *_totals(ledger), _legend())


def _totals(ledger: Ledger) -> list[Text]:
    found = []
    for device, total in sorted(ledger.totals.items()):
        held = sum(entry.budget for entry in ledger.on(device))
        found.append(Text(f"{device}: {nbytes(held)} of {nbytes(total)} given out", style="dim"))
    return found


def _legend() -> Text:
    text = Text()
    for _, name, mark, colour in PARTS:
        text.append(f"{mark} ", style=colour)
        text.append(f"{name}  ", style="dim")
    text.append("· not created yet", style="dim")
    return text


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def as_json(ledger: Ledger) -> dict[str, Any]:
    """The file's content without engines that have ended, and what each engine should finally hold."""
    devices = {entry.device for entry in ledger.engines}
    record: dict[str, Any] = {"totals": ledger.totals, "engines": [asdict(entry) for entry in ledger.engines]}
    goals: dict[str, int] = {}
    for device in devices:
        try:
            goals.update(targets(ledger, device))
        except CoordinatorError:
            continue  # a total too small for all: nobody follows it
    for entry in record["engines"]:
        entry["target"] = goals.get(entry["id"], entry["budget"])
    return record
