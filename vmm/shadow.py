"""The books of a driver: reservations, allocations and mappings, and CUDA's rules about them.

`HostDriver` and `AccountingDriver` check a call here before they act and record it afterwards. A refused call
raises the error code of the CUDA driver. No memory is touched in this file.

    reservation   [ slot | slot | slot | slot | slot | slot ]      slot = gcd of the sizes mapped in it so far
    mappings      [ A    | .    | B    | B    | .    | .    ]      A one slot, B (a larger allocation) two

Each covered slot points at its mapping, so finding the mapping at an address takes one dictionary look-up for
any number of mappings. If a mapping does not fit the slot size, the reservation is re-indexed with a smaller
slot size. That can happen at most log2(slot / granularity) times.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import count

from .driver import INVALID_VALUE, Access, DriverError, MappedRange, OutOfMemory


def invalid(call: str, hint: str) -> DriverError:
    """CUDA_ERROR_INVALID_VALUE with the reason."""
    return DriverError(call, INVALID_VALUE, hint=hint)


class Allocation:
    """Physical memory. It exists while its handle is held or it is mapped."""

    __slots__ = ("charged", "descriptor", "handle", "held", "mapped", "offset", "size")

    def __init__(self, handle: int, size: int, charged: bool) -> None:
        self.handle = handle
        self.size = size
        self.charged = charged  # counts against this driver's budget (imported memory does not)
        self.held = True  # its handle is not released yet
        self.mapped = 0  # number of mappings
        self.descriptor = -1  # where the memory is, set by a driver that has memory
        self.offset = 0


class Mapping:
    """One allocation at one address."""

    __slots__ = ("access", "allocation", "size", "va")

    def __init__(self, va: int, size: int, allocation: Allocation) -> None:
        self.va = va
        self.size = size
        self.allocation = allocation
        self.access = Access.NONE


class Reservation:
    """A range of addresses and the mappings in it."""

    __slots__ = ("base", "end", "slot_bytes", "slots")

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.end = base + size
        self.slot_bytes = 0  # 0: nothing was ever mapped
        self.slots: dict[int, Mapping] = {}

    def fit(self, offset: int, size: int) -> int:
        """The slot size with which a mapping at `offset` is whole slots. Re-indexes if that is smaller."""
        unit = math.gcd(self.slot_bytes, offset, size)
        if unit != self.slot_bytes:
            if self.slots:
                old, self.slots = self.slots, {}
                scale = self.slot_bytes // unit
                for index, mapping in old.items():
                    for part in range(index * scale, (index + 1) * scale):
                        self.slots[part] = mapping
            else:
                unit = math.gcd(offset, size)
            self.slot_bytes = unit
        return unit


class Shadow:
    """The books. Not thread-safe: the driver holds its lock during a check and the change that follows."""

    def __init__(self, granularity: int, budget: int) -> None:
        self.granularity = granularity
        self.budget = budget
        self.used = 0  # bytes of charged allocations alive
        self.reservations: dict[int, Reservation] = {}
        self.allocations: dict[int, Allocation] = {}  # by handle, until released
        self.mapping_count = 0
        self._bases: list[int] = []
        self._handles = count(1)  # never used twice, so a stale handle is always recognised

    # Addresses

    def check_reserve(self, size: int, align: int) -> int:
        """Check a reservation and return the alignment to use."""
        align = align or self.granularity
        if size <= 0 or size % self.granularity:
            raise invalid("reserve", f"size {size:,} is not a positive multiple of {self.granularity:,}")
        if align & (align - 1):
            raise invalid("reserve", f"alignment {align:,} is not a power of two")
        return max(align, self.granularity)

    def add_reservation(self, va: int, size: int) -> None:
        self.reservations[va] = Reservation(va, size)
        insort(self._bases, va)

    def check_free(self, va: int, size: int) -> Reservation:
        reservation = self.reservations.get(va)
        if reservation is None or reservation.end != va + size:
            raise invalid("free", f"[{va:#x}, +{size:,}) is not a reservation as it was made")
        if reservation.slots:
            raise invalid("free", f"[{va:#x}, +{size:,}) still holds mappings: unmap them first")
        return reservation

    def remove_reservation(self, va: int) -> None:
        del self.reservations[va]
        del self._bases[bisect_right(self._bases, va) - 1]

    def _within(self, call: str, va: int, size: int) -> Reservation:
        if size <= 0 or va % self.granularity or size % self.granularity:
            raise invalid(call, f"[{va:#x}, +{size:,}) is not whole pages of {self.granularity:,} bytes")
        index = bisect_right(self._bases, va) - 1
        if index >= 0:
            reservation = self.reservations[self._bases[index]]
            if va + size <= reservation.end:
                return reservation
        raise invalid(call, f"[{va:#x}, +{size:,}) is not within one reservation")

    # Memory

    def check_create(self, size: int) -> None:
        if size <= 0 or size % self.granularity:
            raise invalid("create", f"size {size:,} is not a positive multiple of {self.granularity:,}")
        if self.used + size > self.budget:
            raise OutOfMemory(
                "create", hint=f"{size:,} bytes asked, {self.used:,} of the budget of {self.budget:,} in use"
            )

    def add_allocation(self, size: int, charged: bool = True) -> Allocation:
        allocation = Allocation(next(self._handles), size, charged)
        self.allocations[allocation.handle] = allocation
        if charged:
            self.used += size
        return allocation

    def allocation(self, call: str, handle: int) -> Allocation:
        allocation = self.allocations.get(handle)
        if allocation is None:
            raise invalid(call, f"handle {handle} was never created or is released")
        return allocation

    def release(self, handle: int) -> Allocation | None:
        """Forget the handle. Returns the allocation if nothing holds it any more."""
        allocation = self.allocation("release", handle)
        del self.allocations[handle]
        allocation.held = False
        return self._settle(allocation)

    def _settle(self, allocation: Allocation) -> Allocation | None:
        if allocation.held or allocation.mapped:
            return None
        if allocation.charged:
            self.used -= allocation.size
        return allocation

    # Mappings

    def check_map(self, va: int, size: int, handle: int) -> tuple[Reservation, Allocation]:
        reservation = self._within("map", va, size)
        allocation = self.allocation("map", handle)
        if allocation.size != size:
            raise invalid(
                "map", f"the handle is {allocation.size:,} bytes, the mapping {size:,}: map all of it"
            )
        offset = va - reservation.base
        unit = reservation.fit(offset, size)
        first = offset // unit
        slots = reservation.slots
        for slot in range(first, first + size // unit):
            if slot in slots:
                raise invalid("map", f"{reservation.base + slot * unit:#x} is mapped already")
        return reservation, allocation

    def add_mapping(self, reservation: Reservation, va: int, allocation: Allocation) -> None:
        mapping = Mapping(va, allocation.size, allocation)
        unit = reservation.slot_bytes
        first = (va - reservation.base) // unit
        for slot in range(first, first + allocation.size // unit):
            reservation.slots[slot] = mapping
        allocation.mapped += 1
        self.mapping_count += 1

    def covering(self, call: str, va: int, size: int) -> tuple[Reservation, list[Mapping]]:
        """The mappings that exactly fill [va, va + size): whole ones, without a gap."""
        reservation = self._within(call, va, size)
        unit = reservation.slot_bytes
        base = reservation.base
        slots = reservation.slots
        found: list[Mapping] = []
        position, end = va, va + size
        while position < end:
            mapping = slots.get((position - base) // unit) if unit else None
            if mapping is None:
                raise invalid(call, f"nothing is mapped at {position:#x}")
            if mapping.va != position or position + mapping.size > end:
                raise invalid(call, f"[{va:#x}, +{size:,}) cuts the mapping at {mapping.va:#x}")
            found.append(mapping)
            position += mapping.size
        return reservation, found

    def remove_mappings(self, reservation: Reservation, mappings: list[Mapping]) -> list[Allocation]:
        """Forget mappings. Returns the allocations that nothing holds any more."""
        unit = reservation.slot_bytes
        slots = reservation.slots
        gone = []
        for mapping in mappings:
            first = (mapping.va - reservation.base) // unit
            for slot in range(first, first + mapping.size // unit):
                del slots[slot]
            allocation = mapping.allocation
            allocation.mapped -= 1
            if self._settle(allocation) is not None:
                gone.append(allocation)
        self.mapping_count -= len(mappings)
        return gone

    def mappings(self, va: int, size: int) -> list[MappedRange]:
        """All mappings in [va, va + size), by address."""
        reservation = self._within("mappings", va, size)
        unit = reservation.slot_bytes
        found: list[MappedRange] = []
        if not reservation.slots:
            return found
        first, last = (va - reservation.base) // unit, (va + size - reservation.base - 1) // unit
        slots = reservation.slots
        if last - first < len(slots):
            indices = [slot for slot in range(first, last + 1) if slot in slots]
        else:
            indices = sorted(slot for slot in slots if first <= slot <= last)
        for slot in indices:
            m = slots[slot]
            if not found or found[-1].va != m.va:
                found.append(MappedRange(m.va, m.size, m.allocation.handle, m.access))
        return found

    def clear(self) -> None:
        """Forget everything, after the driver has given it all back."""
        self.reservations.clear()
        self.allocations.clear()
        self._bases.clear()
        self.mapping_count = self.used = 0

    def check(self) -> None:
        """Recount everything from the mappings. Raises AssertionError if the books disagree."""
        mapped: dict[int, int] = {}
        alive = dict(self.allocations)
        total = 0
        for reservation in self.reservations.values():
            covered = 0
            unique = {id(m): m for m in reservation.slots.values()}
            for m in unique.values():
                assert reservation.base <= m.va and m.va + m.size <= reservation.end, "mapping outside"
                mapped[m.allocation.handle] = mapped.get(m.allocation.handle, 0) + 1
                alive[m.allocation.handle] = m.allocation
                covered += m.size
            assert covered == len(reservation.slots) * reservation.slot_bytes, "slots and mappings disagree"
            total += len(unique)
        assert total == self.mapping_count, "mapping count is wrong"
        for handle, allocation in alive.items():
            assert allocation.mapped == mapped.get(handle, 0), f"handle {handle}: mappings miscounted"
        assert self.used == sum(a.size for a in alive.values() if a.charged), "bytes in use miscounted"
        assert self._bases == sorted(self.reservations), "reservation index is wrong"
