"""A Triton driver that compiles for a GPU that isn't there.

Inside `compile_only(90)` every kernel launch goes through Triton's own front end, with its own specialisation
of the arguments at hand, down to a cubin for sm_90, and stops there: nothing runs, no memory is touched. What
is measured is therefore exactly what a launch with these tensors would run. CPU tensors will do; only
dtypes, strides and alignment matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from .launch import interpreted

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""KiB of shared memory a program may use, by compute capability (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. shared: bytes of shared memory; constants: its constexprs by name."""

    name: str
    cubin: bytes
    shared: int
    warps: int
    constants: dict[str, Any]


Function = tuple[str, bytes, int]
"""Takes the place of a function handle: name, cubin, bytes of shared memory."""


class _Utils:
    """Replaces the part of Triton's driver that queries the GPU. It answers for a typical GPU of its kind."""

    def __init__(self, capability: int) -> None:
        self._properties = {
            "max_shared_mem": SHARED_MEMORY[capability] * 1024,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spills, most threads. The function is what a launch gets to see."""
        return object(), (name, cubin, shared), 0, 0, 1024


class CompileOnlyDriver:
    """Replaces Triton's CUDA driver. `launches` lists the kernels that would have run, in order."""

    def __init__(self, capability: int) -> None:
        if capability not in SHARED_MEMORY:
            known = ", ".join(map(str, SHARED_MEMORY))
            raise ValueError(f"compute capability {capability} is not one of {known}")
        self.capability = capability
        self.utils = _Utils(capability)
        self.launches: list[Compiled] = []

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels per device number: one number per kind of GPU

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Called once per kernel; the result at every launch, under whatever driver is active then."""
        names = source.fn.arg_names
        constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}

        def launch(x: int, y: int, z: int, stream: int, function: Function, *arguments: Any) -> None:
            active = triton.runtime.driver.active
            active.launches.append(Compiled(*function, metadata.num_warps, constants))

        return launch


@contextlib.contextmanager
def compile_only(capability: int) -> Iterator[CompileOnlyDriver]:
    """Make every launch in this block compile for `capability` and go no further. Not thread-safe."""
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter does not compile; unset it")
    config = triton.runtime.driver
    driver, previous = CompileOnlyDriver(capability), config._active
    config.set_active(driver)
    try:
        yield driver
    finally:
        config.set_active(previous)
