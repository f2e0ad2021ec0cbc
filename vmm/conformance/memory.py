"""Rules about physical memory: handles, how long memory lives, and what happens when there is none left."""

from __future__ import annotations

from ..driver import OutOfMemory
from .rule import Violation, expect, refused, rule
from .sandbox import Sandbox

SLACK = 64 << 20
"""Bytes by which the free memory of a GPU may change without us."""


def slack(box: Sandbox) -> int:
    """Tolerance for free memory, in bytes: a GPU has other users, a budget on a CPU has none."""
    return SLACK if box.driver.device.type == "cuda" else 0


def free_bytes(box: Sandbox) -> int:
    return box.driver.memory_info()[0]


@rule("Free memory is between nothing and all of it.", "cuMemGetInfo")
def memory_info_is_consistent(box: Sandbox) -> str:
    free, total = box.driver.memory_info()
    expect(0 < free <= total, f"{free:,} of {total:,} bytes are free")
    expect(free >= 16 * box.page, f"only {free:,} bytes are free: too few for these rules")
    return f"{free:,} of {total:,} bytes are free"


@rule(
    "Creating takes memory at once; releasing an unmapped handle gives it back.",
    "cuMemCreate, cuMemRelease",
    measures=True,
)
def create_takes_memory_and_release_gives_it_back(box: Sandbox) -> None:
    pages = max(8, 2 * slack(box) // box.page)
    size = pages * box.page
    before = free_bytes(box)
    handle = box.create(pages)
    taken = before - free_bytes(box)
    expect(taken >= size - slack(box), f"{size:,} bytes were created, {taken:,} less are free")
    box.release(handle)
    missing = before - free_bytes(box)
    expect(missing <= slack(box), f"{missing:,} bytes are missing afterwards")


@rule(
    "Creating more than there is fails with OUT_OF_MEMORY, takes nothing, and can be recovered from.",
    "cuMemCreate",
    measures=True,
)
def exhaustion_is_out_of_memory(box: Sandbox) -> str:
    before = free_bytes(box)
    chunk = max(1, before // 8 // box.page)
    handles: list[int] = []
    try:
        while len(handles) < 64:
            handles.append(box.create(chunk))
    except OutOfMemory as error:
        text = error.name
    else:
        raise Violation(f"{64 * chunk * box.page:,} bytes were created where {before:,} were free")
    expect(
        len(handles) >= 6,
        f"{before:,} bytes were free, but only {len(handles)} x {chunk * box.page:,} to be had",
    )
    box.release(handles.pop())
    va = box.reserve(chunk)
    box.map(va, box.create(chunk), chunk)  # what one gave back another can have
    box.unmap(va, chunk)
    for handle in handles:
        box.release(handle)
    box.free(va)
    missing = before - chunk * box.page - free_bytes(box)
    expect(missing <= slack(box), f"{missing:,} bytes are missing afterwards")
    return f"{text} after {len(handles) + 1} x {chunk * box.page:,} bytes"


@rule("Two handles are two pieces of memory.", "cuMemCreate")
def handles_are_separate_memory(box: Sandbox) -> None:
    va = box.usable(4)
    for index in range(4):
        box.write(va + index * box.page, 20 + index)
    for index in range(4):
        box.expect_value(va + index * box.page, 20 + index, f"handle {index}")


@rule(
    "Memory whose handle is released stays as it is while it is mapped, and is free after that.",
    "cuMemRelease",
    measures=True,
)
def memory_outlives_its_handle_while_mapped(box: Sandbox) -> None:
    pages = max(4, 2 * slack(box) // box.page)
    va, handle = box.reserve(pages), box.create(pages)
    box.map(va, handle, pages)
    box.grant(va, pages)
    box.write(va, 5, pages)
    before = free_bytes(box)
    box.release(handle)
    box.expect_value(va, 5, "after release", pages)
    box.write(va, 6, pages)
    box.expect_value(va, 6, "written after release", pages)
    given = free_bytes(box) - before
    expect(given <= slack(box), f"{given:,} bytes were given back while mapped")
    box.unmap(va, pages)
    given = free_bytes(box) - before
    expect(given >= pages * box.page - slack(box), f"only {given:,} bytes came back with the last mapping")


@rule("Memory that is mapped nowhere keeps its content while its handle is held.", "cuMemUnmap")
def memory_outlives_its_mappings_while_held(box: Sandbox) -> None:
    va, handle = box.reserve(4), box.create()
    for index in range(4):
        at = va + index * box.page
        box.map(at, handle)
        box.grant(at)
        if index:
            box.expect_value(at, 30 + index - 1, f"mapping {index}")
        box.write(at, 30 + index)
        box.unmap(at)


@rule("A released handle cannot be mapped again.", "cuMemRelease", defined=False)
def a_released_handle_cannot_be_mapped(box: Sandbox) -> str:
    va, handle = box.reserve(2), box.create()
    box.map(va, handle)
    box.release(handle)
    return refused("a released handle", box.driver.map, va + box.page, box.page, handle)


@rule("A handle that was never created cannot be mapped.", "cuMemMap", defined=False)
def an_unknown_handle_cannot_be_mapped(box: Sandbox) -> str:
    return refused("handle 12345", box.driver.map, box.reserve(1), box.page, 12345)


RULES = (
    memory_info_is_consistent,
    create_takes_memory_and_release_gives_it_back,
    exhaustion_is_out_of_memory,
    handles_are_separate_memory,
    memory_outlives_its_handle_while_mapped,
    memory_outlives_its_mappings_while_held,
    a_released_handle_cannot_be_mapped,
    an_unknown_handle_cannot_be_mapped,
)
