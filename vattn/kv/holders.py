"""Who wants a page: how many live requests need it, and how often the prefix cache holds it.

                        in the cache    not in the cache
    needed by requests     in use            in use
    needed by nobody       cached            (parked, or free)

Units here are opaque ids: a page stands for itself and for its like in the other ranges of its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Holders:
    """Two counts for each id, and how many ids are in which cell of the table above."""

    def __init__(self) -> None:
        self._needs: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.num_cached_only = 0
        """Ids held by the cache and needed by nobody."""

    @property
    def num_needed(self) -> int:
        """Ids needed by at least one request."""
        return len(self._needs)

    def needs(self, page: int) -> int:
        return self._needs.get(page, 0)

    def cached(self, page: int) -> bool:
        return page in self._cached

    def all_needs(self) -> Mapping[int, int]:
        """How many requests need each id; ids that nobody needs are left out."""
        return self._needs

    def all_cached(self) -> Iterable[int]:
        """Ids the cache holds."""
        return self._cached.keys()

    def need(self, pages: Iterable[int]) -> None:
        """One request more needs each of these."""
        for page in pages:
            count = self._needs.get(page, 0)
            self._needs[page] = count + 1
            if not count and page in self._cached:
                self.num_cached_only -= 1

    def release(self, pages: Iterable[int]) -> None:
        """One request less."""
        for page in pages:
            count = self._needs[page] - 1
            if count:
                self._needs[page] = count
                continue
            del self._needs[page]
            if page in self._cached:
                self.num_cached_only += 1

    def cache(self, page: int) -> bool:
        """One cache entry more holds it; True for the first."""
        count = self._cached.get(page, 0)
        self._cached[page] = count + 1
        if not count and page not in self._needs:
            self.num_cached_only += 1
        return not count

    def uncache(self, page: int) -> bool:
        """One cache entry less; True for the last."""
        count = self._cached[page] - 1
        if count:
            self._cached[page] = count
            return False
        del self._cached[page]
        if page not in self._needs:
            self.num_cached_only -= 1
        return True

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Every id gets another number."""
        self._needs = {numbers[page]: count for page, count in self._needs.items()}
        self._cached = {numbers[page]: count for page, count in self._cached.items()}

    def check(self, needs: dict[int, int], cached: dict[int, int]) -> None:
        """Raise AssertionError unless the counts are these."""
        assert self._needs == needs, "needs miscounted"
        assert self._cached == cached, "cache references miscounted"
        assert self.num_cached_only == len(cached.keys() - needs.keys()), "cached pages miscounted"
