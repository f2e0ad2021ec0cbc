"""What holds for every test process."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What is imported stays: `gc.collect()`, which tests of leaks call often, need not walk it each time."""
    gc.collect()
    gc.freeze()
