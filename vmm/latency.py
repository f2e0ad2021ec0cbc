"""What each driver call costs on this machine: `python -m vattn.vmm.latency [cpu|cuda] [page_bytes]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

import torch

from .driver import Access, Driver, open_driver

Result = TypeVar("Result")
SPAN = 64
"""Pages in the calls that cover many."""


class Latency(NamedTuple):
    """Microseconds of one kind of call."""

    call: str
    median_us: float
    p99_us: float
    samples: int


def measure(driver: Driver, page_bytes: int, rounds: int = 20) -> list[Latency]:
    """Time every call on `SPAN` pages, `rounds` times over; needs `SPAN` free pages.

    "write" is the first write to every 4 KiB of a page, which is where a CPU pays for memory: "new" memory
    must be found and zeroed, "mapped again" only entered in the page table.
    """
    samples: dict[str, list[int]] = {}

    def timed(label: str, call: Callable[..., Result], *args: object) -> Result:
        start = perf_counter_ns()
        result = call(*args)
        samples.setdefault(label, []).append(perf_counter_ns() - start)
        return result

    def write(va: int) -> None:
        driver.tensor(va, (max(page_bytes // 4096, 1),), (4096,), torch.uint8).fill_(1)
        driver.synchronize()

    size = SPAN * page_bytes
    for _ in range(rounds):
        va = timed(f"reserve {SPAN} pages", driver.reserve, size)
        pages = range(va, va + size, page_bytes)
        handles = [timed("create", driver.create, page_bytes) for _ in pages]
        for page, handle in zip(pages, handles, strict=True):
            timed("map", driver.map, page, page_bytes, handle)
        for page in pages:
            timed("set_access 1 page", driver.set_access, page, page_bytes, Access.READ_WRITE)
        for page in pages:
            timed("write, new", write, page)
        for page in pages:
            timed("unmap 1 page", driver.unmap, page, page_bytes)
        for page, handle in zip(pages, handles, strict=True):
            driver.map(page, page_bytes, handle)
        timed(f"set_access {SPAN} pages", driver.set_access, va, size, Access.READ_WRITE)
        for page in pages:
            timed("write, mapped again", write, page)
        timed(f"unmap {SPAN} pages", driver.unmap, va, size)
        for handle in handles:
            timed("release", driver.release, handle)
        timed(f"free {SPAN} pages", driver.free, va, size)
    return [
        Latency(call, median(times) / 1e3, sorted(times)[int(len(times) * 0.99)] / 1e3, len(times))
        for call, times in samples.items()
    ]


def main(device: str = "cpu", page_bytes: str = "") -> None:
    """Print a table for one device and page size (default: the driver's granularity)."""
    driver = open_driver(
        device, **({"granularity": int(page_bytes)} if device == "cpu" and page_bytes else {})
    )
    size = int(page_bytes or driver.granularity)
    print(f"{driver.name} driver, pages of {size:,} bytes, microseconds")
    for row in measure(driver, size):
        print(f"{row.call:22}{row.median_us:10.1f}{row.p99_us:10.1f}   ({row.samples} samples)")
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
