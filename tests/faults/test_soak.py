"""Some hundred requests with aborts, resizes, sleep, swap, samples and beams: nothing is left behind.

The long version is benchmarks/soak.
"""

from __future__ import annotations

import pytest

from benchmarks.soak.run import BACKENDS, soak
from vattn.lab.bench.tiny import load_tiny
from vattn.models.attention import register_attention
from vattn.models.loader import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    register_attention()
    return load_tiny("cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_leaks(backend: str, model: LoadedModel) -> None:
    run = soak(model, backend, 150, seed=1)
    assert sum(run["ended"].values()) == 150 and "error" not in run["ended"]
    assert run["preemptions"] and run["forks"]
    early, end = run["after_a_tenth"], run["at_the_end"]
    for state in (early, end):
        assert state["kv_in_use"] == state["swap_used"] == 0
    # The allocator of the C library may map an arena or two of its own, a leak would map one a request.
    assert end["descriptors"] == early["descriptors"] and end["maps"] < early["maps"] + 15
    assert set(run["left_in_the_driver_after_closing"].values()) == {0}
    before, after = run["before_opening"], run["after_closing"]
    assert after["descriptors"] == before["descriptors"] and after["threads"] == before["threads"]
