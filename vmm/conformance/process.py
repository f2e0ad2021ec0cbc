"""Starting a module of this package in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def python(
    module: str,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    stdout: int | IO[str] | None = None,
    stderr: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `python -m PACKAGE.module ARGUMENTS` with a pipe to its stdin and this process's import path.

    It computes on one thread: it may fork, and a fork has no other.
    """
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
        pass_fds=pass_fds,
        env={
            **(os.environ if environment is None else environment),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )
