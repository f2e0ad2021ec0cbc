"""Copy the part of a page that two requests can't share, because one of them will write behind it.

    source   | shared | shared | tail … |        full pages are mapped at both places;
    target   | shared | shared | tail   |        the tail's bytes go to a page of the target's own

Bytes, not tokens: a token may straddle two pages, and its first part may lie on a shared, read-only one.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from vattn.kv.slots import PageSet, Slots
from vattn.vmm.driver import DriverError
from vattn.vmm.retire import Event


def device_event(device: torch.device) -> Event | None:
    """Marks the work submitted so far; None on a CPU, where it is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class TailCopier:
    """Copies within the pages of `slots`. `scratch`: a slot set apart, to map pages mapped nowhere else."""

    def __init__(self, slots: Slots, scratch: int | None) -> None:
        space = slots.space
        self._slots = slots
        self._scratch = scratch
        self._page = space.page_bytes
        self._bytes: torch.Tensor | None = space.tensor(
            (slots.ranges, slots.count, space.pitch), None, torch.uint8
        )

    def bytes_of(self, slot: int, start: int, end: int) -> torch.Tensor:
        """uint8 `[ranges, end - start]`: a view of these bytes of each of a slot's ranges."""
        assert self._bytes is not None
        return self._bytes[:, slot, start:end]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Bytes `start .. end` of each range, from one slot to another."""
        self.bytes_of(target, start, end).copy_(self.bytes_of(source, start, end))

    def copy_set(self, pages: PageSet, target: int, start: int, end: int) -> None:
        """The same from pages that hold these bytes but may be mapped nowhere: they all lie on one page."""
        assert self._bytes is not None and self._scratch is not None
        first = start // self._page * self._page
        slots, scratch = self._slots, self._scratch
        slots.alias(scratch, [pages])
        try:
            self._bytes[:, target, start:end] = self._bytes[:, scratch, start - first : end - first]
        finally:
            slots.space.retirement.submit(device_event(self._bytes.device))  # unmapped after the copy
            with suppress(DriverError):  # the copy is done; the slot's next use unmaps what is left there
                slots.truncate(scratch, 0)

    def close(self) -> None:
        self._bytes = None
