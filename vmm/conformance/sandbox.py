"""The driver as a rule sees it. It remembers everything the rule made and gives it back at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..driver import Access, Driver, MappedRange, open_driver
from .rule import Unsupported, expect

if TYPE_CHECKING:
    import torch

RW = Access.READ_WRITE


@dataclass(frozen=True)
class DriverSpec:
    """How to open a driver, in a form that can be sent to another process: see `open_driver`."""

    device: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Driver:
        """Open a new driver."""
        return open_driver(self.device, **self.options)


class Sandbox:
    """Calls of a driver, in pages of its granularity.

    What goes through `reserve`, `create`, `map` and `unmap` here is given back by `close`. Calls that must be
    refused go to `driver` itself.
    """

    def __init__(self, driver: Driver, spec: DriverSpec) -> None:
        self.driver = driver
        self.spec = spec
        self.page = driver.granularity
        self._reservations: dict[int, int] = {}
        self._mappings: dict[int, int] = {}
        self._handles: set[int] = set()

    def reserve(self, pages: int, align: int = 0) -> int:
        """First address of `pages` reserved pages."""
        va = self.driver.reserve(pages * self.page, align)
        self._reservations[va] = pages * self.page
        return va

    def free(self, va: int) -> None:
        """Give a reservation back."""
        self.driver.free(va, self._reservations[va])
        del self._reservations[va]

    def create(self, pages: int = 1, shareable: bool = False) -> int:
        """Handle of `pages` pages of memory."""
        handle = self.driver.create(pages * self.page, shareable)
        self._handles.add(handle)
        return handle

    def adopt(self, handle: int) -> int:
        """Remember a handle that was made in another way."""
        self._handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        """Drop a handle."""
        self.driver.release(handle)
        self._handles.discard(handle)

    def map(self, va: int, handle: int, pages: int = 1) -> None:
        """Map all of a handle."""
        self.driver.map(va, pages * self.page, handle)
        self._mappings[va] = pages * self.page

    def unmap(self, va: int, pages: int = 1) -> None:
        """Unmap the mappings of a range, in one call."""
        self.driver.synchronize()
        self.driver.unmap(va, pages * self.page)
        for start in [start for start in self._mappings if va <= start < va + pages * self.page]:
            del self._mappings[start]

    def grant(self, va: int, pages: int = 1, access: Access = RW) -> None:
        """Set the access of a range, in one call."""
        self.driver.set_access(va, pages * self.page, access)

    def grant_read_only(self, va: int, pages: int = 1) -> None:
        """Grant read-only access. Raises `Unsupported` if the driver grants more."""
        self.grant(va, pages, Access.READ)
        given = self.access(va)
        if given is RW:
            raise Unsupported("the device has no read-only access; the driver grants read-write instead")
        expect(given is Access.READ, f"read-only access was asked, {given.name} is there")

    def usable(self, pages: int = 1, room: int = 0) -> int:
        """First address of `pages` usable pages, each a handle of its own, with `room` pages behind them."""
        va = self.reserve(pages + room)
        for index in range(pages):
            self.map(va + index * self.page, self.create())
        self.grant(va, pages)
        return va

    def aliases(self, pages: int = 1) -> tuple[int, int]:
        """Two usable addresses of the same memory."""
        va = self.reserve(2 * pages)
        handle = self.create(pages)
        for start in (va, va + pages * self.page):
            self.map(start, handle, pages)
        self.grant(va, 2 * pages)
        return va, va + pages * self.page

    # Looking

    def mappings(self, va: int, pages: int) -> list[MappedRange]:
        """The mappings that the driver reports. Raises `Unsupported` if it cannot."""
        found = self.driver.mappings(va, pages * self.page)
        if found is None:
            raise Unsupported("the driver cannot tell what is mapped")
        return found

    def access(self, va: int) -> Access:
        """Access of the mapping at an address, as the driver says."""
        found = self.mappings(va, 1)
        expect(found, f"the driver says nothing is mapped at {va:#x}")
        return found[0].access

    def tensor(self, va: int, size: int) -> torch.Tensor:
        """`size` bytes at an address."""
        import torch

        return self.driver.tensor(va, (size,), (1,), torch.uint8)

    def write(self, va: int, value: int, pages: int = 1) -> None:
        """Fill pages with a byte."""
        self.tensor(va, pages * self.page).fill_(value)

    def expect_value(self, va: int, value: int, where: str, pages: int = 1) -> None:
        """Raise `Violation` unless every byte of the pages is `value`."""
        seen = self.tensor(va, pages * self.page)
        low, high = int(seen.min()), int(seen.max())
        expect(low == high == value, f"{where}: {value} was written, bytes of {low} to {high} are there")

    def close(self) -> None:
        """Give everything back. The first error is raised at the end."""
        errors: list[Exception] = []

        def attempt(call: Callable[..., None], *args: int) -> None:
            try:
                call(*args)
            except Exception as error:
                errors.append(error)

        attempt(self.driver.synchronize)
        for va, size in self._mappings.items():
            attempt(self.driver.unmap, va, size)
        for handle in self._handles:
            attempt(self.driver.release, handle)
        for va, size in self._reservations.items():
            attempt(self.driver.free, va, size)
        if errors:
            raise errors[0]
