"""Share a device between engines, in one process or several, through one small file.

    engine A  ──join──┐                   ┌── every half second of stepping: "I hold …, may I hold …?"
    engine B  ──join──┤ coordinator file  │
    vattn limit  ─────┤ (ledger)          │   A is told to shrink, and does so before its next step;
    vattn top  ───────┘                   └── then B may grow into the free memory at its next beat

Rules:
- An engine may hold what it asked for, or its limit if one is set.
- If a device has a total, it is divided equally. No engine gets less than its floor, which holds its longest
  request, and no engine gets more than it may hold alone (`shares`).
- An engine that must shrink does so at once. An engine that may grow takes only what the others do not hold.
  So budgets exceed the total only after an engine arrives that needs its floor, or after the total is
  lowered, and only until the next step of the others.
- Engines whose process has ended are dropped. All processes must see each other's pids (one machine, one pid
  namespace).
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vattn.scale.file_lock import locked, replace_text
from vattn.scale.ledger import BrokenLedger, CoordinatorError, EngineEntry, Ledger, process_start
from vattn.scale.shares import divide

LOCK_TIMEOUT_S = 5.0

_numbers = itertools.count()


def default_path() -> Path:
    """`$XDG_RUNTIME_DIR/vattn/engines.json`, else the same under `/tmp/vattn-<uid>`: this user's own.

    Raises CoordinatorError if that folder belongs to another user.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "vattn" if runtime else Path(f"/tmp/vattn-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True, parents=bool(runtime))
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
        raise CoordinatorError(f"{folder} is not this user's own folder: name another file")
    return folder / "engines.json"


class Coordinator:
    """The file at `path`; its folder must exist. May be used from several threads and processes."""

    def __init__(self, path: str | Path, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.path = Path(path).absolute()
        self._timeout_s = lock_timeout_s
        if not self.path.parent.is_dir():
            raise CoordinatorError(f"coordinator={str(path)!r}: there is no folder {self.path.parent}")
        if self.path.is_dir():
            raise CoordinatorError(f"coordinator={str(path)!r} is a folder: name a file")

    def read(self) -> Ledger:
        """Read the file, without engines whose process has ended. Empty if there is no file.

        Raises CoordinatorError.
        """
        ledger = self._load()
        ledger.drop_dead()
        return ledger

    def _load(self) -> Ledger:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Ledger()
        except (OSError, UnicodeDecodeError) as error:
            raise BrokenLedger(f"{self.path} can't be read as a coordinator file: {error}") from error
        return Ledger.from_json(text, self.path) if text.strip() else Ledger()

    @contextmanager
    def change(self) -> Iterator[Ledger]:
        """Read, change and replace the file under its lock. An error inside the block leaves it unchanged.

        Raises CoordinatorError if the lock can't be had, or if the file is not a coordinator file.
        """
        with locked(self.path, self._timeout_s) as held:
            if not held:
                raise CoordinatorError(
                    f"{self.path} is locked by another process for {self._timeout_s:g} s: is one stopped?"
                )
            with self._replaced(rebuild=False) as ledger:
                yield ledger

    @contextmanager
    def try_change(self) -> Iterator[Ledger | None]:
        """Like `change`, but yields None at once if another process holds the lock. For engines.

        A damaged file is replaced by an empty one. Running engines then enter themselves again.
        """
        with locked(self.path, 0.0) as held:
            if not held:
                yield None
                return
            with self._replaced(rebuild=True) as ledger:
                yield ledger

    @contextmanager
    def _replaced(self, *, rebuild: bool) -> Iterator[Ledger]:
        try:
            ledger = self.read()
        except BrokenLedger:
            if not rebuild:
                raise
            ledger = Ledger()
        yield ledger
        replace_text(self.path, ledger.to_json())

    # ------------------------------------------------------------------ engines
    def join(self, *, name: str, device: str, asked: int, floor: int) -> EngineEntry:
        """Enter an engine of this process. The entry says what it may hold.

        Raises CoordinatorError if the device's total has no room for its floor.
        """
        with self.change() as ledger:
            names = {engine.name for engine in ledger.engines}
            unique = next(n for n in itertools.chain([name], _numbered(name)) if n not in names)
            pid = os.getpid()
            entry = EngineEntry(
                id=f"{pid}-{next(_numbers)}",
                pid=pid,
                started=process_start(pid) or 0,
                name=unique,
                device=device,
                asked=max(asked, floor),
                floor=floor,
                budget=0,
                seen=time.time(),
            )
            ledger.engines.append(entry)
            entry.budget = max(floor, may_hold(ledger, entry))
            return entry

    def leave(self, engine_id: str) -> None:
        """Remove an engine from the file, if it is there."""
        with self.change() as ledger:
            ledger.engines = [engine for engine in ledger.engines if engine.id != engine_id]

    # ------------------------------------------------------------------ people
    def limit(self, who: str, nbytes: int | None) -> EngineEntry:
        """Set an engine's limit, or lift it (None). The engine follows at its next step.

        `who` is its name, id or pid. Raises CoordinatorError if no engine or several match, or if the limit
        is below the engine's floor.
        """
        with self.change() as ledger:
            entry = find(ledger, who)
            if nbytes is not None and nbytes < entry.floor:
                raise CoordinatorError(
                    f"{entry.name} needs {entry.floor:,} bytes to hold its longest request; a limit of "
                    f"{nbytes:,} is too low: restart it with a smaller max_model_len"
                )
            entry.limit = nbytes
            return entry

    def set_total(self, device: str, nbytes: int | None) -> None:
        """Set the total that all engines of a device may hold together, or lift it (None).

        Raises CoordinatorError if it is less than the sum of their floors.
        """
        with self.change() as ledger:
            if nbytes is None:
                ledger.totals.pop(device, None)
                return
            ledger.totals[device] = nbytes
            targets(ledger, device)


def find(ledger: Ledger, who: str) -> EngineEntry:
    """The engine with this name, id or pid. Raises CoordinatorError unless there is exactly one."""
    found = [e for e in ledger.engines if who in (e.name, e.id)]
    found = found or [e for e in ledger.engines if who == str(e.pid)]
    if len(found) != 1:
        there = ", ".join(f"{e.name} ({e.id})" for e in found or ledger.engines) or "none"
        asked = "several engines are" if found else "no engine is"
        raise CoordinatorError(f"{asked} called {who!r}; running: {there}")
    return found[0]


def targets(ledger: Ledger, device: str) -> dict[str, int]:
    """By engine id, what each engine of a device should hold once all have followed their limits.

    Raises CoordinatorError if the device's total is less than the sum of their floors.
    """
    engines = ledger.on(device)
    claims = [engine.claim for engine in engines]
    total = ledger.totals.get(device)
    try:
        shares = [claim.ask for claim in claims] if total is None else divide(total, claims)
    except ValueError as error:
        raise CoordinatorError(f"{error} (device {device})") from error
    return {engine.id: share for engine, share in zip(engines, shares, strict=True)}


def may_hold(ledger: Ledger, entry: EngineEntry) -> int:
    """What an engine may hold now: its share, but no more than the others leave of the total."""
    target = targets(ledger, entry.device)[entry.id]
    total = ledger.totals.get(entry.device)
    if total is None or target <= entry.budget:
        return target
    others = sum(other.budget for other in ledger.on(entry.device) if other is not entry)
    return max(entry.budget, min(target, total - others))


def _numbered(name: str) -> Iterator[str]:
    return (f"{name}-{n}" for n in itertools.count(2))
