"""Host time of the engine before and after the executors, in turns; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from vattn.lab.bench.engine_bench import BATCHES, CASES, PROMPT, DecodingBatch, point, seconds_per_step
from vattn.lab.bench.environment import environment


class Before:
    """The engine of an older commit, in a process of its own."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("before.py"))],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: str, batch: int, steps: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(f"{case}|{batch}|{steps}", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def after(case: str, batch: int, steps: int) -> float:
    opened = DecodingBatch.open(CASES[case], batch, steps)
    try:
        return seconds_per_step(opened.step, steps)
    finally:
        opened.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a worktree of commit b45cdf5")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()

    commit = subprocess.run(
        ["git", "-C", str(args.before), "rev-parse", "--short", "HEAD"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    before = Before(args.before.resolve())
    seconds: dict[tuple[str, str, int], list[float]] = {}
    loads = [os.getloadavg()[0]]
    sides = [("before", before.measure), ("after", after)]
    for number in range(args.rounds):
        for batch in BATCHES:
            for case in CASES:
                for label, measure in sides if number % 2 else reversed(sides):
                    seconds.setdefault((label, case, batch), []).append(measure(case, batch, args.steps))
        loads.append(os.getloadavg()[0])
        print(f"round {number + 1} of {args.rounds}, load {loads[-1]:.1f}", flush=True)
    before.close()
    record = {
        "kind": "engine_host",
        "environment": environment(),
        "before_commit": commit,
        "load_per_round": [round(load, 2) for load in loads],
        "rounds": args.rounds,
        "steps": args.steps,
        "prompt_tokens": PROMPT,
        "runs": [
            {"name": case, "state": label, "points": [point(b, seconds[label, case, b]) for b in BATCHES]}
            for case in CASES
            for label, _ in sides
        ],
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
