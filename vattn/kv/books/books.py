"""The books of a KV cache: which request holds which units, what is shared, what gives way.

    request "a"   row 0   | 7 | 2 | 5 |            units by position; the request's tokens lie on them
    request "b"   row 1   | 7 | 2 | 3 |            7 and 2 are shared: nobody writes them again
    prefix cache          7, 2, 6                  6 is cached only: it goes when memory is short

Here a unit may stand anywhere and a row is nothing but a table (`paged`, `static`). `MappedBooks` are for
rows that have addresses. Neither knows what a unit is made of: they yield operations, a memory does them.
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

WATERMARK = 0.01  # share of the units that a new request leaves to the growth of those that live


@dataclass(eq=False)
class Live:
    """A live request."""

    text: RequestText
    shares: bool
    """Whether its text may be found by others, and others' by it."""
    tokens: int
    """That it has room for."""
    written: int = 0
    """That have K and V, one that is computed and not known yet included."""
    entered: int = 0
    """Entries of its text that are in the prefix cache by now."""
    row: int = -1
    units: int = 0
    """That its tokens need: the first ones of its row."""
    room: int = 0
    """Up to so many tokens it needs no more units."""


class Books:
    """At most `limit` units.

    Args:
        fingerprint: of the model, for the prefix cache; None: no prefix cache.
        entry_tokens: tokens of an entry of the prefix cache.
        reserves: a unit is the room for a longest request: it never needs a second one.
        most: never more units than this, whatever the limit.
        allocator: which units are given out; None: the lowest free ones.
    """

    copies_tails = False
    """Whether a hit may end within a unit, whose beginning is then copied."""
    keeps_addresses = False
    """Whether rows are addresses, which exist apart from units."""

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
        """`[row, position]`: units; row r has the first `lengths[r]`."""
        self.lengths: list[int] = []
        self.logical = 0
        """Tokens of all live requests."""
        self._empty: list[int] = []
        """Rows without a request and without units."""
        self._looked_up: dict[str, RequestText] = {}
        """Texts of requests that wait, as far as somebody asked for them."""

    def _capped(self, limit: int) -> int:
        return limit if self.most is None else min(limit, self.most)

    # ------------------------------------------------------------------ looking up
    @property
    def limit(self) -> int:
        """Units there may be."""
        return self.allocator.limit

    def text(self, request_id: str | None, token_ids: Sequence[int], salt: str | None) -> RequestText:
        """What is known of a text. With a request's id it is kept until the request ends: see `forget`."""
        text = None if request_id is None else self._looked_up.get(request_id)
        if text is None or text.token_ids is not token_ids or text.salt != (salt or ""):
            text = RequestText(token_ids, salt or "")
            if request_id is not None and self.prefix is not None and salt is not None:
                self._looked_up[request_id] = text
        return text

    def forget(self, request_id: str) -> None:
        """A waiting request has ended."""
        self._looked_up.pop(request_id, None)

    def awaits(self, text: RequestText) -> bool:
        """Is a live request just computing a prefix of this text?"""
        return self.prefix is not None and self.prefix.awaits(text)

    def can_admit(self, tokens: int, text: RequestText | None) -> bool:
        """Could a new request hold `tokens` tokens, counting what would give way?"""
        if tokens > self.layout.max_tokens or not self._has_row():
            return False
        spare = 0
        if self.live and not self.reserves:  # of one range: all ranges of a unit may be much of a small cache
            spare = max(1, int(WATERMARK * self.limit * self.layout.ranges)) // self.layout.ranges
        room = self.limit - self.counts.num_needed - spare - self.layout.units(tokens)
        if room >= 0 and not self.copies_tails:
            return True
        # Units that requests need already cost nothing; a tail's source must stay for the copy.
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
        """Admit a request with room for all of `token_ids`: how many are in the cache; None: short."""
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
            if not self.copies_tails and found > live.written:  # there, but not in whole units
                self.stats.prefix_tokens_unshared_by_page_size += found - live.written
        return live.written

    def fork(self, parent_id: str, child_id: str, tokens: int) -> Decision[bool]:
        """Admit a request that has the first `tokens` computed tokens of another."""
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
        """Give a new request a row with all its units, as much of them shared as `hit` has."""
        started = yield from self._start(live, hit)
        if not started and hit.cached:
            return (yield from self._start(live, Hit()))
        return started

    def _start(self, live: Live, hit: Hit) -> Decision[bool]:
        """A row that begins with `hit`: its whole units by reference, the tail copied. False: short."""
        full = len(hit.shared)
        pinned = hit.beside()
        self._pin(pinned)  # nothing of the hit may go meanwhile
        try:
            row, adopted = yield from self._take_row(self.layout.units(live.tokens), empty=full > 0)
            started = False
            try:
                started = yield from self._fill(row, live, hit)
            except OutOfMemory:  # of mappings
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
        """Put a request's units into a row that was taken for it."""
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
        """A request's row is complete."""
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
        """K and V of the first `n` tokens are written; the last may be one that `token_ids` lacks as yet."""
        live.written = n
        if live.text.token_ids is not token_ids:  # a fork's own list: it begins as the one it was forked from
            live.text = RequestText(token_ids, live.text.salt, live.text.keys[: live.entered])
        if self.prefix is None or not live.shares:
            return
        whole = min(n, len(token_ids)) // self.prefix.unit
        if whole > live.entered:
            self.prefix.insert(live.text, whole, lambda index: self._hold(live, index), live.entered)
            live.entered = whole

    def shared_tokens(self, live: Live) -> int:
        """Leading written tokens that another live request holds as well."""
        alone = self.counts.needs[self.tables[live.row, : self.layout.units(live.written)]] <= 1
        shared = int(np.argmax(alone)) if alone.any() else len(alone)
        return min(live.written, self.layout.tokens(shared))

    def free(self, request_id: str) -> Decision[None]:
        """Forget a request. What it held is cached, kept with its row, or free."""
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
        """Forget every cached prefix; who lives leaves none behind."""
        if self.prefix is None:
            return
        self.prefix.clear()
        for request_id, live in self.live.items():
            live.shares = False
            self.prefix.unclaim(request_id)

    def _hold(self, live: Live, index: int) -> Memory:
        """Units on which entry `index` of a request's text lies, held by the cache from now on."""
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
        """Append `n` units of its own to a row: all or nothing; False when memory is short."""
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
        """Units behind the first `keep` were not mapped, and the `new` of them not made."""
        self._cut(row, keep)
        self.allocator.forget(new)

    def _append(self, row: int, units: Units) -> None:
        length = self.lengths[row]
        self.tables[row, length : length + len(units)] = units
        self.lengths[row] = length + len(units)
        self.counts.show(units)

    def _cut(self, row: int, keep: int) -> None:
        """A row keeps its first `keep` units; what is nobody's by that is free."""
        units = self.tables[row, keep : self.lengths[row]]
        self.lengths[row] = keep
        self.allocator.give(self.counts.hide(units))

    def evict(self) -> bool:
        """Drop the cached entry that is missed least; False if there is none."""
        if self.prefix is None or not self.prefix.evict(self._frees):
            return False
        self.stats.prefix_evictions += 1
        return True

    def _frees(self, memory: Memory) -> bool:
        return any(not self.counts.needs[unit] for _, unit in memory)

    @property
    def address_bytes(self) -> int:
        """Bytes of addresses that are reserved."""
        return self.allocator.num_made * self.layout.bytes

    # ------------------------------------------------------------------ what MappedBooks do otherwise
    def settle(self, row: int) -> Decision[None]:
        """Be done with what a row is given ahead of its need."""
        return
        yield

    def _take_row(self, units: int, *, empty: bool) -> Decision[tuple[int, bool]]:
        """A row for a request that needs so many units; whether it has some already (never if `empty`)."""
        if not self._empty:
            first, more = len(self.lengths), max(8, len(self.lengths))
            self.tables = np.concatenate([self.tables, np.zeros((more, self.layout.width), np.int32)])
            self.lengths += [0] * more
            self._empty = list(range(first + more - 1, first - 1, -1))
        return self._empty.pop(), False
        yield

    def _leave(self, row: int) -> None:
        """A taken row is nobody's any more."""
        self._cut(row, 0)
        self._empty.append(row)

    def _granted(self, row: int, units: int) -> None:
        """The first units of a row are others'."""

    def _remember(self, live: Live) -> None:
        """A request ends whose row may be of use."""

    def _reclaim(self, n: int, keep: int | None, *, made_only: bool = False) -> Decision[None]:
        """Take units from those who don't need them until `n` can be taken, or nothing is left to take.

        Row `keep` is the one that needs them. `made_only`: count only units that exist.
        """
        while self.allocator.available < n and self.evict():
            pass
        return
        yield

    # ------------------------------------------------------------------ size
    def resize(self, limit: int) -> Decision[bool]:
        """Have `limit` units; False when live requests need more. Units that stay get other numbers."""
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
        """Raise AssertionError unless each row is empty or one request's."""
        rows = sorted([*(live.row for live in self.live.values()), *self._empty])
        assert rows == list(range(len(self.lengths))), "a row is lost"
        for live in self.live.values():
            assert self.lengths[live.row] == live.units, "a table is too long"
