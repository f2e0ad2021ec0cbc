"""What a new request can have from others: units by reference, a tail to copy, or a whole row.

    cached text   | entry | entry | entry | entry |      entries of the prefix cache: their borders and
    units         |    unit    |    unit    |  unit …    those of units need not match
    a hit         |   shared   |   shared   | tail → copied: the request writes behind it

An entry holds every unit its bytes lie on. Where two entries of a chain lie on one unit, theirs may be
different units; the later entry's was written by somebody who had all of the text so far, so it counts.
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
    """By position, from `match`'s entries; rebuilt from entry `unchanged` on."""


@dataclass(frozen=True, eq=False)
class Hit:
    """The prefix of a request that need not be computed; nothing by default."""

    cached: int = 0
    """Tokens."""
    shared: Units = field(default_factory=lambda: NO_UNITS)
    """Units that hold nothing but these tokens."""
    tail: int | None = None
    """The unit behind them, if some of the tokens' bytes lie there."""
    entries: Sequence[Entry[Memory]] = ()

    def beside(self) -> Units:
        """All units of the hit."""
        return self.shared if self.tail is None else np.append(self.shared, np.int32(self.tail))


def find_hit(
    prefix: PrefixCache[Memory], layout: UnitLayout, text: RequestText, *, copy_tails: bool
) -> Hit:
    """The longest cached prefix that leaves a token to compute; without `copy_tails` it ends with a unit."""
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
    """Bring `text.units` up to its entries."""
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
    """Tokens that have K and V."""
    entered: int
    """Entries of it that were in the prefix cache."""
    key: bytes
    """Of the last of them."""


def continuation(
    contents: Mapping[int, Content], token_ids: Sequence[int], hit: Hit
) -> tuple[int, int] | None:
    """(row, cached tokens) of a parked row whose text this request goes on with, if that saves as much.

    What follows the row's last entry will be overwritten, so all entries must match: in their tokens, as a
    key may be another text's.
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
