"""What each driver call costs on this machine: `python -m vattn.vmm.latency [cpu|cuda] [page_bytes]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

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

    A host page is "new" when its memory must still be found and zeroed, "again" when it was mapped before.
    """
    samples: dict[str, list[int]] = {}

    def timed(label: str, call: Callable[..., Result], *args: object) -> Result:
        start = perf_counter_ns()
        result = call(*args)
        samples.setdefault(label, []).append(perf_counter_ns() - start)
        return result

    def map_all() -> None:
        for page, handle in zip(pages, handles, strict=True):
            timed("map", driver.map, page, page_bytes, handle)

    size = SPAN * page_bytes
    span = f"{SPAN} pages"
    for _ in range(rounds):
        va = timed(f"reserve {span}", driver.reserve, size)
        pages = range(va, va + size, page_bytes)
        handles = [timed("create", driver.create, page_bytes) for _ in pages]
        for label in ("new page", "page again"):
            map_all()
            for page in pages:
                timed(f"set_access, {label}", driver.set_access, page, page_bytes, Access.READ_WRITE)
            driver.synchronize()
            for page in pages:
                timed("unmap page", driver.unmap, page, page_bytes)
        map_all()
        timed(f"set_access, {span} again", driver.set_access, va, size, Access.READ_WRITE)
        driver.synchronize()
        timed(f"unmap {span}", driver.unmap, va, size)
        for handle in handles:
            timed("release", driver.release, handle)
        timed(f"free {span}", driver.free, va, size)
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
        print(f"{row.call:28}{row.median_us:10.1f}{row.p99_us:10.1f}   ({row.samples} samples)")
    driver.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
