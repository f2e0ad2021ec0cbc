"""Rules about the contents seen at addresses: through aliases, and through tensors over ranges."""

from __future__ import annotations

from .rule import expect, rule
from .sandbox import Sandbox


@rule(
    "A write at one address is read at another of the same memory, both ways.",
    "Programming Guide: virtual aliasing",
)
def aliases_show_the_same_memory(box: Sandbox) -> None:
    one, other = box.aliases(2)
    box.write(one, 1, 2)
    box.expect_value(other, 1, "written at the first address", 2)
    box.write(other, 2, 2)
    box.expect_value(one, 2, "written at the second address", 2)


@rule("Memory may have many addresses, in several reservations.", "Programming Guide: virtual aliasing")
def memory_may_have_many_addresses(box: Sandbox) -> str:
    handle, addresses = box.create(), []
    for _ in range(4):
        va = box.reserve(8)
        addresses += [va + index * box.page for index in range(8)]
    for at in addresses:
        box.map(at, handle)
        box.grant(at)
    box.write(addresses[5], 99)
    for at in addresses:
        box.expect_value(at, 99, "at an alias")
    return f"{len(addresses)} addresses"


@rule("A tensor spans the mappings under it as if they were one.", "vattn")
def a_tensor_spans_mappings(box: Sandbox) -> None:
    va = box.usable(5)
    whole = box.tensor(va, 5 * box.page)
    whole.fill_(3)
    whole[box.page - 8 : box.page + 8] = 4
    expect(int(whole.sum()) == 3 * 5 * box.page + 16, "what was written over a border is not what is there")
    expect(whole.data_ptr() == va, "the tensor has another address")


@rule("A tensor may view addresses at which nothing is mapped, as long as nobody touches it.", "vattn")
def a_tensor_may_view_unmapped_addresses(box: Sandbox) -> None:
    va = box.reserve(4)
    view = box.tensor(va, 4 * box.page).view(4, box.page)
    expect(view.shape == (4, box.page) and view[3].data_ptr() == va + 3 * box.page, "the view is elsewhere")
    expect(view.transpose(0, 1).stride() == (1, box.page), "its strides are not what was asked")


@rule("Memory mapped under a tensor is reached through it, also when mapped later.", "vattn")
def a_tensor_reaches_what_is_mapped_later(box: Sandbox) -> None:
    va = box.reserve(4)
    view = box.tensor(va, 4 * box.page).view(4, box.page)
    for index in (0, 2):
        at = va + index * box.page
        box.map(at, box.create())
        box.grant(at)
        view[index].fill_(50 + index)
    box.expect_value(va, 50, "first page")
    box.expect_value(va + 2 * box.page, 52, "third page")
    box.unmap(va)
    box.map(va, box.create())
    box.grant(va)
    view[0].fill_(60)
    box.expect_value(va, 60, "after mapping anew")


RULES = (
    aliases_show_the_same_memory,
    memory_may_have_many_addresses,
    a_tensor_spans_mappings,
    a_tensor_may_view_unmapped_addresses,
    a_tensor_reaches_what_is_mapped_later,
)
