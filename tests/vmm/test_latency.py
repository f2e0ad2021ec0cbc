"""The table of call costs: every call is timed, and nothing stays behind."""

from __future__ import annotations

import pytest

from vattn.vmm.accounting import AccountingDriver
from vattn.vmm.host import HostDriver
from vattn.vmm.latency import SPAN, main, measure


@pytest.mark.parametrize("kind", [HostDriver, AccountingDriver])
def test_every_call_is_timed_and_everything_given_back(
    kind: type[HostDriver] | type[AccountingDriver],
) -> None:
    driver = kind(4096, budget=SPAN * 8192)
    table = {row.call: row for row in measure(driver, 8192, rounds=2)}
    assert list(table) == [
        f"reserve {SPAN} pages",
        "create",
        "map",
        "set_access, new page",
        "unmap page",
        "set_access, page again",
        f"set_access, {SPAN} pages again",
        f"unmap {SPAN} pages",
        "release",
        f"free {SPAN} pages",
    ]
    assert table["map"].samples == 6 * SPAN and table[f"unmap {SPAN} pages"].samples == 2
    assert all(0 < row.median_us <= row.p99_us for row in table.values())
    assert driver.memory_info() == (SPAN * 8192, SPAN * 8192) and not driver.shadow.reservations
    driver.close()


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main("cpu", "4096")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "host driver, pages of 4,096 bytes, microseconds" and len(lines) == 11
