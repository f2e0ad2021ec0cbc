"""Rules about addresses: reserving them and giving them back."""

from __future__ import annotations

from itertools import pairwise

from .rule import expect, refused, rule
from .sandbox import Sandbox


@rule("A reservation is aligned as asked.", "cuMemAddressReserve")
def reservations_are_aligned_as_asked(box: Sandbox) -> str:
    alignments = [box.page, 2 * box.page, 16 * box.page, 1 << 30]
    for align in alignments:
        for pages in (1, 3):
            va = box.reserve(pages, align)
            expect(va % align == 0, f"{va:#x} is not a multiple of {align:,}")
    return f"up to {alignments[-1]:,} bytes"


@rule("Without an alignment, memory can be mapped at the first address.", "vattn")
def reservations_begin_at_a_granule(box: Sandbox) -> None:
    for pages in (1, 2, 3, 5):
        va = box.reserve(pages)
        expect(va % box.page == 0, f"{va:#x} is not a multiple of {box.page:,}")


@rule("An alignment is a power of two.", "cuMemAddressReserve")
def reserve_refuses_an_odd_alignment(box: Sandbox) -> str:
    return refused("three granules", box.driver.reserve, box.page, 3 * box.page)


@rule("A reservation is whole pages of the host.", "cuMemAddressReserve")
def reserve_refuses_part_of_a_page(box: Sandbox) -> str:
    return refused("a byte too many", box.driver.reserve, box.page + 1)


@rule("Reservations do not overlap.", "cuMemAddressReserve")
def reservations_do_not_overlap(box: Sandbox) -> None:
    ranges = sorted((box.reserve(pages), pages) for pages in (1, 7, 2, 5, 1, 3))
    for (va, pages), (following, _) in pairwise(ranges):
        expect(va + pages * box.page <= following, f"{va:#x} and {following:#x} overlap")


@rule(
    "Addresses take no memory: there may be more of them than memory.",
    "Programming Guide: reserving addresses",
    measures=True,
)
def reserving_takes_no_memory(box: Sandbox) -> str:
    _, total = box.driver.memory_info()
    pages = 4 * total // box.page
    before, _ = box.driver.memory_info()
    va = box.reserve(pages)
    after, _ = box.driver.memory_info()
    expect(before - after <= total // 8, f"{before - after:,} bytes less are free")
    box.map(va + (pages - 1) * box.page, box.create())
    return f"{pages * box.page:,} bytes reserved of a device of {total:,}"


@rule("A reservation is freed as it was made, not in part.", "cuMemAddressFree")
def free_takes_a_whole_reservation(box: Sandbox) -> str:
    va, free = box.reserve(4), box.driver.free
    refused("the first half", free, va, 2 * box.page)
    refused("the second half", free, va + 2 * box.page, 2 * box.page)
    name = refused("more than it is", free, va, 8 * box.page)
    box.map(va, box.create())  # it is still there
    return name


@rule(
    "A reservation in which something is mapped is not freed, and the mapping stays.",
    "Programming Guide: freeing addresses",
    defined=False,
)
def free_refuses_a_range_that_holds_mappings(box: Sandbox) -> str:
    va = box.usable(1, room=1)
    box.write(va, 1)
    name = refused("while mapped", box.driver.free, va, 2 * box.page)
    box.expect_value(va, 1, "after the refusal")
    return name


@rule("Freed addresses can be reserved again, and nothing is mapped there then.", "cuMemAddressFree")
def freed_addresses_can_be_reserved_again(box: Sandbox) -> None:
    for value in range(1, 9):
        va = box.reserve(4)
        expect(not box.mappings(va, 4), "something is mapped in a new reservation")
        box.map(va, box.create())
        box.grant(va)
        box.write(va, value)
        box.expect_value(va, value, f"reservation {value}")
        box.unmap(va)
        box.free(va)


RULES = (
    reservations_are_aligned_as_asked,
    reservations_begin_at_a_granule,
    reserve_refuses_an_odd_alignment,
    reserve_refuses_part_of_a_page,
    reservations_do_not_overlap,
    reserving_takes_no_memory,
    free_takes_a_whole_reservation,
    free_refuses_a_range_that_holds_mappings,
    freed_addresses_can_be_reserved_again,
)
