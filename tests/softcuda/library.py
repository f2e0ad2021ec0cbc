"""Builds the software CUDA driver, says how a process comes to load it, and steers it from inside.

`cuda.bindings` loads `libcuda.so.1` by name, so a process uses the software one when `LD_LIBRARY_PATH` named
its folder at the start: tests over it run in child processes (`environment`).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "source"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wstrict-prototypes"]


def compile_c(output: Path, files: list[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile C files against NVIDIA's cuda.h, which the triton wheel carries; warnings are errors."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.submodule_search_locations, "cuda.h comes with triton"
    headers = Path(triton.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
    command = ["cc", "-std=gnu11", "-g", "-pthread", *WARNINGS, "-isystem", str(headers), "-I", str(SOURCE)]
    return subprocess.run(
        [*command, *flags, "-o", str(output), *map(str, files)], capture_output=True, text=True, check=False
    )


@lru_cache(maxsize=1)
def library() -> Path:
    """The compiled `libcuda.so.1`, in a folder of its own; compiled anew only when its source has changed."""
    files = sorted(SOURCE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"vattn-softcuda-{os.getuid()}-{digest}"
    made = folder / "libcuda.so.1"
    if not made.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new = Path(scratch) / made.name
            sources = [file for file in files if file.suffix == ".c"]
            flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{made.name}"]
            done = compile_c(new, sources, *flags)
            assert done.returncode == 0, done.stderr
            new.replace(made)  # at once: another process may be here too
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else"
    return made


def environment(**settings: object) -> dict[str, str]:
    """Environment of a child process that is to load the library.

    `settings`: `granularity`, `memory` (bytes), `read_only` (0 or 1), `fail_at` ("n" or "n,code").
    """
    folders = [str(library().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
        "OMP_NUM_THREADS": "1",
        **{f"SOFTCUDA_{name.upper()}": str(value) for name, value in settings.items()},
    }


class Usage(NamedTuple):
    """What exists on the device; `used` is in bytes."""

    reservations: int
    allocations: int
    mappings: int
    used: int


class _Usage(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in Usage._fields)


class SoftCuda:
    """The library that this process has loaded, or will."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.softcuda_calls.restype = ctypes.c_long
        self._library.softcuda_failures.restype = ctypes.c_size_t
        for name in ("softcuda_check", "softcuda_last_failure"):
            getattr(self._library, name).restype = ctypes.c_char_p

    def configure(self, granularity: int, memory: int, read_only: bool = True) -> bool:
        """Change the device (bytes); False, and nothing changed, while anything exists on it."""
        sizes = ctypes.c_size_t(granularity), ctypes.c_size_t(memory)
        return bool(self._library.softcuda_configure(*sizes, int(read_only)) == 0)

    def fail_at(self, n: int, code: int = 0, lasting: bool = False) -> None:
        """Let the n-th call from now that can fail do so (0: none), or it and all after it.

        `code` 0: OUT_OF_MEMORY for cuMemCreate, UNKNOWN for the others.
        """
        self._library.softcuda_fail_at(ctypes.c_long(n), code, int(lasting))

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Calls made here neither count nor fail: for looking at things in between."""
        self._library.softcuda_pause(1)
        try:
            yield
        finally:
            self._library.softcuda_pause(0)

    @property
    def failures(self) -> int:
        """Failures injected so far."""
        return int(self._library.softcuda_failures())

    @property
    def last_failure(self) -> str:
        """Name of the call that was last made to fail."""
        name = self._library.softcuda_last_failure()
        return name.decode() if name else ""

    def calls(self, name: str) -> int:
        """How often a function of the driver was called."""
        count = int(self._library.softcuda_calls(name.encode()))
        if count < 0:
            raise KeyError(name)
        return count

    def usage(self) -> Usage:
        """What exists at this moment."""
        usage = _Usage()
        self._library.softcuda_usage(ctypes.byref(usage))
        return Usage(*(getattr(usage, name) for name in Usage._fields))

    def check(self) -> None:
        """Let the library recount its books; raises AssertionError when they disagree."""
        wrong = self._library.softcuda_check()
        assert not wrong, wrong.decode()
