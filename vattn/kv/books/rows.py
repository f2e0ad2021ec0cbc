"""Books of rows that have addresses. Units are mapped as requests grow and stay mapped when they end.

    row 0 (live)    | 7 | 2 | 9 |  . . addresses only . .  |
    row 1 (live)    | 7 | 2 | 3 |  . .  7 and 2 were granted: read-only here
    row 2 (parked)  | 4 | 1 |  . . . . . . . . . . . . . . |     its request has ended
    row 3 (empty)   |  . . . . . . . . . . . . . . . . . . |

    empty --take--> live --leave--> parked (still mapped) --take--> live
      ^                                |
      +------------ reclaim -----------+

A later request can take over a parked row without a driver call: a row of similar size, or the row whose text
it continues. When units are short they are reclaimed in this order: from live rows that have more than they
need (mapped ahead, or left over from a parked row); from parked rows, least recently used first; from the
prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from vattn.errors import DriverError
from vattn.kv.books.books import Books, Live
from vattn.kv.books.hits import Content, Hit, continuation
from vattn.kv.books.operations import Decision, Discard, Finish, Map, Unmap
from vattn.kv.books.units import UnitLayout


class MappedBooks(Books):
    """The books of `rows` rows of addresses with at most `limit` units in them."""

    copies_tails = True
    keeps_addresses = True

    def __init__(
        self,
        layout: UnitLayout,
        limit: int,
        *,
        rows: int,
        address_bytes: int = 0,
        fingerprint: str | None = None,
        entry_tokens: int = 16,
    ) -> None:
        super().__init__(layout, limit, fingerprint=fingerprint, entry_tokens=entry_tokens)
        self._address_bytes = address_bytes
        self.tables = np.zeros((rows, layout.width), np.int32)
        self.lengths = [0] * rows
        self._empty = list(range(rows - 1, -1, -1))
        self.parked: OrderedDict[int, None] = OrderedDict()
        """Parked rows, least recently parked first."""
        self.contents: dict[int, Content] = {}
        """What parked rows hold, if a later request may continue them."""
        self.granted = [0] * rows
        """For each row, how many leading units are shared: mapped read-only if the device can do that."""
        self._ahead: dict[int, tuple[int, list[int]]] = {}
        """Rows that get units in the background: their length before, and the units made for it."""

    @property
    def address_bytes(self) -> int:
        return self._address_bytes

    def _has_row(self) -> bool:
        return bool(self._empty or self.parked)

    # ------------------------------------------------------------------ rows come and go
    def _begin(self, live: Live, hit: Hit) -> Decision[bool]:
        found = continuation(self.contents, live.text.token_ids, hit)
        if found is not None and self._can_go_on(*found):
            continued = yield from self._go_on(live, *found)
            if continued:
                return True
            hit = self._hit(live.text)  # what was found may have been evicted on the way
        return (yield from super()._begin(live, hit))

    def _can_go_on(self, row: int, cached: int) -> bool:
        """Whether a parked row still holds these tokens and no other row can see what lies behind them."""
        return (
            row in self.parked
            and self.lengths[row] >= self.layout.units(cached)
            and self.writable(row, self.layout.whole(cached)[0])
        )

    def _go_on(self, live: Live, row: int, cached: int) -> Decision[bool]:
        """Take over a parked row that holds the first `cached` tokens of a request. Nothing is copied."""
        content = self.contents[row]
        self._unpark(row)
        extended = False
        try:
            extended = yield from self._extend(row, self.layout.units(live.tokens) - self.lengths[row])
        finally:
            if not extended:
                self._leave(row)
        if extended:
            self._settle_in(row, live)
            live.written, live.entered = cached, content.entered
            self.stats.rows_continued += 1
        return extended

    def _take_row(self, units: int, *, empty: bool) -> Decision[tuple[int, bool]]:
        """Take a parked row whose units only it holds: the smallest that is enough, else the largest.

        If there is none, take an empty row, else empty the row that was parked longest ago. `empty` asks for
        a row without units.
        """
        own = [] if empty else [(self.lengths[row], row) for row in self.parked if self._is_own(row)]
        if own:
            row = min((entry for entry in own if entry[0] >= units), default=max(own))[1]
            self._unpark(row)
            return row, True
        if self._empty:
            return self._empty.pop(), False
        row = next(iter(self.parked))
        self._unpark(row)
        self._cut(row, 0)
        try:
            yield Unmap(row, 0)
        except BaseException:
            self._leave(row)
            raise
        return row, False

    def _unpark(self, row: int) -> None:
        del self.parked[row]
        self.contents.pop(row, None)

    def _leave(self, row: int) -> None:
        if self.lengths[row]:
            self.parked[row] = None
        else:
            self.contents.pop(row, None)
            self._empty.append(row)

    def _remember(self, live: Live) -> None:
        if self.prefix is not None and live.shares and live.entered:
            text = live.text
            known = min(live.written, len(text.token_ids))
            key = self.prefix.keys(text)[live.entered - 1]
            self.contents[live.row] = Content(text.token_ids, text.salt, known, live.entered, key)

    def _granted(self, row: int, units: int) -> None:
        self.granted[row] = units

    def _cut(self, row: int, keep: int) -> None:
        super()._cut(row, keep)
        self.granted[row] = min(self.granted[row], keep)

    def writable(self, row: int, first: int) -> bool:
        """Whether no other row can see the units of a row from position `first` on."""
        units = self.tables[row, first : self.lengths[row]]
        return self.granted[row] <= first and bool((self.counts.shown[units] == 1).all())

    def _is_own(self, row: int) -> bool:
        """Whether all units of a parked row may be overwritten."""
        units = self.tables[row, : self.lengths[row]]
        return self.writable(row, 0) and not self.counts.cached[units].any()

    # ------------------------------------------------------------------ units ahead of their need
    def look_ahead(self) -> Decision[None]:
        """Map one more unit, in the background, for every request whose next token needs it."""
        for live in self.live.values():
            row = live.row
            length = self.lengths[row]
            tokens = min(live.tokens + 1, self.layout.max_tokens)
            if tokens <= live.room or self.layout.units(tokens) <= length or row in self._ahead:
                continue
            taken = self.allocator.take(1)
            if taken is None:
                return
            units, new = taken
            self._append(row, np.asarray(units, np.int32))
            self._ahead[row] = length, new
            try:
                yield Map(row, length, tuple(units), tuple(new), ahead=True)
            except BaseException:
                del self._ahead[row]
                self._take_back(row, length, new)
                raise

    def settle(self, row: int) -> Decision[None]:
        if row not in self._ahead:
            return
        length, new = self._ahead[row]
        try:
            yield Finish(row)
        except (DriverError, MemoryError):
            # No request needs these units yet. If one does later, it asks again and gets the error.
            self._take_back(row, length, new)
        del self._ahead[row]

    def settle_all(self) -> Decision[None]:
        for row in list(self._ahead):
            yield from self.settle(row)

    # ------------------------------------------------------------------ reclaiming
    def _reclaim(self, n: int, keep: int | None, *, made_only: bool = False) -> Decision[None]:
        def short() -> int:
            return n - (self.allocator.num_free if made_only else self.allocator.available)

        if short() <= 0:
            return
        yield from self.settle_all()
        for row, length in self._idle(keep):
            while short() > 0 and self.lengths[row] > length:
                cut = max(length, self.lengths[row] - short())
                self._cut(row, cut)
                try:
                    yield Unmap(row, cut)
                finally:
                    if row in self.parked and not self.lengths[row]:
                        self._unpark(row)
                        self._empty.append(row)
        while short() > 0 and self.evict():
            pass

    def _idle(self, keep: int | None) -> Iterator[tuple[int, int]]:
        """Rows that may have unneeded units, and how many of their units are needed."""
        for live in list(self.live.values()):
            if live.row != keep:
                yield live.row, live.units
        for row in list(self.parked):
            yield row, 0

    def resize(self, limit: int) -> Decision[bool]:
        if self.counts.num_needed > limit:
            return False
        if limit < self.limit:
            yield from self._reclaim(self.limit - limit, None)
            if self.allocator.num_held > limit:
                return False
            gone = self.allocator.spare(self.allocator.num_made - limit)
            if gone:
                yield Discard(tuple(gone))
                self.allocator.forget(gone)
        self.allocator.limit = limit
        self.counts.reserve(self.allocator.ids)
        return True

    def reset(self) -> None:
        self.contents.clear()
        super().reset()

    def check_rows(self) -> None:
        live = {live.row: live for live in self.live.values()}
        rows = sorted([*live, *self.parked, *self._empty])
        assert rows == list(range(len(self.lengths))), "a row is lost"
        assert not any(self.lengths[row] for row in self._empty), "an empty row has units"
        assert all(self.lengths[row] for row in self.parked), "a parked row has none"
        assert not self.contents.keys() & live.keys(), "a live row is remembered as parked"
        assert all(granted <= length for granted, length in zip(self.granted, self.lengths, strict=True))
        for row, request in live.items():
            first = self.layout.whole(request.written)[0]
            assert self.writable(row, first), f"row {row} would be written where others can see it"
