"""Counters of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class KVStats:
    """Counters of a KV cache since it was created."""

    rows_adopted: int = 0
    """Requests that took over a parked row with its pages still mapped."""
    prefix_query_tokens: int = 0
    """Tokens of requests that were looked up in the prefix cache, once per request, at admission."""
    prefix_hit_tokens: int = 0
    """Of these, tokens found in the prefix cache, computed by other requests."""
    resumed_hit_tokens: int = 0
    """Tokens that preempted requests found when they were admitted again, so did not recompute."""
    rows_continued: int = 0
    """Requests that continued the text of a parked row: nothing was mapped or copied for that prefix."""
    forks: int = 0
    """Requests that were forked from another."""
    units_shared: int = 0
    """Blocks, or pages (over all ranges), that requests shared instead of filling their own."""
    tails_copied: int = 0
    """Partly filled last blocks or pages (one per hit or fork) that were copied."""
    bytes_copied: int = 0
    """Bytes copied for these."""
    prefix_tokens_unshared_by_page_size: int = 0
    """Tokens found by hits and forks on a page or block that could not be shared as a whole. They were
    copied, or (`paged`, prefix hits) computed again."""
    prefix_evictions: int = 0
    """Prefix-cache entries evicted to free memory."""
    swap_out_bytes: int = 0
    """Bytes of K and V copied to host memory."""
    swap_in_bytes: int = 0
    """Bytes copied back."""
    swap_seconds: float = 0.0
    """Seconds the host spent on these copies."""
    map_stall_seconds: float = 0.0
    """Seconds that steps waited for pages that were not mapped ahead."""
    driver_calls: dict[str, int] = field(default_factory=dict)
    """Number of driver calls by kind; empty if there is no driver."""

    def count_hit(self, cached: int, tokens: int, *, resumed: bool) -> None:
        """Count an admitted request of `tokens` tokens that found `cached` of them."""
        if resumed:
            self.resumed_hit_tokens += cached
        else:
            self.prefix_query_tokens += tokens
            self.prefix_hit_tokens += cached

    def count_copy(self, tokens: int, nbytes: int) -> None:
        """Count the copy of a tail: `tokens` tokens, `nbytes` bytes."""
        self.tails_copied += 1
        self.bytes_copied += nbytes
        self.prefix_tokens_unshared_by_page_size += tokens
