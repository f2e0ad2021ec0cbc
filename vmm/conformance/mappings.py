"""Rules about mapping memory to addresses and unmapping it."""

from __future__ import annotations

import random
import threading

from ..driver import MappedRange
from .rule import Violation, expect, refused, rule
from .sandbox import RW, Sandbox


@rule("Nothing is mapped where something is.", "cuMemMap")
def map_refuses_mapped_addresses(box: Sandbox) -> str:
    va = box.usable(1, room=1)
    box.write(va, 3)
    name = refused("a second handle", box.driver.map, va, box.page, box.create())
    box.expect_value(va, 3, "after the refusal")
    return name


@rule("A mapping does not reach into another, from either side.", "cuMemMap")
def map_refuses_to_overlap_a_mapping(box: Sandbox) -> str:
    va, two = box.reserve(4), box.create(2)
    box.map(va + box.page, box.create())
    refused("its end on a mapping", box.driver.map, va, 2 * box.page, two)
    name = refused("its start on a mapping", box.driver.map, va + box.page, 2 * box.page, two)
    box.map(va + 2 * box.page, two, 2)
    return name


@rule("A mapping is no larger than its memory.", "cuMemMap")
def map_refuses_more_than_the_handle(box: Sandbox) -> str:
    va = box.reserve(4)
    return refused("two pages of one", box.driver.map, va, 2 * box.page, box.create())


@rule("Memory is mapped at reserved addresses only.", "cuMemMap")
def map_refuses_addresses_that_are_not_reserved(box: Sandbox) -> str:
    va, handle = box.reserve(1), box.create()
    box.free(va)
    return refused("freed addresses", box.driver.map, va, box.page, handle)


@rule("A mapping is unmapped as a whole.", "cuMemUnmap")
def unmap_refuses_part_of_a_mapping(box: Sandbox) -> str:
    va = box.reserve(4)
    box.map(va, box.create(4), 4)
    box.grant(va, 4)
    box.write(va, 8, 4)
    refused("the first page", box.driver.unmap, va, box.page)
    refused("the last page", box.driver.unmap, va + 3 * box.page, box.page)
    name = refused("the middle", box.driver.unmap, va + box.page, 2 * box.page)
    box.expect_value(va, 8, "after the refusals", 4)
    return name


@rule("Adjacent mappings are unmapped in one call.", "vattn")
def unmap_takes_several_mappings_in_one_call(box: Sandbox) -> None:
    va = box.reserve(6)
    for offset, pages in ((0, 1), (1, 2), (3, 1), (4, 2)):
        box.map(va + offset * box.page, box.create(pages), pages)
    box.grant(va, 6)
    box.unmap(va, 4)
    expect(
        [m.va for m in box.mappings(va, 6)] == [va + 4 * box.page], "other mappings are left than should be"
    )
    box.map(va, box.create(4), 4)  # the addresses are free again


@rule("Unmapping does not skip a gap, nor take what is not mapped.", "cuMemUnmap", defined=False)
def unmap_refuses_a_gap(box: Sandbox) -> str:
    va = box.reserve(4)
    for index in (0, 2):
        box.map(va + index * box.page, box.create())
    refused("unmapped addresses", box.driver.unmap, va + 3 * box.page, box.page)
    name = refused("a gap", box.driver.unmap, va, 3 * box.page)
    expect(len(box.mappings(va, 4)) == 2, "a refused call unmapped something")
    return name


@rule("Pages may be mapped and unmapped in any order.", "cuMemMap, cuMemUnmap")
def order_does_not_matter(box: Sandbox) -> None:
    draw = random.Random(1)
    count = 12
    va, handles = box.reserve(count), [box.create() for _ in range(count)]
    order = list(range(count))
    for round_ in range(3):
        draw.shuffle(order)
        for index in order:
            box.map(va + index * box.page, handles[index])
        box.grant(va, count)
        for index in order:
            if round_:
                box.expect_value(va + index * box.page, 100 * (round_ % 2) + index, f"round {round_}")
            box.write(va + index * box.page, 100 * ((round_ + 1) % 2) + index)
        draw.shuffle(order)
        for index in order:
            box.unmap(va + index * box.page)
        expect(not box.mappings(va, count), "something is left")


@rule("Unmapped memory can be mapped again, elsewhere, with what it held.", "cuMemUnmap")
def memory_moves_between_addresses(box: Sandbox) -> None:
    va, handle = box.reserve(3), box.create()
    box.map(va, handle)
    box.grant(va)
    box.write(va, 42)
    box.unmap(va)
    box.map(va + 2 * box.page, handle)
    box.grant(va + 2 * box.page)
    box.expect_value(va + 2 * box.page, 42, "at its new address")
    box.map(va, box.create())  # and the old one takes something else
    box.grant(va)
    box.write(va, 1)
    box.expect_value(va + 2 * box.page, 42, "after a write to its old address")


@rule(
    "The driver says what is mapped where: address, handle and access.",
    "cuMemRetainAllocationHandle, cuMemGetAccess",
)
def the_driver_names_what_is_mapped(box: Sandbox) -> None:
    va, one, two = box.reserve(4), box.create(), box.create(2)
    expect(box.mappings(va, 4) == [], "something is mapped in a new reservation")
    box.map(va, one)
    box.map(va + 2 * box.page, two, 2)
    box.grant(va + 2 * box.page, 2)
    seen = box.mappings(va, 4)
    expect(
        [m[:3] for m in seen] == [(va, box.page, one), (va + 2 * box.page, 2 * box.page, two)],
        f"it says {seen}",
    )
    expect(seen[-1] == MappedRange(va + 2 * box.page, 2 * box.page, two, RW), f"it says {seen[-1]}")


@rule("Threads may map and unmap at the same time.", "vattn")
def threads_may_map_at_once(box: Sandbox) -> None:
    rounds, threads = 30, 4
    va = box.reserve(threads)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        at = va + index * box.page
        driver = box.driver
        try:
            for _ in range(rounds):
                handle = driver.create(box.page)
                driver.map(at, box.page, handle)
                driver.set_access(at, box.page, RW)
                driver.release(handle)
                driver.unmap(at, box.page)
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise Violation(f"{len(errors)} of {threads} threads failed: {errors[0]}") from errors[0]
    expect(not box.mappings(va, threads), "something is left")


RULES = (
    map_refuses_mapped_addresses,
    map_refuses_to_overlap_a_mapping,
    map_refuses_more_than_the_handle,
    map_refuses_addresses_that_are_not_reserved,
    unmap_refuses_part_of_a_mapping,
    unmap_takes_several_mappings_in_one_call,
    unmap_refuses_a_gap,
    order_does_not_matter,
    memory_moves_between_addresses,
    the_driver_names_what_is_mapped,
    threads_may_map_at_once,
)
