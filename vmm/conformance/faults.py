"""Rules about accesses that must fault. Each check returns the access, which ends its process."""

from __future__ import annotations

from ..driver import Access
from .rule import Touch, rule
from .sandbox import Sandbox


def read(box: Sandbox, at: int) -> Touch:
    """Read a byte, with arithmetic. On a GPU that runs a kernel; a plain copy might just be refused."""
    return lambda: (box.tensor(at, 1) + 1).item()


def write(box: Sandbox, at: int) -> Touch:
    """Write a byte."""
    return lambda: box.tensor(at, 1).fill_(1)


@rule("Reading where nothing is mapped faults.", "cuMemAddressReserve", faults=True)
def reading_unmapped_addresses_faults(box: Sandbox) -> Touch:
    return read(box, box.usable(1, room=4) + 3 * box.page)


@rule("Writing where nothing is mapped faults.", "cuMemAddressReserve", faults=True)
def writing_unmapped_addresses_faults(box: Sandbox) -> Touch:
    return write(box, box.usable(1, room=4) + 3 * box.page)


@rule("Reading one byte behind the last mapped page faults.", "cuMemMap", faults=True)
def reading_past_the_last_page_faults(box: Sandbox) -> Touch:
    va = box.usable(2, room=2)
    read(box, va + 2 * box.page - 1)()
    return read(box, va + 2 * box.page)


@rule("Reading mapped memory faults until access is granted.", "cuMemMap", faults=True)
def reading_without_access_faults(box: Sandbox) -> Touch:
    va = box.reserve(1)
    box.map(va, box.create())
    return read(box, va)


@rule("Reading faults when access was taken away.", "cuMemSetAccess", faults=True)
def reading_after_access_is_taken_faults(box: Sandbox) -> Touch:
    va = box.usable()
    write(box, va)()
    box.driver.synchronize()
    box.grant(va, access=Access.NONE)
    return read(box, va)


@rule("Writing through a read-only alias faults.", "CUmemAccess_flags", faults=True)
def writing_a_read_only_alias_faults(box: Sandbox) -> Touch:
    va, alias = box.aliases()
    box.grant_read_only(alias)
    write(box, va)()
    read(box, alias)()
    return write(box, alias)


@rule("Reading unmapped memory faults, although an alias of it is still mapped.", "cuMemUnmap", faults=True)
def reading_after_unmap_faults(box: Sandbox) -> Touch:
    va, alias = box.aliases()
    write(box, va)()
    box.unmap(va)
    read(box, alias)()
    return read(box, va)


RULES = (
    reading_unmapped_addresses_faults,
    writing_unmapped_addresses_faults,
    reading_past_the_last_page_faults,
    reading_without_access_faults,
    reading_after_access_is_taken_faults,
    writing_a_read_only_alias_faults,
    reading_after_unmap_faults,
)
