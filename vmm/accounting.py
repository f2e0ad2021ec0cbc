"""A driver that keeps the books and has no memory: the rules of growth at any scale, in no time.

For simulation (terabytes of KV on a laptop) and for property tests. Tensors live on torch's `meta` device.
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
    """`HostDriver` without the host: same rules, same errors, no memory behind any of it.

    `granularity` is the smallest page, `budget` the bytes that `create` may hand out; both in bytes.
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
        self._next = va + size + self.granularity  # never adjacent: a range that runs over its end is caught
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
        """A meta tensor of that shape and stride; `va` and `owner` leave no trace in it."""
        import torch

        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")

    def close(self) -> None:
        """Forget everything. Idempotent."""
        with self._lock:
            self._closed = True
            self.shadow.clear()
