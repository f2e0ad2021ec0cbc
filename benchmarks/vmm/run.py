"""What the calls of the host driver cost, and how much of it is the price of its rules in Python.

    python benchmarks/vmm/run.py            # a minute; writes benchmarks/results/vmm_cpu.json
    python benchmarks/vmm/run.py --smoke    # seconds; writes nothing

`vattn bench vmm` measures any device; `books` are the same calls on a driver that keeps the books alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from vattn.lab.bench.bench_report import FORMAT, write
from vattn.lab.bench.environment import environment
from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.bench.calls import call_latencies
from vattn.vmm.bench.run import bench

RESULT = Path(__file__).parents[1] / "results" / "vmm_cpu.json"
PAGE = 64 << 10


class Books(AccountingDriver):
    """No memory behind its addresses, so what is touched is memory of another."""

    def tensor(self, va: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


def main() -> None:
    smoke = "--smoke" in sys.argv[1:]
    report = bench("cpu", smoke=smoke)
    rounds = 2 if smoke else 100
    driver = Books(PAGE)
    books = [row._asdict() for span in (1, 64) for row in call_latencies(driver, PAGE, span, rounds)]
    driver.close()
    made = {"format": FORMAT, "kind": "vmm", "environment": environment(), **report, "books": books}
    if not smoke:
        write(RESULT, made)
    for row in made["calls"] + books:
        print(
            f"{row['page_bytes'] >> 10:5} KiB x {row['span']:2} {row['call']:24} {row['median_us']:10.1f} us"
        )


if __name__ == "__main__":
    main()
