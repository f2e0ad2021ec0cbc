"""The books against a plain model: a list of granules, each empty or covered by a mapping."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vattn.vmm.driver import Access, DriverError
from vattn.vmm.shadow import Shadow

GRANULE = 1 << 12
LENGTH = 24  # granules in the reservation


class Model:
    def __init__(self) -> None:
        self.cells: list[int | None] = [None] * LENGTH  # index of the mapping's first granule
        self.sizes: dict[int, int] = {}

    def can_map(self, at: int, size: int) -> bool:
        return at + size <= LENGTH and not any(cell is not None for cell in self.cells[at : at + size])

    def whole(self, at: int, size: int) -> bool:
        span = self.cells[at : at + size]
        return (
            at + size <= LENGTH
            and all(cell is not None for cell in span)
            and span[0] == at
            and span[-1] is not None
            and span[-1] + self.sizes[span[-1]] == at + size
        )


step = st.tuples(
    st.sampled_from(["map", "unmap", "access"]),
    st.integers(0, LENGTH - 1),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(step, max_size=40))
def test_any_sequence_of_sizes_agrees_with_the_model(steps: list[tuple[str, int, int]]) -> None:
    shadow = Shadow(GRANULE, budget=1 << 40)
    base = 1 << 30
    shadow.add_reservation(base, LENGTH * GRANULE)
    model = Model()
    for kind, at, size in steps:
        va, length = base + at * GRANULE, size * GRANULE
        if kind == "map":
            handle = shadow.add_allocation(length).handle
            allowed = model.can_map(at, size)
            try:
                reservation, allocation = shadow.check_map(va, length, handle)
            except DriverError:
                assert not allowed
                shadow.release(handle)
            else:
                assert allowed
                shadow.add_mapping(reservation, va, allocation)
                model.cells[at : at + size] = [at] * size
                model.sizes[at] = size
        else:
            allowed = model.whole(at, size)
            try:
                reservation, mappings = shadow.covering(kind, va, length)
            except DriverError:
                assert not allowed
            else:
                assert allowed
                if kind == "unmap":
                    shadow.remove_mappings(reservation, mappings)
                    model.cells[at : at + size] = [None] * size
                else:
                    for mapping in mappings:
                        mapping.access = Access.READ
        seen = [
            ((m.va - base) // GRANULE, m.size // GRANULE) for m in shadow.mappings(base, LENGTH * GRANULE)
        ]
        assert seen == [
            (first, model.sizes[first]) for first in sorted({c for c in model.cells if c is not None})
        ]
        shadow.check()


def test_a_page_of_one_size_costs_one_entry_however_large() -> None:
    base = 1 << 40
    shadow = Shadow(GRANULE, budget=1 << 40)
    shadow.add_reservation(base, 1 << 40)
    for index in range(4):
        allocation = shadow.add_allocation(1 << 30)
        reservation, _ = shadow.check_map(base + (index << 30), 1 << 30, allocation.handle)
        shadow.add_mapping(reservation, base + (index << 30), allocation)
    assert len(reservation.slots) == 4


def test_a_smaller_page_later_splits_the_slots_and_nothing_else() -> None:
    shadow = Shadow(GRANULE, budget=1 << 40)
    shadow.add_reservation(1 << 40, 64 * GRANULE)
    for at, size in ((0, 16), (32, 16), (16, 1)):
        allocation = shadow.add_allocation(size * GRANULE)
        va = (1 << 40) + at * GRANULE
        reservation, _ = shadow.check_map(va, size * GRANULE, allocation.handle)
        shadow.add_mapping(reservation, va, allocation)
    shadow.check()
    found = shadow.mappings(1 << 40, 64 * GRANULE)
    assert [(m.va - (1 << 40)) // GRANULE for m in found] == [0, 16, 32]


def test_the_books_notice_a_wrong_count() -> None:
    shadow = Shadow(GRANULE, budget=1 << 20)
    allocation = shadow.add_allocation(GRANULE)
    shadow.check()
    allocation.mapped += 1
    with pytest.raises(AssertionError, match="miscounted"):
        shadow.check()
