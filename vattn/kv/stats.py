"""Counters of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KVStats:
    """Counters of a backend, since its creation."""

    rows_adopted: int = 0
    """Requests that took over a finished row as it lay, mapped."""
    prefix_query_tokens: int = 0
    """Tokens of requests that were looked up in the prefix cache, once per request, at admission."""
    prefix_hit_tokens: int = 0
    """Of these, tokens found there: computed by other requests."""
    resumed_hit_tokens: int = 0
    """Tokens that preempted requests found when they came back and did not compute again."""
    rows_continued: int = 0
    """Requests whose prefix was a finished row, taken over as it lay: nothing mapped, nothing copied."""
    forks: int = 0
    """Requests that began as a copy of another."""
    units_shared: int = 0
    """Blocks, or pages (over all ranges), that a request took by reference instead of filling its own."""
    tails_copied: int = 0
    """Partly filled last blocks or pages (one per hit or fork) that were copied."""
    bytes_copied: int = 0
    """Bytes of these copies."""
    prefix_tokens_unshared_by_page_size: int = 0
    """Tokens found by hits and forks that lay on a page or block that could not be shared whole: copied, or
    (`paged`, prefix hits) computed again."""
    prefix_evictions: int = 0
    """Entries the prefix cache gave up for memory."""
    swap_out_bytes: int = 0
    """Bytes of K and V copied to host memory."""
    swap_in_bytes: int = 0
    """Bytes copied back."""
    swap_seconds: float = 0.0
    """Time of the host in these copies."""
    map_stall_seconds: float = 0.0
    """Time steps waited for pages that were not mapped ahead."""
    driver_calls: dict[str, int] = field(default_factory=dict)
    """Driver calls by kind; empty where no driver is involved."""

    def count_hit(self, cached: int, tokens: int, *, resumed: bool) -> None:
        """A request of `tokens` tokens was admitted and found `cached` of them."""
        if resumed:
            self.resumed_hit_tokens += cached
        else:
            self.prefix_query_tokens += tokens
            self.prefix_hit_tokens += cached

    def count_copy(self, tokens: int, nbytes: int) -> None:
        """The tail of something shared was copied."""
        self.tails_copied += 1
        self.bytes_copied += nbytes
        self.prefix_tokens_unshared_by_page_size += tokens
