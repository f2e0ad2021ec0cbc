"""All rules, in the order in which they run. The ones that end a process come last."""

from __future__ import annotations

from . import access, contents, faults, mappings, memory, reservations, sharing, sizes
from .rule import Rule

RULES: tuple[Rule, ...] = (
    *sizes.RULES,
    *reservations.RULES,
    *mappings.RULES,
    *access.RULES,
    *contents.RULES,
    *memory.RULES,
    *sharing.RULES,
    *faults.RULES,
)
