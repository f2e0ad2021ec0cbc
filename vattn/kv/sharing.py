"""What a new request of `virtual` can have from others: pages by reference, a tail to copy, or a whole row.

    cached text   | unit | unit | unit | unit |          units of the prefix cache: tokens
    pages         |    page    |    page    |  page …     do not match their borders
    a hit         |   shared   |   shared   | tail → copied: the request writes behind it

A unit's entry holds every page its bytes lie on. Where two entries of a chain lie on one page, theirs may be
different pages; the later entry's was written by somebody who had all of the text so far, so it counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vattn.kv.layout import RowLayout
from vattn.kv.prefix import Entry, PrefixCache
from vattn.kv.slots import PageSet

Memory = tuple[tuple[int, PageSet], ...]
"""What a prefix entry of `virtual` holds: (position in the row, pages at that position)."""


@dataclass(frozen=True)
class Hit:
    """The prefix of a request that need not be computed; nothing by default."""

    cached: int = 0
    """Tokens."""
    shared: Sequence[PageSet] = ()
    """Pages that hold nothing but these tokens."""
    tail: PageSet | None = None
    """The page behind them, if some of the tokens' bytes lie there."""
    entries: Sequence[Entry[Memory]] = ()


@dataclass(frozen=True)
class Content:
    """What a parked slot holds."""

    text: Sequence[int]
    salt: str
    written: int
    """Tokens of `text` that have K and V."""
    entered: int
    """Units of it that were in the prefix cache."""
    key: bytes
    """Of the last of them."""


def find_hit(prefix: PrefixCache[Memory], layout: RowLayout, token_ids: Sequence[int], salt: str) -> Hit:
    """The longest cached prefix that leaves at least one token to compute."""
    entries = prefix.match(token_ids, salt)
    cached = min(len(entries) * prefix.unit, len(token_ids) - 1)
    if cached <= 0:
        return Hit()
    pages: dict[int, PageSet] = {}
    for entry in entries:
        pages.update(entry.memory)
    full, rest = layout.whole_pages(cached)
    shared = [pages[index] for index in range(full)]
    return Hit(cached, shared, pages[full] if rest else None, entries)


def continuation(
    contents: Mapping[int, Content], token_ids: Sequence[int], hit: Hit
) -> tuple[int, int] | None:
    """(slot, cached tokens) of a parked slot whose text this request goes on with, if that saves as much.

    What follows the slot's last entered unit will be overwritten, so all entered ones must match: in their
    tokens, as a key may be another text's.
    """
    if not hit.entries:
        return None
    last = hit.entries[-1]
    known = len(hit.entries) * len(last.tokens)
    if known > len(token_ids) - 1:
        return None
    best: tuple[int, int] | None = None
    for slot, content in contents.items():
        if content.key != last.key or content.salt != last.salt:
            continue
        if content.text[:known] != token_ids[:known]:
            continue
        cached, most = known, min(content.written, len(token_ids) - 1)
        while cached < most and content.text[cached] == token_ids[cached]:
            cached += 1
        if best is None or cached > best[1]:
            best = (slot, cached)
    return best
