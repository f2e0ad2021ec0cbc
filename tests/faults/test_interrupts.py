"""Ctrl-C at any moment of `generate`: it raises KeyboardInterrupt, and the LLM is as good as before."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

ROUNDS = 25


@pytest.mark.parametrize("backend", ["virtual-overlap", "paged-16"])
def test_an_interrupted_llm_goes_on(backend: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.faults.interrupted", backend, str(ROUNDS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found = re.search(r"interrupted (\d+) of", child.stdout)
    assert found and int(found[1]) > ROUNDS // 4
