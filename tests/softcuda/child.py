"""Runs pytest in a child process that loads the software CUDA driver."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.softcuda.library import environment

ROOT = Path(__file__).parents[2]


def pytest_over_softcuda(*arguments: str, timeout: float = 580, **settings: object) -> int:
    """Run tests in a child; the number that passed. Raises AssertionError if any did anything else.

    `arguments` are pytest's: files, which need not be named test_*, and options. `settings`: see
    `environment`.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"pytest over softcuda ended with {done.returncode}:\n{done.stdout[-6000:]}"
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) ([a-z]+)", done.stdout.splitlines()[-1])}
    assert not counts.get("skipped") and counts.get("passed"), done.stdout[-2000:]
    return counts["passed"]


def run_over_softcuda(
    command: Sequence[str], timeout: float = 120, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS...` over the library; whatever it ends with is returned."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
