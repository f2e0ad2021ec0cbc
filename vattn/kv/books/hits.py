"""What a new request can take over from earlier requests: shared units, a tail to copy, or a whole row.

    cached text   | entry | entry | entry | entry |      entries of the prefix cache: their borders need
    units         |    unit    |    unit    |  unit …    not match the borders of units
    a hit         |   shared   |   shared   | tail → copied, because the request writes behind it

An entry holds every unit on which its bytes lie. Two neighbouring entries of a chain may each name a unit for
the same position, and the two may differ. The unit of the later entry is used: the request that wrote it had
all of the text so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vattn.kv.books.counts import Units
from vattn.kv.books.prefix import Entry, PrefixCache, Text
from vattn.kv.books.units import UnitLayout

Memory = tuple[tuple[int, int], ...]
"""What a prefix entry holds: (position in the row, unit at that position)."""

NO_UNITS: Units = np.empty(0, np.int32)


@dataclass(eq=False)
class RequestText(Text[Memory]):
    """A request's text, and the units on which its cached beginning lies."""

    units: Units = field(default_factory=lambda: NO_UNITS)
    """Unit numbers by position, derived from the entries of `match`; rebuilt from entry `unchanged` on."""


@dataclass(frozen=True, eq=False)
class Hit:
    """The prefix of a request that need not be computed. Empty by default."""

    cached: int = 0
    """Number of tokens."""
    shared: Units = field(default_factory=lambda: NO_UNITS)
    """Units that hold only these tokens, to be shared."""
    tail: int | None = None
    """The unit behind them, to be copied, if the last of these tokens lie on it; else None."""
    entries: Sequence[Entry[Memory]] = ()

    def beside(self) -> Units:
        """All units of the hit."""
        return self.shared if self.tail is None else np.append(self.shared, np.int32(self.tail))


def find_hit(
    prefix: PrefixCache[Memory], layout: UnitLayout, text: RequestText, *, copy_tails: bool
) -> Hit:
    """The longest cached prefix that leaves at least one token to compute.

    Without `copy_tails` the prefix ends at the border of a unit.
    """
    entries = prefix.match(text)
    cached = min(len(entries) * prefix.unit, len(text.token_ids) - 1)
    full, rest = layout.whole(max(cached, 0))
    if rest and not copy_tails:
        cached, rest = layout.tokens(full), 0
    if cached <= 0:
        return Hit()
    _derive_units(text, layout)
    return Hit(cached, text.units[:full], int(text.units[full]) if rest else None, entries)


def _derive_units(text: RequestText, layout: UnitLayout) -> None:
    """Update `text.units` from the entries that were found."""
    if text.unchanged == len(text.found):
        return
    if not len(text.units):
        text.units = np.zeros(layout.width, np.int32)
    elif text.unchanged < len(text.found):
        text.units = text.units.copy()  # earlier hits are views of it
    for entry in text.found[text.unchanged :]:
        for position, unit in entry.memory:
            text.units[position] = unit
    text.unchanged = len(text.found)


@dataclass(frozen=True)
class Content:
    """What a parked row holds."""

    token_ids: Sequence[int]
    salt: str
    written: int
    """Tokens whose K and V are in the row."""
    entered: int
    """Number of leading entries of its text that were in the prefix cache."""
    key: bytes
    """Key of the last of these entries."""


def continuation(
    contents: Mapping[int, Content], token_ids: Sequence[int], hit: Hit
) -> tuple[int, int] | None:
    """Find a parked row that this request can continue. Returns (row, cached tokens), or None.

    The row's last prefix-cache entry must be the last entry of `hit`, because the request overwrites whatever
    follows it. Tokens are compared as well, since different texts may have equal keys.
    """
    if not hit.entries:
        return None
    last = hit.entries[-1]
    known = len(hit.entries) * len(last.tokens)
    if known > len(token_ids) - 1:
        return None
    best: tuple[int, int] | None = None
    for row, content in contents.items():
        if content.key != last.key or content.salt != last.salt:
            continue
        if content.token_ids[:known] != token_ids[:known]:
            continue
        cached, most = known, min(content.written, len(token_ids) - 1)
        while cached < most and content.token_ids[cached] == token_ids[cached]:
            cached += 1
        if best is None or cached > best[1]:
            best = (row, cached)
    return best
