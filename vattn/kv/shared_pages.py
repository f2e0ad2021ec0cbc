"""Pages that more than one request can see, and the prefix cache that keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from vattn.kv.holders import Holders
from vattn.kv.layout import RowLayout
from vattn.kv.page_map import MapRow, PageState, unit_states
from vattn.kv.prefix import PrefixCache
from vattn.kv.sharing import Content, Hit, Memory, continuation, find_hit
from vattn.kv.slots import Slots
from vattn.vmm.pool import PagePool

_NOBODY: Mapping[int, int] = {}


class SharedPages:
    """Who needs which page, what the prefix cache holds, and what parked slots contain.

    A page of a slot's first row stands for its like in the other rows. `fingerprint` None: no prefix cache.
    """

    def __init__(
        self, slots: Slots, pool: PagePool, layout: RowLayout, fingerprint: str | None, unit: int
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._layout = layout
        self.holders = Holders()
        self.prefix: PrefixCache[Memory] | None = None
        if fingerprint is not None:
            self.prefix = PrefixCache(unit, fingerprint, self._drop)
        self._contents: dict[int, Content] = {}
        """What parked slots held when they were left, where a later request may go on."""
        self.evictions = 0

    @property
    def unit(self) -> int:
        """Tokens of a prefix entry; 1 without a prefix cache."""
        return self.prefix.unit if self.prefix is not None else 1

    # ------------------------------------------------------------------ finding
    def hit(self, token_ids: Sequence[int], salt: str | None) -> Hit:
        """What the prefix cache has for a request."""
        if self.prefix is None or salt is None:
            return Hit()
        return find_hit(self.prefix, self._layout, token_ids, salt)

    def continuation(self, token_ids: Sequence[int], hit: Hit) -> tuple[int, int, Content] | None:
        """(slot, tokens it has, its content) of a parked slot that can be written from there on."""
        found = continuation(self._contents, token_ids, hit)
        if found is None:
            return None
        slot, cached = found
        if not self._slots.is_parked(slot) or self._slots.mapped(slot) < self._layout.pages(cached):
            return None  # its pages were reclaimed meanwhile
        if not self.writable(slot, cached):
            return None
        return slot, cached, self._contents[slot]

    def writable(self, slot: int, tokens: int, leaving: Mapping[int, int] = _NOBODY) -> bool:
        """Whether nobody else can see where token `tokens` and those behind it will be written.

        `leaving`: references of pages from where they are about to be unmapped, which don't count.
        """
        first, _ = self._layout.whole_pages(tokens)
        return self._slots.private(
            slot, first, lambda page: int(self.holders.cached(page)) + leaving.get(page, 0)
        )

    # ------------------------------------------------------------------ filling
    def enter(self, slot: int, token_ids: Sequence[int], salt: str | None, written: int, entered: int) -> int:
        """Enter the whole units of a slot's written text, of which `entered` are there; how many are now."""
        units = written // self.unit
        if self.prefix is None or salt is None or units <= entered:
            return entered
        self.prefix.insert(token_ids, salt, units, lambda unit: self._hold(slot, unit), start=entered)
        return units

    def remember(self, slot: int, token_ids: Sequence[int], salt: str, written: int, entered: int) -> None:
        """A slot is about to be parked with this text."""
        if self.prefix is not None and entered:
            key = self.prefix.keys(token_ids, salt)[entered - 1]
            self._contents[slot] = Content(token_ids, salt, written, entered, key)

    def forget(self, slot: int) -> None:
        """A slot is about to be written by somebody else."""
        self._contents.pop(slot, None)

    def _hold(self, slot: int, unit: int) -> Memory:
        first, last = self._layout.page_span(unit * self.unit, (unit + 1) * self.unit)
        memory = tuple(enumerate(self._slots.page_sets(slot, first, last), first))
        for _, pages in memory:
            if self.holders.cache(pages[0]):
                self._pool.retain_all(pages)
        return memory

    # ------------------------------------------------------------------ giving way
    def evict(self) -> bool:
        """Drop the least useful entry; False if there is none."""
        if self.prefix is None or not self.prefix.evict(self._frees):
            return False
        self.evictions += 1
        return True

    def clear(self) -> None:
        """Drop all entries."""
        self._contents.clear()
        if self.prefix is not None:
            self.prefix.clear()

    def _frees(self, memory: Memory) -> bool:
        return any(not self.holders.needs(pages[0]) for _, pages in memory)

    def _drop(self, memory: Memory) -> None:
        for _, pages in memory:
            if self.holders.uncache(pages[0]):
                self._pool.release_all(pages)

    # ------------------------------------------------------------------ books
    def map_rows(
        self, owners: Mapping[int, tuple[str, int]]
    ) -> tuple[tuple[MapRow, ...], dict[int, PageState]]:
        """Every slot with something mapped, live ones first, and the state of each page known here.

        `owners`: of live slots the request and its tokens.
        """
        idle = [s for s in range(self._slots.count) if s not in owners and self._slots.mapped(s)]
        rows: list[tuple[MapRow, int]] = []
        for slot in [*owners, *idle]:
            request_id, tokens = owners.get(slot, (None, 0))
            pages = self._slots.first_pages(slot, 0, self._slots.mapped(slot))
            rows.append((MapRow(request_id, tokens, pages), self._layout.pages(tokens)))
        states = unit_states(rows, self.holders.all_needs(), self.holders.all_cached())
        return tuple(row for row, _ in rows), states

    def check(self, live: dict[int, int], owners: Sequence[str]) -> dict[int, int]:
        """Raise AssertionError unless the counts are right; the references of the cache, by page.

        `live`: tokens by slot. `owners`: live requests.
        """
        needs: Counter[int] = Counter()
        for slot, tokens in live.items():
            needs.update(self._slots.first_pages(slot, 0, self._layout.pages(tokens)))
        memories = [] if self.prefix is None else self.prefix.memories()
        held = Counter(pages[0] for memory in memories for _, pages in memory)
        self.holders.check(dict(needs), dict(held))
        assert not self._contents.keys() & live.keys(), "a live slot is remembered as parked"
        if self.prefix is not None:
            self.prefix.check(owners)
        return {page: 1 for memory in memories for _, pages in memory for page in pages}
