"""The tests of everything that stands on a driver, once more over `CudaDriver` and the software CUDA driver.

They are the same files, run by a child pytest in which every host or accounting driver is a `CudaDriver`
(`substitute.py`); left out is only what asks for something a CUDA device does not have.
"""

from __future__ import annotations

import pytest

from tests.softcuda.child import pytest_over_softcuda

LEFT_OUT = [
    "a_thousand_rows_of_a_terabyte_each",  # more addresses than a process has
    "PoolMachine or wrong_use_is_refused",  # need several devices, or a fresh one for each example
    "many_lives",  # a CUDA driver per tensor is slow, and the point there is the host's addresses
    "gives_pages_back_to_the_system",  # looks into the host driver's memfd
    "impossible_tensors",  # asks for a page smaller than the system's
]
SUITES = {
    "vmm": (["space_machine", "space", "pool", "faults", "growable"], 300),
    "kv": (["machine", "faults"], 8),
}


@pytest.mark.parametrize("part", SUITES)
def test_over_the_software_cuda_driver(part: str) -> None:
    names, at_least = SUITES[part]
    options = ["-p", "tests.softcuda.substitute", "-k", f"not ({' or '.join(LEFT_OUT)})"]
    assert pytest_over_softcuda(*options, *(f"tests/{part}/test_{name}.py" for name in names)) >= at_least
