"""Where and on what a measurement was made: recorded beside every figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Date, command, commit, machine and its load, GPU and driver, versions and threads of this process.

    `commit` is that of vattn's own repository, None where it was installed from a package; `modified`: its
    files differ from the commit. `threads` is None where torch took no part.
    """
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(
            ["vattn" if sys.argv[0].endswith(("vattn", "cli.py")) else sys.argv[0], *sys.argv[1:]]
        ),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": None,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("vattn", "transformers", "triton", "torch")},
        "gpu": None,
    }
    torch = sys.modules.get("torch")
    if torch is None:  # nothing was computed with it: a simulation
        return record
    record |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return record


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    """Asked of the repository this file is tracked in, which need not be the one the user stands in."""
    here = Path(__file__).resolve()
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _output("git", "-C", str(here.parent), *arguments)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
