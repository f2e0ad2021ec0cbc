"""Names of test cases that are the same in every process."""

from __future__ import annotations

import re


def name_of(value: object) -> str:
    """A value as it is written, without its address, and not longer than a line needs."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:60]
