"""The whole engine over `CudaDriver`, the real bindings and the software CUDA driver."""

from __future__ import annotations

from tests.softcuda.child import pytest_over_softcuda


def test_the_engine_runs_on_it() -> None:
    """Equal tokens in both layouts, mapping ahead, failures at any driver call: see the file."""
    assert pytest_over_softcuda("tests/softcuda/engine_scenarios.py") >= 9
