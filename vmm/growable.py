"""A tensor whose first dimension grows in place.

    addresses  | row | row | row | row |  .  |  .  |  .  |     max_rows, reserved once: data_ptr never changes
    memory     |▓▓▓ page ▓▓▓|▓▓▓ page ▓▓▓|                     mapped when rows need them
    view()     [ ...... len rows ..... ]

Growing copies nothing and over-allocates less than a page, on CPU and CUDA.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from .driver import DEINITIALIZED, ArgumentError, Driver, DriverError, OutOfMemory, open_driver
from .owner import OwnerProcess
from .pool import PagePool
from .space import AddressSpace


class _Memory:
    """The memory, kept alive by the tensor and all its views. It is given back when the last of them dies."""

    def __init__(self, driver: Driver, owns_driver: bool, page_bytes: int, size: int) -> None:
        self.driver = driver
        self.owner = OwnerProcess("GrowableTensor")
        self.pool = PagePool(driver, page_bytes, -(-size // page_bytes) * page_bytes)
        self.space = AddressSpace(driver, self.pool, 1, size)
        clean_up = partial(_give_back, driver, owns_driver, self.pool, self.space)
        self._finalizer = weakref.finalize(self, driver.defer, clean_up)
        self._finalizer.atexit = False  # threads may still compute; the process gives everything back anyway


class GrowableTensor:
    """Tensor `[n, *shape_tail]` whose `n` grows up to `max_rows` while its address stays the same.

    Args:
        shape_tail: shape of one row; `()` for a growing vector.
        dtype: any torch dtype.
        max_rows: rows to reserve addresses for. Addresses cost no memory, so be generous.
        device: "cpu" or "cuda"; ignored if a driver is given.
        driver: a driver to share between tensors; None opens one for this tensor alone.
        page_bytes: size of the pages that are mapped, a multiple of the driver's granularity, which is the
            default (64 KiB on CPU, usually 2 MiB on CUDA).

    New rows are uninitialised, as with `torch.empty`. Views stay valid while the tensor grows and keep its
    memory alive, even after `close()` or garbage collection. Only `shrink` takes memory away from a view:
    reading the rows that were cut off, through an old view, may kill the process.

    The tensor belongs to the process that made it. A forked child may close or drop it, without effect on
    the parent; everything else raises `WrongProcess` there. A view made before the fork shows the parent's
    memory: writes are seen there. Not thread-safe. Raises `ArgumentError` (a `ValueError`) for impossible
    sizes, `OutOfMemory` if there is no memory to grow into, `DriverUnavailable` if the device has no virtual
    memory.
    """

    def __init__(
        self,
        shape_tail: Sequence[int],
        dtype: torch.dtype,
        max_rows: int,
        device: str | torch.device = "cpu",
        driver: Driver | None = None,
        page_bytes: int | None = None,
    ) -> None:
        try:
            if len(shape_tail) > 64:  # more than torch can
                raise TypeError
            self.shape_tail = tuple(map(operator.index, shape_tail))
        except Exception:
            raise ArgumentError("shape_tail must be the sizes of a row, e.g. (8, 64)") from None
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"dtype must be a torch.dtype, not of type {type(dtype).__name__}")
        if driver is not None and not callable(getattr(driver, "memory_info", None)):
            raise ArgumentError(f"driver must be a driver of vmm, not of type {type(driver).__name__}")
        self.dtype = dtype
        self.max_rows = max_rows = _whole("max_rows", max_rows)
        page_bytes = None if page_bytes is None else _whole("page_bytes", page_bytes)
        self.row_bytes = math.prod(self.shape_tail) * dtype.itemsize
        if self.row_bytes <= 0 or any(size < 0 for size in self.shape_tail):
            raise ArgumentError(f"a row of shape {self.shape_tail} holds nothing")
        if max_rows <= 0:
            raise ArgumentError(f"max_rows must be positive, not {max_rows}")
        if page_bytes is not None and page_bytes <= 0:
            raise ArgumentError(f"page_bytes must be positive, not {page_bytes}")
        if max_rows * self.row_bytes >= 2**63:
            raise ArgumentError(f"{max_rows:,} rows of {self.row_bytes:,} bytes do not fit 64 bits")
        owns_driver = driver is None
        if driver is None:
            driver = _open(_device(device), page_bytes)
        try:
            memory = _Memory(driver, owns_driver, page_bytes or driver.granularity, max_rows * self.row_bytes)
        except BaseException:
            if owns_driver:
                driver.close()
            raise
        self.device = driver.device
        self._memory: _Memory | None = memory
        self._base: torch.Tensor | None = None  # the rows for which memory is mapped
        self._rows = 0

    # The tensor

    def __len__(self) -> int:
        return self._rows

    @property
    def shape(self) -> torch.Size:
        """Shape of `view()`."""
        return torch.Size((self._rows, *self.shape_tail))

    def view(self) -> torch.Tensor:
        """The tensor as it is now: contiguous, `[len(self), *shape_tail]`, always at the same address.

        Costs about a microsecond. Its storage spans mapped memory only, so saving or copying it is safe.
        """
        space = self._open_memory().space
        if self._base is None:
            rows = min(self.max_rows, space.mapped_bytes // self.row_bytes)
            self._base = space.tensor((rows, *self.shape_tail), None, self.dtype, owner=self._memory)
        return self._base.narrow(0, 0, self._rows)

    def data_ptr(self) -> int:
        """Address of row 0, the same for the life of the tensor."""
        return self._open_memory().space.base

    def grow(self, n: int) -> None:
        """Add `n` rows at the end. All or nothing."""
        memory = self._open_memory()
        n = _whole("n", n)
        rows = self._rows + n
        if n < 0 or rows > self.max_rows:
            raise ArgumentError(f"cannot grow {self._rows} rows by {n}: max_rows is {self.max_rows}")
        missing = self._pages(rows) - memory.space.mapped(0)
        if missing > 0:
            try:
                grown = memory.space.extend(0, missing)
            except BaseException:
                memory.pool.trim()
                raise
            if not grown:
                memory.pool.trim()
                free, total = memory.driver.memory_info()
                asked = missing * memory.pool.page_bytes
                raise OutOfMemory(
                    "grow", hint=f"{asked:,} bytes needed for {n} rows; {free:,} of {total:,} are free"
                )
            self._base = None
        self._rows = rows

    def shrink(self, n: int) -> None:
        """Drop the last `n` rows and give back the pages only they used, once the device is idle."""
        memory = self._open_memory()
        n = _whole("n", n)
        if not 0 <= n <= self._rows:
            raise ArgumentError(f"cannot shrink {self._rows} rows by {n}")
        rows = self._rows - n
        pages = self._pages(rows)
        self._rows = rows
        if pages < memory.space.mapped(0):
            self._base = None
            memory.driver.synchronize()
            memory.space.truncate(0, pages)
            memory.pool.trim()

    def append(self, rows: torch.Tensor) -> None:
        """Grow by `len(rows)` and copy `rows` (`[k, *shape_tail]`) there."""
        if not isinstance(rows, torch.Tensor):
            raise ArgumentError(f"append takes a tensor, not a value of type {type(rows).__name__}")
        if tuple(rows.shape[1:]) != self.shape_tail or not rows.dim():
            raise ArgumentError(
                f"rows of shape {tuple(rows.shape)} do not fit [k, {', '.join(map(str, self.shape_tail))}]"
            )
        start = self._rows
        self.grow(len(rows))
        self.view()[start:].copy_(rows)

    # Memory

    @property
    def nbytes(self) -> int:
        """Bytes of the current rows."""
        return self._rows * self.row_bytes

    @property
    def nbytes_mapped(self) -> int:
        """Bytes of physical memory held: `nbytes` rounded up to whole pages."""
        return 0 if self._memory is None else self._memory.space.mapped_bytes

    @property
    def nbytes_reserved(self) -> int:
        """Bytes of reserved addresses."""
        return 0 if self._memory is None else self._memory.space.reserved_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory is None

    def close(self) -> None:
        """Release the memory. It is given back at once, or when the last view dies. Idempotent."""
        self._rows = 0
        self._base = None
        self._memory = None

    def check(self) -> None:
        """Raise AssertionError unless rows, pages and driver agree."""
        memory = self._open_memory()
        memory.pool.check()
        memory.space.check({})
        assert memory.space.mapped(0) == self._pages(self._rows), "pages and rows disagree"
        assert memory.pool.free_bytes == 0, "pages are held without need"

    def __enter__(self) -> Self:
        self._open_memory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else f"{self.nbytes_mapped:,} bytes mapped"
        return f"GrowableTensor({list(self.shape)}, dtype={self.dtype}, device={self.device}, {state})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a GrowableTensor is bound to its addresses and can't be copied or pickled: use .view().clone()"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(None)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(None)

    def _pages(self, rows: int) -> int:
        return -(-rows * self.row_bytes // self._open_memory().pool.page_bytes)

    def _open_memory(self) -> _Memory:
        if self._memory is None:
            raise ArgumentError("the GrowableTensor is closed")
        self._memory.owner.require()
        return self._memory


def _whole(name: str, value: Any) -> int:
    """`value` as an int of 64 bits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except Exception:
        raise ArgumentError(f"{name} must be a whole number, not of type {type(value).__name__}") from None
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(f"{name} must fit 64 bits")
    return number


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except Exception as why:
        raise ArgumentError(f"device must be 'cpu' or 'cuda': {why}") from None


def _open(device: torch.device, page_bytes: int | None) -> Driver:
    if device.type == "cpu" and page_bytes is not None:
        # The largest granularity that divides the page. From 2 MiB on, the driver asks for huge pages.
        return open_driver(device, granularity=page_bytes & -page_bytes)
    return open_driver(device)


def _give_back(driver: Driver, owns_driver: bool, pool: PagePool, space: AddressSpace) -> None:
    try:
        driver.synchronize()
        space.close()
        pool.close()
    except DriverError as error:
        if error.code != DEINITIALIZED:  # the driver was closed first: nothing is left to give back
            raise
    if owns_driver:
        driver.close()
