"""What the KV cache holds right now, in bytes, and the identities that must hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MemoryUsage:
    """Memory usage of a KV cache at one moment. All fields are bytes.

    physical = in_use + parked + cached + free

        in_use           memory that live requests' tokens need (a shared page counts once)
        parked           mapped, but not needed now: parked rows kept for the next request, pages left
                         over from them, pages mapped ahead; reclaimed when memory runs short
        cached           kept for prefix hits only; for `virtual`, with or without an address
        free             created, but not held by anything

    mapped by live requests = in_use + shared_saved = logical + tail_waste + external_waste

        logical          tokens x token_bytes over live requests: what an ideal allocator would hold. A
                         request's tokens are those it has, computed or about to be
        tail_waste       internal fragmentation: the unused end of last pages or blocks
        external_waste   reserved for tokens that may never come (`static`; 0 elsewhere)
    """

    virtual_reserved: int
    physical: int
    in_use: int
    parked: int
    cached: int
    free: int
    logical: int
    shared_saved: int
    tail_waste: int
    external_waste: int

    @property
    def held(self) -> int:
        """Physical bytes not free: in use, parked or cached."""
        return self.in_use + self.parked + self.cached

    @property
    def kv_utilization(self) -> float:
        """logical / mapped by live requests; 1.0 when nothing is mapped."""
        mapped = self.in_use + self.shared_saved
        return self.logical / mapped if mapped else 1.0

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "kv_utilization": self.kv_utilization}

    def check(self) -> None:
        """Raise AssertionError unless the identities hold."""
        for name, value in asdict(self).items():
            assert value >= 0, f"{name} is negative: {self}"
        assert self.physical == self.in_use + self.parked + self.cached + self.free, self
        # Cached pages may be unmapped and free pages always are; only mapped pages need addresses.
        assert self.virtual_reserved >= self.in_use + self.parked, self
        assert self.in_use + self.shared_saved == self.logical + self.tail_waste + self.external_waste, self
