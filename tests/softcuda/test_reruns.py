"""The tests of everything that stands on a driver, once more over `CudaDriver` and the software CUDA driver.

They are the same files, run by a child pytest in which every host or accounting driver is a `CudaDriver`
(`substitute.py`); left out is only what asks for something a CUDA device does not have.
"""

from __future__ import annotations

from tests.softcuda.child import pytest_over_softcuda

LEFT_OUT = [
    "a_thousand_rows_of_a_terabyte_each",  # more addresses than a process has
    "PoolMachine or wrong_use_is_refused",  # need several devices, or a fresh one for each example
    "many_lives",  # a CUDA driver per tensor is slow, and the point there is the host's addresses
    "gives_pages_back_to_the_system",  # looks into the host driver's memfd
    "impossible_tensors",  # asks for a page smaller than the system's
]
FILES = {
    "vmm": ["space_machine", "space", "pool", "faults", "growable"],
    "kv": ["machine", "faults"],
}


def test_what_stands_on_a_driver_runs_on_it() -> None:
    files = [f"tests/{part}/test_{name}.py" for part, names in FILES.items() for name in names]
    without = f"not ({' or '.join(LEFT_OUT)})"
    assert pytest_over_softcuda("-p", "tests.softcuda.substitute", "-k", without, *files) >= 310
