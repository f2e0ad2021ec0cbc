"""The machine: versions, the GPU's state as found, who else uses it, and its two ceilings, measured.

    python -m benchmarks.gpu.machine --json FILE [--dry]

Nothing about the GPU is changed: no clocks, no power limit, no persistence mode.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceilings, survive
from vattn.lab.bench.environment import environment

ROOT = Path(__file__).parents[2]
SOURCES = ("vattn", "vmm", "kernels", "benchmarks/gpu")
PACKAGES = (
    "torch", "triton", "transformers", "cuda-bindings", "numpy", "pytest", "pytest-xdist", "flash-attn",
    "flashinfer-python", "nvidia-cudnn-cu13",
)  # fmt: skip
GPU_FIELDS = (
    "name", "driver_version", "vbios_version", "memory.total", "memory.used", "pstate", "clocks.sm",
    "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu",
    "ecc.mode.current", "mig.mode.current",
)  # fmt: skip


def output_of(*command: str) -> str | None:
    """What a command prints; None if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources_digest() -> str:
    """Hash of the code that is measured: tells what ran where there is no git."""
    digest = hashlib.sha256()
    files = [Path(at, name) for top in SOURCES for at, _, names in os.walk(ROOT / top) for name in names]
    for path in sorted(files):
        if path.suffix in (".py", ".sh"):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def gpu_state() -> dict[str, str] | str:
    """`nvidia-smi`'s answers by field, or that it gives none."""
    line = output_of("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    if line is None:
        return "not available"
    values = [value.strip() for value in line.splitlines()[0].split(",")]
    return dict(zip(GPU_FIELDS, values, strict=False))


def describe(device: torch.device) -> dict[str, Any]:
    """Everything but the ceilings."""
    record: dict[str, Any] = {
        "environment": {
            **environment(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "commit": os.environ.get("COMMIT") or environment()["commit"],
            "sources": sources_digest(),
        },
        "versions": {package: version(package) for package in PACKAGES},
        "cuda_of_torch": torch.version.cuda,
        "gpu": gpu_state(),
        "processes_on_gpu": output_of(
            "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
        ),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        record["device"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_free_bytes": free,
            "memory_total_bytes": total,
        }
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="describe the CPU, with tiny ceilings")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("torch sees no CUDA device; `run.sh --dry` runs everything on the CPU")
        return 1
    device = torch.device("cpu" if options.dry else "cuda")
    record = describe(device)
    survive.store(options.json, record)
    measured = ceilings.measure(device)
    record["ceilings"] = asdict(measured)
    if not options.dry:  # the clocks under load
        record["gpu_after_load"] = gpu_state()
    survive.store(options.json, record)
    print(f"{record['environment']['gpu'] or record['environment']['cpu']}, torch {torch.__version__}")
    print(f"copy {measured.copy_bytes_per_s / 1e9:,.2f} GB/s (read + written)")
    print(f"matmul {measured.matmul_flop_per_s / 1e12:,.3f} TFLOP/s (bfloat16, {measured.matmul_size}^3)")
    return 0


if __name__ == "__main__":
    survive.leave(main())
