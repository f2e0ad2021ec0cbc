"""Mapping in the background: latency of calls while the device computes, and of the work meanwhile.

    this thread    map  set_access  unmap │ map  set_access  unmap │ ...   pages that the work does not touch
    another one    matmul ─────────── matmul ─────────── matmul ─────      CPU: a matmul; CUDA: many

Both are measured alone first. Calls are not ordered with work on a stream. If a driver waits for the device
itself, as `unmap` may, that shows as latency here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns

from ..driver import Access, Driver
from .timing import Latency, Stopwatch

SPAN = 8
"""Pages per grown range: about what a prompt chunk needs at once."""
Work = Callable[[], int]
"""Does one unit of computation and returns its nanoseconds."""


def overlap_latencies(driver: Driver, page_bytes: int, rounds: int) -> list[Latency]:
    """Latencies of calls and of work, alone and together. Needs `SPAN` free pages and gives them back."""
    watch = Stopwatch()
    work = cpu_work() if driver.device.type == "cpu" else cuda_work(driver)
    size = SPAN * page_bytes
    va = driver.reserve(size)
    handles = [driver.create(page_bytes) for _ in range(SPAN)]

    def cycle(when: str) -> None:
        for index, handle in enumerate(handles):
            watch.time(f"map, {when}", driver.map, va + index * page_bytes, page_bytes, handle)
        watch.time(f"set_access, {SPAN} pages, {when}", driver.set_access, va, size, Access.READ_WRITE)
        watch.time(f"unmap, {SPAN} pages, {when}", driver.unmap, va, size)

    work()  # warm
    cycle("device idle")
    watch.samples.clear()
    for _ in range(rounds):
        cycle("device idle")
    for _ in range(rounds):
        watch.add("unit of work, alone", work())

    done = threading.Event()
    units: list[int] = []
    errors: list[BaseException] = []

    def compute() -> None:
        try:
            while not done.is_set() or len(units) < 2:
                units.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compute, name="vattn-bench-work")
    thread.start()
    try:
        cycles = 0
        while thread.is_alive() and (cycles < rounds or len(units) < rounds):
            cycle("device busy")
            cycles += 1
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]
    for nanoseconds in units:
        watch.add("unit of work, while mapping", nanoseconds)
    for handle in handles:
        driver.release(handle)
    driver.free(va, size)
    return watch.latencies(page_bytes, SPAN)


def cpu_work() -> Work:
    """Work for a CPU: a matmul of half a megabyte, which releases the GIL."""
    import torch

    a, b, out = torch.ones(384, 384), torch.ones(384, 384), torch.empty(384, 384)

    def work() -> int:
        start = perf_counter_ns()
        torch.mm(a, b, out=out)
        return perf_counter_ns() - start

    return work


def cuda_work(driver: Driver) -> Work:
    """Work for a GPU: some milliseconds of matmul on a separate stream."""
    import torch

    with torch.cuda.device(driver.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    a = torch.ones(4096, 4096, dtype=torch.float16, device=driver.device)
    out = torch.empty_like(a)
    torch.cuda.synchronize(driver.device)

    def work() -> int:
        with torch.cuda.stream(stream):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(10):
                torch.mm(a, a, out=out)
            end.record()
        end.synchronize()
        return int(start.elapsed_time(end) * 1e6)

    return work
