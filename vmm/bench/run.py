"""The benchmark of one device: chooses page sizes and spans, runs the measurements, makes the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..driver import Driver, open_driver
from .calls import call_latencies, compare_grants, rounds_for
from .overlap import overlap_latencies
from .timing import Latency, one_thread

PAGES = {"cpu": (64 << 10, 2 << 20), "cuda": (2 << 20, 8 << 20)}
SPANS, SMOKE_SPANS = (1, 8, 64), (1, 4)


def bench(
    device: str,
    pages: Sequence[int] = (),
    *,
    smoke: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure a device and return a report that can be written as JSON.

    `pages`: page sizes in bytes, multiples of the granularity; if empty, two usual ones (`smoke`: one).
    `smoke`: do few rounds, only to see that it runs. `progress` is called with what is measured next.
    Raises `ValueError` for a page size that is impossible on the device, `DriverUnavailable` if there is no
    such device.
    """
    kind = device.partition(":")[0]
    chosen = tuple(pages) or PAGES[kind][: 1 if smoke else None]
    spans = SMOKE_SPANS if smoke else SPANS
    with one_thread():
        return _measure(device, chosen, spans, bool(pages), smoke, progress)


def _measure(
    device: str,
    pages: Sequence[int],
    spans: Sequence[int],
    exact: bool,
    smoke: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """`exact`: raise ValueError for a page that is not a multiple of the granularity, else round it up."""
    calls: list[Latency] = []
    overlap: list[Latency] = []
    about: dict[str, Any] = {}
    for page in pages:
        driver = _open(device, page)
        about = {"driver": driver.name, "device": str(driver.device), "granularity": driver.granularity}
        try:
            size = -(-page // driver.granularity) * driver.granularity if not exact else page
            if size % driver.granularity or size <= 0:
                raise ValueError(
                    f"a page of {page:,} bytes is not a multiple of the granularity, {driver.granularity:,}"
                )
            for span in spans:
                progress(f"{size:,} bytes, {span} pages")
                calls += call_latencies(driver, size, span, 2 if smoke else rounds_for(span, spans, 100))
            progress(f"{size:,} bytes, in the background")
            overlap += overlap_latencies(driver, size, 3 if smoke else 100)
        finally:
            driver.close()
    return {
        **about,
        "calls": [row._asdict() for row in calls],
        "grants": [row._asdict() for row in compare_grants(calls)],
        "overlap": [row._asdict() for row in overlap],
    }


def _open(device: str, page: int) -> Driver:
    """Open the driver. On a CPU the granularity is the largest power of two that divides the page."""
    return open_driver(device, **({"granularity": page & -page} if device == "cpu" else {}))
