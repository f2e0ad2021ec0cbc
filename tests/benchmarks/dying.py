"""A benchmark that dies on some of its items, as one does whose kernel reads unmapped memory."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from benchmarks.gpu import survive


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--how", choices=["loses its context", "is killed", "dies first"], required=True)
    options = parser.parse_args()
    state = survive.load(options.json) or {"done": [], "budgets": []}
    state["budgets"].append(options.budget_s)
    survive.store(options.json, state)
    if options.how == "dies first":
        os.kill(os.getpid(), signal.SIGKILL)
    for item in ("a", "b", "c", "d"):
        if item in state["done"] or item in state.get("fatal", {}):
            continue
        survive.note(options.json, item)
        if item in ("b", "d"):
            if options.how == "is killed":
                os.kill(os.getpid(), signal.SIGSEGV)
            return survive.lost(options.json, state, RuntimeError("illegal access\nand more"))
        state["done"].append(item)
        survive.store(options.json, state)
        survive.note(options.json, None)
    return 3


if __name__ == "__main__":
    survive.leave(main())
