"""pytest plugin: every host or accounting driver that a test makes is a `CudaDriver` over softcuda instead.

    python -m pytest -p tests.softcuda.substitute tests/vmm/test_space.py     (see `environment`)

One device cannot be two: drivers that are alive together share its memory, and must agree on its settings.
"""

from __future__ import annotations

import gc

from tests.softcuda.library import SoftCuda
from vattn.vmm import accounting, host
from vattn.vmm.cuda import CudaDriver, _Books


class SoftDriver(CudaDriver):
    """`CudaDriver` with the constructor of `HostDriver`."""

    def __init__(self, granularity: int = 64 << 10, budget: int | None = None) -> None:
        soft = SoftCuda()
        memory = 1 << 30 if budget is None else budget
        if not soft.configure(granularity, memory):
            gc.collect()  # drivers that tests have forgotten
            soft.configure(granularity, memory)
        super().__init__(tensor_device="cpu")
        assert (self.granularity, self.memory_info()[1]) == (granularity, memory), soft.usage()

    @property
    def shadow(self) -> _Books:
        """What tests ask the books of a host driver for: the reservations."""
        return self._books

    def check(self) -> None:
        """Let the library recount its books."""
        SoftCuda().check()


def pytest_collection_finish() -> None:
    """Everything is imported: leave it out of the collections that the drivers above ask for."""
    gc.collect()
    gc.freeze()


host.HostDriver = SoftDriver  # type: ignore[assignment,misc]
accounting.AccountingDriver = SoftDriver  # type: ignore[assignment,misc]
