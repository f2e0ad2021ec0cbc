"""Keep one pool of OpenMP workers in the process: that of the thread that steps the engine.

Each thread that runs parallel torch code gets workers of its own, and they stay. With more workers than cores
libgomp stops letting them spin between two small operations and puts them to sleep instead, which costs a CPU
decode about a tenth of its speed. So the thread that loaded the model lets its workers go.

    before   | main + its worker | engine + its worker |     4 threads on 2 cores
    after    | main              | engine + its worker |
"""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft, OpenMP 5.0, section 3.2.43


def release_workers() -> bool:
    """Let the calling thread's idle workers go; they come back when it needs them. False if that can't be.

    Does nothing without libgomp (another OpenMP runtime, or none).
    """
    library = _libgomp()
    return library is not None and library.omp_pause_resource_all(_SOFT) == 0


@lru_cache(maxsize=1)
def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, if it has one that can pause."""
    found = re.search(r"/\S*libgomp\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if found is None:
        return None
    library = ctypes.CDLL(found.group())
    return library if hasattr(library, "omp_pause_resource_all") else None
