"""Rules about access rights. The rules in `faults` check that they are enforced."""

from __future__ import annotations

from ..driver import Access
from .rule import expect, refused, rule
from .sandbox import RW, Sandbox


@rule("A mapping starts without access, also where one with access was before.", "cuMemUnmap")
def mappings_start_without_access(box: Sandbox) -> None:
    va, handle = box.reserve(1), box.create()
    for _ in range(2):
        box.map(va, handle)
        given = box.access(va)
        expect(given is Access.NONE, f"a new mapping has {given.name}")
        box.grant(va)
        box.unmap(va)


@rule("One call grants access to many adjacent mappings of any sizes.", "cuMemSetAccess")
def one_call_grants_access_to_many_mappings(box: Sandbox) -> None:
    va = box.reserve(18)
    for index in range(14):
        box.map(va + index * box.page, box.create())
    box.map(va + 14 * box.page, box.create(3), 3)
    box.grant(va, 17)
    expect(all(m.access is RW for m in box.mappings(va, 18)), "not all of them have it")
    box.write(va, 77, 17)
    box.expect_value(va, 77, "over all of them", 17)


@rule("Access is granted where everything is mapped, not over a gap.", "cuMemSetAccess")
def set_access_refuses_a_gap(box: Sandbox) -> str:
    va = box.reserve(4)
    for index in (0, 2):
        box.map(va + index * box.page, box.create())
    refused("nothing but a gap", box.driver.set_access, va + box.page, box.page, RW)
    refused("a gap at the end", box.driver.set_access, va, 2 * box.page, RW)
    return refused("a gap in the middle", box.driver.set_access, va, 3 * box.page, RW)


@rule("A refused grant changes nothing.", "vattn", defined=False)
def a_refused_grant_changes_nothing(box: Sandbox) -> None:
    va = box.reserve(4)
    for index in (0, 2):
        box.map(va + index * box.page, box.create())
    refused("a gap", box.driver.set_access, va, 3 * box.page, RW)
    given = [m.access.name for m in box.mappings(va, 4)]
    expect(given == ["NONE", "NONE"], f"access is {given} afterwards")


@rule("Access is granted to whole mappings.", "cuMemSetAccess", defined=False)
def set_access_refuses_part_of_a_mapping(box: Sandbox) -> str:
    va = box.reserve(2)
    box.map(va, box.create(2), 2)
    refused("its first page", box.driver.set_access, va, box.page, RW)
    return refused("its last page", box.driver.set_access, va + box.page, box.page, RW)


@rule("Each mapping of the same memory has its own access.", "cuMemSetAccess")
def aliases_have_their_own_access(box: Sandbox) -> None:
    va, handle = box.reserve(2), box.create()
    box.map(va, handle)
    box.map(va + box.page, handle)
    box.grant(va)
    given = [m.access for m in box.mappings(va, 2)]
    expect(given == [RW, Access.NONE], f"granted to one, they have {[a.name for a in given]}")


@rule("Access can be taken away and given back; the content stays.", "cuMemSetAccess")
def access_can_be_taken_and_given_back(box: Sandbox) -> None:
    va = box.usable()
    box.write(va, 9)
    box.driver.synchronize()
    box.grant(va, access=Access.NONE)
    given = box.access(va)
    expect(given is Access.NONE, f"taken away, it is {given.name}")
    box.grant(va)
    box.expect_value(va, 9, "with access again")


@rule(
    "Memory that is written at one address can be read at another where it is read-only.", "CUmemAccess_flags"
)
def a_read_only_alias_can_be_read(box: Sandbox) -> None:
    va, alias = box.aliases()
    box.grant_read_only(alias)
    box.write(va, 11)
    box.expect_value(alias, 11, "at the read-only address")


RULES = (
    mappings_start_without_access,
    one_call_grants_access_to_many_mappings,
    set_access_refuses_a_gap,
    a_refused_grant_changes_nothing,
    set_access_refuses_part_of_a_mapping,
    aliases_have_their_own_access,
    access_can_be_taken_and_given_back,
    a_read_only_alias_can_be_read,
)
