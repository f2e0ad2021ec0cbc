"""The kernel and attention tests on real hardware, against the float64 oracle.

    python -m benchmarks.gpu.hardware_tests --json FILE [--budget-s 80] [--dry]

The same tests that run in Triton's interpreter elsewhere run compiled here, all but the one that starts the
interpreter. Results are written as they come; when the time is spent, the session stops and what is left
counts as not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from benchmarks.gpu import survive
from benchmarks.gpu.timing import Deadline

FOLDERS = ["tests/kernels/numeric", "tests/attention"]
DRY = [
    "tests/kernels/numeric/test_store.py",
    "tests/attention/test_implementations.py",
    "-k",
    "(in_their_places and dtype0) or (oracle and 6-1-40-decode)",
]
INTERPRETED = (
    "tests/attention/test_implementations.py::test_the_triton_kernels_give_the_same_in_the_interpreter"
)
MOST_WORKERS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=80.0)
    parser.add_argument("--dry", action="store_true", help="a handful, wherever they can run")
    options = parser.parse_args()
    if importlib.util.find_spec("pytest") is None:
        survive.store(options.json, {"not_available": "pytest is not installed"})
        return 0

    import pytest

    from benchmarks.gpu.recorder import Recorder

    recorder = Recorder(options.json, Deadline(options.budget_s))
    arguments = ["-p", "no:cacheprovider", *(DRY if options.dry else FOLDERS)]
    if not options.dry:
        arguments += ["-m", "not smollm2", "--deselect", INTERPRETED]
        if importlib.util.find_spec("xdist") is not None:  # compiling takes a core per kernel
            arguments += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    code = int(pytest.main(arguments, plugins=[recorder]))
    recorder.record["exit_code"] = code
    recorder.store()
    return 0 if code == 0 and recorder.record["stopped"] is None else 1


if __name__ == "__main__":
    survive.leave(main())
