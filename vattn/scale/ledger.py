"""The coordinator file. It lists the engines, what they hold and what they may hold.

    {"format": "vattn-coordinator-1",
     "totals": {"cpu": 1073741824},                          bytes all engines of a device may hold together
     "engines": [{"id": "4711-0", "pid": 4711, "name": "llama", "device": "cpu",
                  "asked": …, "floor": …, "limit": null, "budget": …, "in_use": …,  "status": {…}}]}

The file is small and always replaced as a whole. Entries of processes that have ended are dropped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vattn.errors import VattnError
from vattn.scale.shares import Claim

FORMAT = "vattn-coordinator-1"


class CoordinatorError(VattnError):
    """The coordinator file can't be used, or does not allow what was asked."""


class BrokenLedger(CoordinatorError):
    """The file is not JSON of this format."""


@dataclass
class EngineEntry:
    """One engine. Sizes in bytes, times in seconds since 1970."""

    id: str
    pid: int
    started: int
    """Start of the process, in ticks since boot. It tells apart processes that got the same pid."""
    name: str
    device: str
    asked: int
    """The budget it was started with."""
    floor: int
    """What it needs to hold its longest request."""
    budget: int
    """What it may hold now."""
    in_use: int = 0
    limit: int | None = None
    """Limit set from outside; None if it may hold what it asked for."""
    seen: float = 0.0
    """When the engine last wrote its entry."""
    error: str | None = None
    """Why the engine could not follow its limit."""
    status: dict[str, Any] = field(default_factory=dict)
    """For people to look at: requests, memory, rates."""

    @property
    def claim(self) -> Claim:
        ask = self.asked if self.limit is None else self.limit
        return Claim(self.floor, max(self.floor, ask))

    @property
    def alive(self) -> bool:
        """True if its process still runs."""
        return process_start(self.pid) == self.started


@dataclass
class Ledger:
    """The content of the file."""

    totals: dict[str, int] = field(default_factory=dict)
    engines: list[EngineEntry] = field(default_factory=list)

    def drop_dead(self) -> None:
        """Remove engines whose process has ended."""
        self.engines = [engine for engine in self.engines if engine.alive]

    def on(self, device: str) -> list[EngineEntry]:
        return [engine for engine in self.engines if engine.device == device]

    def to_json(self) -> str:
        record = {"format": FORMAT, "totals": self.totals, "engines": [asdict(e) for e in self.engines]}
        return json.dumps(record, indent=1)

    @staticmethod
    def from_json(text: str, path: Path) -> Ledger:
        """Raises BrokenLedger for anything that `to_json` would not write, CoordinatorError for the file of
        another version."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise BrokenLedger(f"{path} is not a coordinator file: {error}") from error
        found = record.get("format") if isinstance(record, dict) else None
        if found != FORMAT:
            if isinstance(found, str) and found.startswith("vattn-coordinator-"):
                raise CoordinatorError(f"{path} is of format {found!r}; this version reads {FORMAT!r}")
            raise BrokenLedger(f"{path} is not a coordinator file: its format is {found!r}, not {FORMAT!r}")
        try:
            totals = {str(device): _whole(total) for device, total in record["totals"].items()}
            return Ledger(totals, [_entry(engine) for engine in record["engines"]])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BrokenLedger(f"{path} is a damaged coordinator file: {error!r}") from error


def _entry(record: Any) -> EngineEntry:
    entry = EngineEntry(**{name: record[name] for name in _FIELDS})
    for number in (entry.pid, entry.started, entry.asked, entry.floor, entry.budget, entry.in_use):
        _whole(number)
    if entry.limit is not None:
        _whole(entry.limit)
    for text in (entry.id, entry.name, entry.device):
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not text")
    if not isinstance(entry.seen, (int, float)) or not isinstance(entry.status, dict):
        raise TypeError("an engine's status is odd")
    return entry


_FIELDS = tuple(f.name for f in fields(EngineEntry))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot; None if it does not run (or is a zombie). 0 without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        if Path("/proc/self/stat").exists():
            return None
        return _running(pid)
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])


def _running(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
