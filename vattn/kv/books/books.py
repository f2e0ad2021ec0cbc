"""The books of a KV cache: which request holds which units, which units are shared, what to evict.

    request "a"   row 0   | 7 | 2 | 5 |            units by position; the request's tokens lie on them
    request "b"   row 1   | 7 | 2 | 3 |            7 and 2 are shared: they are never written again
    prefix cache          7, 2, 6                  6 is cached only: it is evicted when memory is short

In `Books` a unit may lie anywhere and a row is only a table (`paged`, `static`). `MappedBooks` are for rows
that have addresses. Neither knows what a unit is made of: they yield operations, and a memory carries them
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vattn.errors import OutOfMemory
from vattn.kv.books.allocator import UnitAllocator
from vattn.kv.books.counts import UnitCounts, Units
from vattn.kv.books.hits import Hit, Memory, RequestText, find_hit
from vattn.kv.books.operations import Copy, Decision, Grant, Map, Move
from vattn.kv.books.prefix import PrefixCache
from vattn.kv.books.units import UnitLayout
from vattn.kv.stats import KVStats

WATERMARK = 0.01  # share of the units kept back at admission, so that live requests can grow


@dataclass(eq=False)
class Live:
    """A live request."""

    text: RequestText
    shares: bool
    """Whether it may share prefixes with other requests."""
    tokens: int
    """Tokens it has room for."""
    written: int = 0
    """Tokens whose K and V are written, including one whose id is not known on the host yet."""
    entered: int = 0
    """Number of leading entries of its text that are in the prefix cache."""
    row: int = -1
    units: int = 0
    """Units that its tokens need: the first ones of its row."""
    room: int = 0
    """Tokens up to which it can grow without another unit."""


class Books:
    """The books of at most `limit` units.

    Args:
        fingerprint: identifies the model in the prefix cache; None for no prefix cache.
        entry_tokens: number of tokens in an entry of the prefix cache.
        reserves: one unit holds the longest possible request, so a request never needs a second one.
        most: upper bound on the number of units, whatever the limit.
        allocator: chooses which units are handed out; None to hand out the lowest free ones.
    """

    copies_tails = False
    """Whether a hit may end inside a unit. The beginning of that unit is then copied."""
    keeps_addresses = False
    """Whether a row is a range of addresses, which exists whether or not units are mapped in it."""

    def __init__(
        self,
        layout: UnitLayout,
        limit: int,
        *,
        fingerprint: str | None = None,
        entry_tokens: int = 16,
        reserves: bool = False,
        most: int | None = None,
        allocator: UnitAllocator | None = None,
    ) -> None:
        self.layout = layout
        self.reserves = reserves
        self.most = most
        limit = self._capped(limit)
        self.allocator = allocator or UnitAllocator(limit, made=not self.keeps_addresses)
        self.counts = UnitCounts(self.allocator.ids)
        self.prefix = (
            None if fingerprint is None else PrefixCache[Memory](entry_tokens, fingerprint, self._drop)
        )
        self.live: dict[str, Live] = {}
        self.stats = KVStats()
        self.tables = np.zeros((0, layout.width), np.int32)
        """`[row, position]`: unit numbers. Only the first `lengths[r]` entries of row r are valid."""
        self.lengths: list[int] = []
        self.logical = 0
        """Total tokens of all live requests."""
        self._empty: list[int] = []
        """Rows without a request and without units."""
        self._looked_up: dict[str, RequestText] = {}
        """Prefix lookups of waiting requests, by request id."""

    def _capped(self, limit: int) -> int:
        return limit if self.most is None else min(limit, self.most)

    # ------------------------------------------------------------------ looking up
    @property
    def limit(self) -> int:
        """Number of units that may exist."""
        return self.allocator.limit

    def text(self, request_id: str | None, token_ids: Sequence[int], salt: str | None) -> RequestText:
        """The prefix lookup of a text. With a request id it is kept until the request ends: see `forget`."""
        text = None if request_id is None else self._looked_up.get(request_id)
        if text is None or text.token_ids is not token_ids or text.salt != (salt or ""):
            text = RequestText(token_ids, salt or "")
            if request_id is not None and self.prefix is not None and salt is not None:
                self._looked_up[request_id] = text
        return text

    def forget(self, request_id: str) -> None:
        """Drop the prefix lookup of a waiting request that has ended."""
        self._looked_up.pop(request_id, None)

    def awaits(self, text: RequestText) -> bool:
        """Whether a live request is computing a prefix of this text now."""
        return self.prefix is not None and self.prefix.awaits(text)

    def can_admit(self, tokens: int, text: RequestText | None) -> bool:
        """Whether a new request could hold `tokens` tokens, counting memory that can be reclaimed."""
        if tokens > self.layout.max_tokens or not self._has_row():
            return False
        spare = 0
        if self.live and not self.reserves:  # in pages: a unit of many ranges is a big part of a small cache
            spare = max(1, int(WATERMARK * self.limit * self.layout.ranges)) // self.layout.ranges
        room = self.limit - self.counts.num_needed - spare - self.layout.units(tokens)
        if room >= 0 and not self.copies_tails:
            return True
        # Units that other requests already need cost nothing. The source of a copied tail must stay.
        hit = self._hit(text)
        saved = len(hit.shared) - self.counts.unneeded(hit.shared)
        tail = hit.tail is not None and not self.counts.needs[hit.tail]
        return room + saved - tail >= 0 or room >= 0

    def _hit(self, text: RequestText | None) -> Hit:
        if self.prefix is None or text is None:
            return Hit()
        return find_hit(self.prefix, self.layout, text, copy_tails=self.copies_tails)

    def _has_row(self) -> bool:
        return True

    # ------------------------------------------------------------------ requests come
    def attach(
        self, request_id: str, token_ids: Sequence[int], salt: str | None, *, resumed: bool
    ) -> Decision[int | None]:
        """Admit a request with room for all of `token_ids`.

        Returns how many of them are in the cache, or None if memory is short.
        """
        if len(token_ids) > self.layout.max_tokens or not self._has_row():
            return None
        shares = salt is not None and self.prefix is not None
        live = Live(self.text(request_id, token_ids, salt), shares, len(token_ids))
        hit = self._hit(live.text) if shares else Hit()
        begun = yield from self._begin(live, hit)
        if not begun:
            return None
        self._add(request_id, live)
        if self.prefix is not None and shares:
            self._looked_up.pop(request_id, None)
            self.prefix.touch(live.text)
            self.prefix.claim(request_id, live.text)
            self.stats.count_hit(live.written, live.tokens, resumed=resumed)
            found = min(len(live.text.found) * self.prefix.unit, live.tokens - 1)
            if not self.copies_tails and found > live.written:  # cached, but not in whole units
                self.stats.prefix_tokens_unshared_by_page_size += found - live.written
        return live.written

    def fork(self, parent_id: str, child_id: str, tokens: int) -> Decision[bool]:
        """Admit a request that begins with the first `tokens` computed tokens of another."""
        parent = self.live[parent_id]
        parent.written = max(parent.written, tokens)
        if not self._has_row():
            return False
        full, rest = self.layout.whole(tokens)
        tail = int(self.tables[parent.row, full]) if rest else None
        child = Live(parent.text, parent.shares, tokens)
        started = yield from self._start(child, Hit(tokens, self.tables[parent.row, :full].copy(), tail))
        if not started:
            return False
        if self.prefix is not None:
            child.entered = min(parent.entered, tokens // self.prefix.unit)
        self._add(child_id, child)
        self.stats.forks += 1
        return True

    def _begin(self, live: Live, hit: Hit) -> Decision[bool]:
        """Give a new request a row with all its units, sharing those of `hit`. False if memory is short."""
        started = yield from self._start(live, hit)
        if not started and hit.cached:
            return (yield from self._start(live, Hit()))
        return started

    def _start(self, live: Live, hit: Hit) -> Decision[bool]:
        """Give a new request a row that begins with `hit`: share the whole units, copy the tail.

        Returns False if memory is short.
        """
        full = len(hit.shared)
        pinned = hit.beside()
        self._pin(pinned)  # so that no unit of the hit is evicted meanwhile
        try:
            row, adopted = yield from self._take_row(self.layout.units(live.tokens), empty=full > 0)
            started = False
            try:
                started = yield from self._fill(row, live, hit)
            except OutOfMemory:  # the driver has no room for more mappings
                pass
            finally:
                if not started:
                    self._leave(row)
            if not started:
                return False
            self._settle_in(row, live)
        finally:
            self._unpin(pinned)
        live.written = hit.cached
        if self.prefix is not None:
            live.entered = min(len(hit.entries), hit.cached // self.prefix.unit)
        self.stats.rows_adopted += adopted
        self.stats.units_shared += full * self.layout.ranges
        if hit.tail is not None:
            first, rest = self.layout.whole(hit.cached)
            self.stats.count_copy(hit.cached - self.layout.tokens(first), rest * self.layout.ranges)
        return True

    def _fill(self, row: int, live: Live, hit: Hit) -> Decision[bool]:
        """Put a request's units into the row taken for it. False if memory is short."""
        full = len(hit.shared)
        if full:
            self._append(row, hit.shared)
            try:
                yield Grant(row, tuple(hit.shared.tolist()))
            except BaseException:
                self._cut(row, 0)
                raise
            self._granted(row, full)
        extended = yield from self._extend(row, self.layout.units(live.tokens) - self.lengths[row])
        if extended and hit.tail is not None:
            yield Copy(hit.tail, int(self.tables[row, full]), self.layout.whole(hit.cached)[1])
        return extended

    def _settle_in(self, row: int, live: Live) -> None:
        """Record that a request's row is complete."""
        live.row, live.units = row, self.layout.units(live.tokens)
        live.room = min(self.layout.tokens(live.units), self.layout.max_tokens)
        self.counts.need(self.tables[row, : live.units])

    def _add(self, request_id: str, live: Live) -> None:
        self.live[request_id] = live
        self.logical += live.tokens

    def _pin(self, units: Units) -> None:
        self.counts.show(units)
        self.counts.need(units)

    def _unpin(self, units: Units) -> None:
        self.counts.release(units)
        self.allocator.give(self.counts.hide(units))

    # ------------------------------------------------------------------ requests live
    def grow(self, live: Live, tokens: int) -> Decision[bool]:
        """Make room for `tokens` tokens, more than `live.tokens`."""
        if tokens > self.layout.max_tokens:
            return False
        yield from self.settle(live.row)
        have, want = self.lengths[live.row], self.layout.units(tokens)
        if want > have:
            extended = yield from self._extend(live.row, want - have)
            if not extended:
                return False
        if want > live.units:
            self.counts.need(self.tables[live.row, live.units : want])
            live.units = want
        live.room = min(self.layout.tokens(want), self.layout.max_tokens)
        self.logical += tokens - live.tokens
        live.tokens = tokens
        return True

    def computed(self, live: Live, token_ids: Sequence[int], n: int) -> None:
        """Record that K and V of the first `n` tokens are written. `token_ids` may still lack the last."""
        live.written = n
        if live.text.token_ids is not token_ids:  # a fork has its own list, which begins like its parent's
            live.text = RequestText(token_ids, live.text.salt, live.text.keys[: live.entered])
        if self.prefix is None or not live.shares:
            return
        whole = min(n, len(token_ids)) // self.prefix.unit
        if whole > live.entered:
            self.prefix.insert(live.text, whole, lambda index: self._hold(live, index), live.entered)
            live.entered = whole

    def shared_tokens(self, live: Live) -> int:
        """Number of leading written tokens that are shared with another live request."""
        alone = self.counts.needs[self.tables[live.row, : self.layout.units(live.written)]] <= 1
        shared = int(np.argmax(alone)) if alone.any() else len(alone)
        return min(live.written, self.layout.tokens(shared))

    def free(self, request_id: str) -> Decision[None]:
        """Forget a request. The units it held stay cached or parked, or become free."""
        yield from self.settle(self.live[request_id].row)
        live = self.live.pop(request_id)
        self.logical -= live.tokens
        self.forget(request_id)
        if self.prefix is not None:
            self.prefix.unclaim(request_id)
        self.counts.release(self.tables[live.row, : live.units])
        self._remember(live)
        self._leave(live.row)

    def reset(self) -> None:
        """Forget every cached prefix. Requests that live now add no new ones."""
        if self.prefix is None:
            return
        self.prefix.clear()
        for request_id, live in self.live.items():
            live.shares = False
            self.prefix.unclaim(request_id)

    def _hold(self, live: Live, index: int) -> Memory:
        """The units on which entry `index` of a request's text lies. The prefix cache holds them from now."""
        assert self.prefix is not None
        tokens = self.prefix.unit
        first, last = self.layout.span(index * tokens, (index + 1) * tokens)
        units = self.tables[live.row, first:last].tolist()
        for unit in units:
            self.counts.cache(unit)
        return tuple(enumerate(units, first))

    def _drop(self, memory: Memory) -> None:
        self.allocator.give([unit for _, unit in memory if self.counts.uncache(unit)])

    # ------------------------------------------------------------------ units
    def _extend(self, row: int, n: int) -> Decision[bool]:
        """Append `n` new units to a row, or change nothing and return False if memory is short."""
        if n <= 0:
            return True
        if n > self.limit - self.counts.num_needed:
            return False
        for device_short in (False, True):
            yield from self._reclaim(n, row, made_only=device_short)
            before = self.lengths[row]
            taken = self.allocator.take(n, int(self.tables[row, before - 1]) if before else None)
            if taken is None:
                return False
            units, new = taken
            self._append(row, np.asarray(units, np.int32))
            try:
                yield Map(row, before, tuple(units), tuple(new))
                return True
            except OutOfMemory:  # the device has run out before the budget has
                self._take_back(row, before, new)
            except BaseException:
                self._take_back(row, before, new)
                raise
        return False

    def _take_back(self, row: int, keep: int, new: Iterable[int]) -> None:
        """Undo an append: units behind the first `keep` were not mapped, and units in `new` not made."""
        self._cut(row, keep)
        self.allocator.forget(new)

    def _append(self, row: int, units: Units) -> None:
        length = self.lengths[row]
        self.tables[row, length : length + len(units)] = units
        self.lengths[row] = length + len(units)
        self.counts.show(units)

    def _cut(self, row: int, keep: int) -> None:
        """Cut a row to its first `keep` units. Units that nothing holds any more become free."""
        units = self.tables[row, keep : self.lengths[row]]
        self.lengths[row] = keep
        self.allocator.give(self.counts.hide(units))

    def evict(self) -> bool:
        """Evict the least recently used leaf of the prefix cache. False if there is no entry to evict."""
        if self.prefix is None or not self.prefix.evict(self._frees):
            return False
        self.stats.prefix_evictions += 1
        return True

    def _frees(self, memory: Memory) -> bool:
        return any(not self.counts.needs[unit] for _, unit in memory)

    @property
    def address_bytes(self) -> int:
        """Bytes of reserved addresses."""
        return self.allocator.num_made * self.layout.bytes

    # ------------------------------------------------------------------ what MappedBooks override
    def settle(self, row: int) -> Decision[None]:
        """Finish mapping the units that a row is given ahead of its need."""
        return
        yield

    def _take_row(self, units: int, *, empty: bool) -> Decision[tuple[int, bool]]:
        """Take a row for a request that needs `units` units.

        Returns the row, and whether it is a parked row that has units already (never if `empty`).
        """
        if not self._empty:
            first, more = len(self.lengths), max(8, len(self.lengths))
            self.tables = np.concatenate([self.tables, np.zeros((more, self.layout.width), np.int32)])
            self.lengths += [0] * more
            self._empty = list(range(first + more - 1, first - 1, -1))
        return self._empty.pop(), False
        yield

    def _leave(self, row: int) -> None:
        """Give a taken row back. It belongs to no request any more."""
        self._cut(row, 0)
        self._empty.append(row)

    def _granted(self, row: int, units: int) -> None:
        """Record that the first `units` units of a row are shared with other rows."""

    def _remember(self, live: Live) -> None:
        """Remember what the row of an ending request holds, for a later request that continues it."""

    def _reclaim(self, n: int, keep: int | None, *, made_only: bool = False) -> Decision[None]:
        """Reclaim unneeded units until `n` units can be taken or nothing is left to reclaim.

        Nothing is taken from row `keep`, which needs them. `made_only`: count only units that exist.
        """
        while self.allocator.available < n and self.evict():
            pass
        return
        yield

    # ------------------------------------------------------------------ size
    def resize(self, limit: int) -> Decision[bool]:
        """Change the number of units. Units that stay get new numbers. False if live requests need more."""
        limit = self._capped(limit)
        if self.counts.num_needed > limit:
            return False
        while self.allocator.num_held > limit:
            evicted = self.evict()
            assert evicted, "a unit is held by nobody"
        numbers = {old: new for new, old in enumerate(self.counts.held())}
        yield Move(limit, numbers)
        new_numbers = np.zeros(len(self.counts.needs), np.int32)
        new_numbers[list(numbers)] = list(numbers.values())
        old, self.counts = self.counts, UnitCounts(limit)
        for name in ("shown", "needs", "cached"):
            getattr(self.counts, name)[list(numbers.values())] = getattr(old, name)[list(numbers)]
        self.counts.num_needed, self.counts.total_needs = old.num_needed, old.total_needs
        self.counts.num_cached_only = old.num_cached_only
        self.allocator = self.allocator.renumbered(limit, numbers)
        tables = np.zeros_like(self.tables)
        for row, length in enumerate(self.lengths):
            tables[row, :length] = new_numbers[self.tables[row, :length]]
        self.tables = tables
        if self.prefix is not None:
            self.prefix.replace_memory(
                lambda memory: tuple((position, numbers[unit]) for position, unit in memory)
            )
        for text in [*self._looked_up.values(), *(live.text for live in self.live.values())]:
            text.unchanged = 0
        return True

    def check_rows(self) -> None:
        """Raise AssertionError unless each row is empty or belongs to exactly one request."""
        rows = sorted([*(live.row for live in self.live.values()), *self._empty])
        assert rows == list(range(len(self.lengths))), "a row is lost"
        for live in self.live.values():
            assert self.lengths[live.row] == live.units, "a table is too long"
