"""`vattn vmm bench`: every call is timed, by page size and span, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vattn.vmm.bench.calls import EACH, ONCE, call_latencies, compare_grants, rounds_for
from vattn.vmm.bench.overlap import SPAN, overlap_latencies
from vattn.vmm.bench.run import bench
from vattn.vmm.bench.timing import Latency, Stopwatch, percentile
from vattn.vmm.driver import CallCounter
from vattn.vmm.host import HostDriver

PAGE = 64 << 10


@pytest.fixture
def host() -> Iterator[HostDriver]:
    host = HostDriver(PAGE, budget=16 * PAGE)
    yield host
    assert host.memory_info() == (16 * PAGE, 16 * PAGE) and not host.shadow.reservations
    host.close()


def test_every_call_is_timed(host: HostDriver) -> None:
    counter = CallCounter(host)
    rows = {row.call: row for row in call_latencies(counter, 2 * PAGE, 4, rounds=3)}
    assert {call: row.n for call, row in rows.items()} == {
        "reserve": 3,
        "create": 12,
        "map": 36,
        "set_access, new page": 12,
        "first touch": 12,
        "touch again": 12,
        "map, alias": 12,
        "set_access, all aliases": 3,
        "unmap, all aliases": 3,
        "unmap, touched page": 12,
        "set_access, all": 3,
        "unmap, all": 3,
        "set_access, page": 12,
        "unmap, page": 12,
        "release": 12,
        "free": 3,
    }
    assert all(0 < row.median_us <= row.p99_us for row in rows.values())
    assert {(row.page_bytes, row.span) for row in rows.values()} == {(2 * PAGE, 4)}
    assert counter.counts["map"] == 4 * 16, "three rounds and one that is not counted"


def test_calls_are_timed_while_something_computes(host: HostDriver) -> None:
    rows = {row.call: row for row in overlap_latencies(host, PAGE, rounds=4)}
    assert list(rows) == [
        "map, device idle",
        f"set_access, {SPAN} pages, device idle",
        f"unmap, {SPAN} pages, device idle",
        "unit of work, alone",
        "map, device busy",
        f"set_access, {SPAN} pages, device busy",
        f"unmap, {SPAN} pages, device busy",
        "unit of work, while mapping",
    ]
    assert rows["map, device idle"].n == 4 * SPAN and rows["unit of work, alone"].n == 4
    assert rows["map, device busy"].n >= 4 * SPAN and rows["unit of work, while mapping"].n >= 4


def test_one_grant_is_compared_with_many() -> None:
    rows = [Latency(PAGE, 8, EACH, 5.0, 9.0, 80), Latency(PAGE, 8, ONCE, 11.0, 12.0, 10)]
    rows += [Latency(PAGE, 1, EACH, 5.0, 9.0, 80), Latency(PAGE, 1, ONCE, 5.0, 12.0, 10)]
    assert compare_grants(rows) == [(PAGE, 8, 40.0, 11.0)], "a span of one says nothing"


def test_long_spans_take_fewer_rounds() -> None:
    assert [rounds_for(span, (1, 8, 64), 100) for span in (1, 8, 64)] == [100, 12, 10]


def test_percentiles_and_medians() -> None:
    assert [percentile(list(range(1, n + 1)), 99) for n in (1, 10, 100, 200)] == [1, 10, 99, 198]
    watch = Stopwatch()
    for nanoseconds in (3000, 1000, 2000):
        watch.add("call", nanoseconds)
    assert watch.time("sum", sum, [1, 2]) == 3
    assert watch.latencies(PAGE, 2)[0] == (PAGE, 2, "call", 2.0, 3.0, 3)


def test_the_report_covers_page_sizes_and_spans() -> None:
    threads = torch.get_num_threads()
    told: list[str] = []
    report = bench("cpu", [PAGE, 3 * PAGE], smoke=True, progress=told.append)
    assert torch.get_num_threads() == threads, "put back"
    assert (report["driver"], report["device"], report["granularity"]) == ("host", "cpu", PAGE)
    runs = {(row["page_bytes"], row["span"]) for row in report["calls"]}
    assert runs == {(page, span) for page in (PAGE, 3 * PAGE) for span in (1, 4)}
    assert [row["span"] for row in report["grants"]] == [4, 4]
    assert {row["page_bytes"] for row in report["overlap"]} == {PAGE, 3 * PAGE}
    assert len(told) == 6


def test_a_page_that_is_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the system page"):
        bench("cpu", [1000], smoke=True)
