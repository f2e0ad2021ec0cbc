"""Whatever an engine calls may fail: allocations, copies, the model, the sampler, the cache, the detokenizer.

Every k-th call fails, from each of the first k on; a point's backends share these starts among them, so that
each call of a life fails on one of them. Either that step or deed raises and can be tried again, or one
request fails and says why; the others get their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.faults.busy import Lived, alone, make, requests
from tests.faults.flaky import Flaky, planted
from vattn.engine.runner import Runner
from vattn.kv.cache import KVCache
from vattn.kv.memory.base import Memory
from vattn.kv.memory.mapped import MappedMemory
from vattn.kv.memory.swap import SwapSpace
from vattn.kv.memory.tensor import TensorMemory
from vattn.sampling.detokenize import StopChecker
from vattn.sampling.sampler import Sampler
from vattn.vmm.driver import UNKNOWN, DriverError
from vattn.vmm.pool import PagePool


def driver_error() -> DriverError:
    return DriverError("map", UNKNOWN, hint="planted")


class Point(NamedTuple):
    """Where it fails, on which backends, how."""

    name: str
    owner: type
    call: str
    backends: tuple[str, ...]
    failure: Callable[[], Exception] | None = planted
    every: int = 5
    fails: tuple[str, ...] = ()
    """Who may fail by that."""

    def starts(self, backend: str) -> list[int]:
        """Which calls fail first on this backend: all where there are few calls, else all on some backend."""
        groups = min(len(self.backends), self.every) if self.every > 3 else 1
        mine = self.backends.index(backend) % groups
        return [first for first in range(1, self.every + 1) if (first - 1) % groups == mine]


V, P, S = "virtual-interleaved", "paged-7", "static-interleaved"
OVERLAP = ("virtual-overlap", "paged-overlap")
ANY = tuple(requests())
"""Whoever asks for memory may be the one that does not get it."""
POINTS = [
    Point("pages are short", PagePool, "acquire", (V, "virtual-overlap"), None),
    Point(
        "pages raise",
        PagePool,
        "acquire",
        (V, "virtual-per_layer", "virtual-overlap"),
        MemoryError,
        fails=ANY,
    ),
    Point("moving to memory of another size", TensorMemory, "move", (P, S), every=3),
    Point("host memory", SwapSpace, "_to_host", (V, P, S), MemoryError, 2),
    Point("a copy out", Memory, "copy_out", (V, P, S), every=2),
    Point("a copy in", Memory, "copy_in", (V, P, S), every=2),
    Point("the copy of a tail", MappedMemory, "copy", (V, "virtual-per_layer"), every=2),
    Point("the copy of a block", TensorMemory, "copy", (P, S), every=2),
    Point("a grant", MappedMemory, "grant", (V, "virtual-overlap"), driver_error, 2),
    Point("mapping", MappedMemory, "map", (V, "virtual-overlap"), driver_error, 5),
    Point("the model", Runner, "run", (V, P, *OVERLAP)),
    Point("the sampler", Sampler, "sample", (V, *OVERLAP)),
    Point("planning a step", KVCache, "begin_step", (V, P), driver_error),
    Point("after the model", KVCache, "submitted", (V, "virtual-overlap"), driver_error),
    Point("growth", KVCache, "grow", (V, P, *OVERLAP), driver_error, 7),
    Point("admission", KVCache, "attach", (V, P, *OVERLAP), driver_error, 3, ANY),
    Point("a fork", KVCache, "fork", (V, P, S, "paged-overlap"), driver_error, 2),
    Point("freeing", KVCache, "free", (V, P, S, *OVERLAP), driver_error, 3),
    Point("entering what is computed", KVCache, "computed", (V, P, *OVERLAP), planted, 31),
    Point("another size", KVCache, "resize", (V, P, S), driver_error, 7),
]
CASES = [(point, backend) for point in POINTS for backend in point.backends]


@pytest.mark.parametrize(("point", "backend"), CASES, ids=[f"{p.name}, {b}" for p, b in CASES])
def test_any_call_may_fail(point: Point, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met = 0
    for first in point.starts(backend):
        with make(backend) as llm, monkeypatch.context() as patch:
            flaky = Flaky(patch, point.owner, point.call, first, point.every, point.failure)
            lived = Lived(llm, backend, patience=2)
            lived.assert_unharmed(point.fails)
            assert len(lived.raised) <= flaky.failures
            met += flaky.failures
            patch.undo()
    assert met


@pytest.mark.parametrize(("backend", "start"), [("virtual-interleaved", 1), ("paged-overlap", 3)])
def test_a_request_whose_text_breaks_fails_alone(
    backend: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(start, 30, 4):
        with make(backend) as llm, monkeypatch.context() as patch:
            Flaky(patch, StopChecker, "push", first, 1000, planted)
            lived = Lived(llm, backend)
            assert not lived.raised
            lived.assert_unharmed(may_fail=tuple(alone()))
            [error] = lived.failed().values()
            assert "planted" in error and "detokenize=False" in error
