"""The figures of the compiled kernels that are recorded and quoted are complete, good, and the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels.test_static import attention, find, unexplained_words
from vattn.kernels import aot, cases
from vattn.kernels.aot import Row

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Row]:
    """Figures of the Triton that is pinned."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = next(line.removeprefix("triton==") for line in lines if line.startswith("triton=="))
    return aot.load_figures(aot.figures_file(pinned))


def test_recorded_figures_are_complete_and_good(recorded: dict[str, Row]) -> None:
    names = {case.name for case in cases.all_cases()}
    assert {row.case for row in recorded.values()} == names, "record again: the list of kernels has changed"
    assert not [r.key for r in recorded.values() if r.spills or r.stack]
    assert not [r.key for r in recorded.values() if r.narrow_loads]
    assert not [r.key for r in attention(recorded) if unexplained_words(r, recorded)]


def test_the_documentation_quotes_the_recorded_figures(recorded: dict[str, Row]) -> None:
    lines = re.findall(r"^\| `(.+?)` \| (.+) \|$", (ROOT / "docs" / "kernels.md").read_text(), re.MULTILINE)
    quoted = {case: figures for case, figures in lines if case.startswith(("decode/", "prefill/"))}
    assert len(quoted) > 30
    for case, figures in quoted.items():
        sm80, sm90, sm100 = (find(recorded, case, cc) for cc in (80, 90, 100))
        integer = f"{sm90.integer_share:.0%}"
        want = [sm80.loop, sm90.loop, sm100.loop, f"{sm90.per_key:.1f}", integer, sm90.registers]
        assert figures == " | ".join(map(str, want)), case
