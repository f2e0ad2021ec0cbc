"""Every call of a driver, timed on runs of pages.

One round on `span` pages; the labels are the rows of the table:

    reserve       [ . . . . | . . . . ]       twice the span
    create, map   [ ▓ ▓ ▓ ▓ | . . . . ]
    set_access    "new page": one page per call, the first time; then its first touch, and another
    aliases       [ ▓ ▓ ▓ ▓ | ▓ ▓ ▓ ▓ ]       the same memory at other addresses, read-only, in one call
    unmap         "touched page": one page per call
    map again     "all": one set_access and one unmap over the whole span
    map again     "page": one page per call
    release, free
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..driver import Access, Driver
from .timing import Latency, Stopwatch

RW = Access.READ_WRITE
EACH, ONCE = "set_access, page", "set_access, all"


def call_latencies(driver: Driver, page_bytes: int, span: int, rounds: int) -> list[Latency]:
    """Latencies of every call over `rounds` rounds. Needs `span` free pages and gives them back."""
    watch = Stopwatch()
    _round(driver, page_bytes, span, watch)  # warm-up
    watch.samples.clear()
    for _ in range(rounds):
        _round(driver, page_bytes, span, watch)
    return watch.latencies(page_bytes, span)


def _round(driver: Driver, page_bytes: int, span: int, watch: Stopwatch) -> None:
    import torch

    size = span * page_bytes
    va = watch.time("reserve", driver.reserve, 2 * size)
    pages = range(va, va + size, page_bytes)
    handles = [watch.time("create", driver.create, page_bytes) for _ in pages]

    def map_all(label: str, first: int) -> None:
        for index, handle in enumerate(handles):
            watch.time(label, driver.map, first + index * page_bytes, page_bytes, handle)

    def touch(label: str, page: int) -> None:
        memory = driver.tensor(page, (page_bytes // 8,), (1,), torch.int64)

        def write() -> None:
            memory.fill_(1)
            driver.synchronize()

        watch.time(label, write)

    map_all("map", va)
    for page in pages:
        watch.time("set_access, new page", driver.set_access, page, page_bytes, RW)
    for label in ("first touch", "touch again"):
        for page in pages:
            touch(label, page)
    map_all("map, alias", va + size)
    watch.time("set_access, all aliases", driver.set_access, va + size, size, Access.READ)
    watch.time("unmap, all aliases", driver.unmap, va + size, size)
    for page in pages:
        watch.time("unmap, touched page", driver.unmap, page, page_bytes)
    map_all("map", va)
    watch.time(ONCE, driver.set_access, va, size, RW)
    watch.time("unmap, all", driver.unmap, va, size)
    map_all("map", va)
    for page in pages:
        watch.time(EACH, driver.set_access, page, page_bytes, RW)
    for page in pages:
        watch.time("unmap, page", driver.unmap, page, page_bytes)
    for handle in handles:
        watch.time("release", driver.release, handle)
    watch.time("free", driver.free, va, 2 * size)


class Grants(NamedTuple):
    """Microseconds to grant access to `span` pages: by one call per page, and by one call for all."""

    page_bytes: int
    span: int
    one_each_us: float
    one_call_us: float


def compare_grants(latencies: Iterable[Latency]) -> list[Grants]:
    """Compare granting access per page with granting once per span, from medians."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in latencies:
        found.setdefault((row.page_bytes, row.span), {})[row.call] = row.median_us
    return [
        Grants(page, span, span * calls[EACH], calls[ONCE])
        for (page, span), calls in found.items()
        if span > 1 and EACH in calls and ONCE in calls
    ]


def rounds_for(span: int, spans: Sequence[int], most: int) -> int:
    """Number of rounds for a span: `most` for the shortest, fewer for longer spans, at least 10."""
    return max(10, most * min(spans) // span)
