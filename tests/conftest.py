"""What holds for every test process."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_finish() -> None:
    """What is imported stays: `gc.collect()`, which tests of leaks call often, need not walk it each time."""
    gc.collect()
    gc.freeze()


KNOWN_FAILURES = {
    "test_mutants_of_virtual[units_of_evicted": "random interleavings may miss this mutant",
}
"""Tests that fail since the engine was redesigned, and why. This list may only shrink."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in KNOWN_FAILURES.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
