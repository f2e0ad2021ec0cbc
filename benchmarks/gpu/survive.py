"""Run a benchmark in a process of its own, and go on in a new one if it dies.

    python -m benchmarks.gpu.survive MODULE --json FILE --budget-s SECONDS [arguments]

A kernel that touches unmapped memory takes the process's whole CUDA context with it. The benchmark `note`s
what it is about to run. When it ends with LOST or by a signal, what it was running is added to `fatal` in its
JSON file, which the next process leaves out, and the benchmark resumes with the time that is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

LOST = 75
"""Exit status of a benchmark whose CUDA context is gone."""

LEAST_SECONDS = 10
"""Less time than this is not worth a new process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    options, arguments = parser.parse_known_args()
    end = time.monotonic() + options.budget_s
    options.json.unlink(missing_ok=True)
    note(options.json, None)
    while True:
        left = end - time.monotonic()
        command = [sys.executable, "-m", options.module, "--json", str(options.json)]
        code = subprocess.call([*command, "--budget-s", f"{left:.0f}", *arguments])
        if code >= 0 and code != LOST:
            return code
        state = load(options.json)
        culprit = noted(options.json)
        if culprit is None or culprit in state.get("fatal", {}):
            print(f"the process ended with {code}, and it is not known what to leave out")
            return 1
        reason = state.pop("error", None) or f"the process ended with {code}"
        state.setdefault("fatal", {})[culprit] = reason
        store(options.json, state)
        note(options.json, None)
        print(f"{culprit} took the process with it: {reason}")
        if end - time.monotonic() < LEAST_SECONDS:
            print("no time is left to go on without it")
            return 1


def load(path: Path) -> dict[str, Any]:
    """What was recorded so far; empty if nothing was."""
    state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return state


def store(path: Path, state: dict[str, Any]) -> None:
    """Write all of it; a reader, or a process that is killed, never sees half a file."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(state, indent=1) + "\n")
    draft.replace(path)


def note(path: Path, name: str | None) -> None:
    """Say what runs from now on; None: nothing that could be left out. A small file beside the results."""
    path.with_suffix(".running").write_text(name or "")


def noted(path: Path) -> str | None:
    """What the last process noted last."""
    beside = path.with_suffix(".running")
    return (beside.read_text() or None) if beside.exists() else None


def lost(path: Path, state: dict[str, Any], error: BaseException) -> int:
    """Record the error after which CUDA answers no more; the status to leave with, by `leave`."""
    state["error"] = first_line(error)
    store(path, state)
    return LOST


def leave(code: int) -> NoReturn:
    """End the process; without finalisers if they would call a CUDA that answers no more."""
    sys.stdout.flush()
    if code == LOST:
        os._exit(code)
    sys.exit(code)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def context_lost() -> bool:
    """Whether CUDA answers no more in this process."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
