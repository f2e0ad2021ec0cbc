"""A driver without memory: it only keeps books, so it is fast and can be of any size.

It is for simulation (terabytes of KV on a laptop) and property tests. Its tensors are on the `meta` device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .driver import NOT_SUPPORTED, DriverError
from .shadowed import ShadowedDriver

if TYPE_CHECKING:
    import torch

_FIRST_ADDRESS = 1 << 44


class AccountingDriver(ShadowedDriver):
    """A driver with the rules and errors of `HostDriver`, but without memory.

    `granularity` is the smallest page and `budget` is what `create` may hand out, both in bytes.
    """

    name = "accounting"

    def __init__(self, granularity: int = 64 << 10, budget: int = 1 << 40) -> None:
        super().__init__(granularity, budget)
        self._next = _FIRST_ADDRESS

    @property
    def device(self) -> torch.device:
        """The `meta` device."""
        import torch

        return torch.device("meta")

    def _do_reserve(self, size: int, align: int) -> int:
        va = -(-self._next // align) * align
        self._next = va + size + self.granularity  # a gap, so that a range that runs past its end is refused
        return va

    def export_handle(self, handle: int) -> int:
        """Always refused: there is no memory to share."""
        raise DriverError("export_handle", NOT_SUPPORTED, hint="no memory to share")

    def import_handle(self, fd: int, size: int) -> int:
        """Always refused: there is no memory to share."""
        raise DriverError("import_handle", NOT_SUPPORTED, hint="no memory to share")

    def tensor(
        self,
        va: int,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        owner: object = None,
    ) -> torch.Tensor:
        """A meta tensor of that shape and stride. `va` and `owner` are not used."""
        import torch

        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")

    def close(self) -> None:
        """Forget everything. Idempotent."""
        with self._lock:
            self._closed = True
            self.shadow.clear()
