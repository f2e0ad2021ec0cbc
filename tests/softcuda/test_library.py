"""The software CUDA driver itself: strict, complete for what `CudaDriver` calls, sound under random calls."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.softcuda.child import pytest_over_softcuda, run_over_softcuda
from tests.softcuda.library import SOURCE, compile_c, library

HERE = Path(__file__).parent
CUDA_DRIVER = HERE.parents[1] / "vmm" / "cuda.py"


def test_every_call_and_the_code_of_every_refusal() -> None:
    """Through the real bindings, in a process of its own."""
    passed = pytest_over_softcuda("tests/softcuda/call_scenarios.py", granularity=65536, memory=16 * 65536)
    assert passed >= 32


def test_it_has_every_call_that_the_driver_makes() -> None:
    has = set(re.findall(r"X\((cu\w+),", (SOURCE / "softcuda.h").read_text()))
    makes = set(re.findall(r"\bcu(?:Init|[A-Z][a-z]+[A-Z]\w+)\b", CUDA_DRIVER.read_text()))
    assert {"cuInit", "cuMemMap", "cuCtxPushCurrent", "cuMemGetInfo", "cuGetErrorName"} <= makes <= has


def stress(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Build the stress program with the library's source and run it; as a failure: not built."""
    program = tmp_path / "stress"
    done = compile_c(program, [HERE / "stress.c", *sorted(SOURCE.glob("*.c"))], "-O1", *flags)
    if done.returncode:
        return done
    return subprocess.run(
        [str(program), "1", "20000"], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_calls_from_many_threads_leave_the_books_balanced(tmp_path: Path, sanitizer: str) -> None:
    """Half of the calls are wrong, some made to fail; the sanitizers watch memory, arithmetic and locks."""
    done = stress(tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    if "cannot find" in done.stderr or "unexpected memory mapping" in done.stderr:
        done = stress(tmp_path)  # the sanitizer is not installed, or cannot run on this kernel
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"\d{5} mapped, \d{5} unmapped, \d{4} failures injected: the books balance\n", done.stdout
    )


def test_a_failure_can_be_planted_from_outside() -> None:
    script = """
from vattn.vmm.cuda import CudaDriver
from vattn.vmm.driver import DriverError
driver = CudaDriver(tensor_device="cpu")
codes = []
for _ in range(3):
    try:
        driver.reserve(1 << 21)
    except DriverError as error:
        codes.append((_, error.code))
print(driver.granularity, driver.memory_info(), codes)
"""
    done = run_over_softcuda(["-c", script], memory=8 << 20, fail_at="2,801")
    assert done.stdout == f"{2 << 20} ({8 << 20}, {8 << 20}) [(1, 801)]\n", done.stderr


def test_it_is_compiled_once() -> None:
    before = library().stat().st_mtime_ns
    library.cache_clear()
    assert library().stat().st_mtime_ns == before
