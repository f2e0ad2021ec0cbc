"""Rules about sizes: the granularity and its multiples."""

from __future__ import annotations

from .rule import Unsupported, expect, refused, rule
from .sandbox import RW, Sandbox


@rule("The granularity is a positive power of two.", "vattn")
def granularity_is_a_power_of_two(box: Sandbox) -> str:
    expect(box.page > 0 and not box.page & (box.page - 1), f"it is {box.page:,}")
    return f"{box.page:,} bytes"


@rule("The recommended granularity is a multiple of the smallest one.", "cuMemGetAllocationGranularity")
def recommended_granularity_is_a_multiple(box: Sandbox) -> str:
    recommended = getattr(box.driver, "recommended_granularity", None)
    if recommended is None:
        raise Unsupported("the driver recommends none")
    expect(
        recommended and not recommended % box.page, f"{recommended:,} is recommended, {box.page:,} the least"
    )
    return f"{recommended:,} bytes"


@rule("Any number of granules can be created, mapped and used as one.", "cuMemGetAllocationGranularity")
def multiples_of_the_granularity_work(box: Sandbox) -> None:
    for pages in (1, 2, 3):
        va = box.reserve(pages)
        box.map(va, box.create(pages), pages)
        box.grant(va, pages)
        box.write(va, 10 + pages, pages)
        box.expect_value(va, 10 + pages, f"{pages} granules", pages)


@rule("Memory is created in whole granules.", "cuMemCreate")
def create_refuses_part_of_a_granule(box: Sandbox) -> str:
    for size in (1, box.page // 2, box.page + 1, box.page + box.page // 2):
        name = refused(f"{size:,} bytes", box.driver.create, size)
    return name


@rule("Memory is mapped at multiples of the granularity.", "cuMemMap")
def map_refuses_an_address_within_a_granule(box: Sandbox) -> str:
    va, handle = box.reserve(4), box.create()
    for offset in (1, box.page // 2, box.page + box.page // 2):
        name = refused(f"{offset:,} bytes behind", box.driver.map, va + offset, box.page, handle)
    return name


@rule("Whole granules are mapped.", "cuMemMap")
def map_refuses_part_of_a_granule(box: Sandbox) -> str:
    va, handle = box.reserve(4), box.create()
    for size in (1, box.page // 2, box.page + box.page // 2):
        name = refused(f"{size:,} bytes", box.driver.map, va, size, handle)
    return name


@rule("A size of zero is refused by every call.", "vattn", defined=False)
def zero_sizes_are_refused(box: Sandbox) -> str:
    va = box.usable(2, room=1)
    refused("reserve", box.driver.reserve, 0)
    refused("create", box.driver.create, 0)
    refused("map", box.driver.map, va + 2 * box.page, 0, box.create())
    refused("set_access", box.driver.set_access, va, 0, RW)
    return refused("unmap", box.driver.unmap, va, 0)


RULES = (
    granularity_is_a_power_of_two,
    recommended_granularity_is_a_multiple,
    multiples_of_the_granularity_work,
    create_refuses_part_of_a_granule,
    map_refuses_an_address_within_a_granule,
    map_refuses_part_of_a_granule,
    zero_sizes_are_refused,
)
