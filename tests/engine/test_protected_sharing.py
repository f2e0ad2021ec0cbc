"""Shared pages are read-only at their aliases: a write to one kills the process, and no engine does it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

layouts = pytest.mark.parametrize("layout", ["interleaved", "per_layer"])


def child(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.engine.sharing_child", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@layouts
def test_every_way_of_sharing_and_a_write_through_an_alias_at_last(layout: str) -> None:
    done = child(layout, "write")
    shared = json.loads(done.stdout.splitlines()[0])
    for what, count in shared.items():
        assert count > 0, f"nothing to see of {what}: {shared}"
    assert shared["aliases"] >= 20
    assert done.returncode == -signal.SIGSEGV and "lived" not in done.stdout, done.stderr
