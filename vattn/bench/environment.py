"""Where and on what a measurement was made: recorded beside every figure."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Date, commit, machine, GPU and driver, versions and threads of this process."""
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gpu": None,
    }
    if torch.cuda.is_available():
        record["gpu"] = torch.cuda.get_device_name()
        record["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return record


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
