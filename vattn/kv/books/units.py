"""How tokens lie on units: pure arithmetic.

Memory is handed out in units. A unit has the same number of bytes in each of its `ranges`:

    paged      a block: `block_size` tokens of all layers, one range
    static     a row: the longest request, one range
    virtual    a page set: one page in each range of a row (1 range interleaved, 2 x layers per-layer)

    tokens   | t0 | t1 | t2 | t3 | t4 | t5 | …
    units    |    unit 0   |   unit 1    | …        a token may straddle two units of `virtual`
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitLayout:
    """The size of tokens and units. `token_bytes` and `unit_bytes` are of ONE range.

    A request has at most `max_tokens` tokens.
    """

    token_bytes: int
    unit_bytes: int
    ranges: int
    max_tokens: int

    @property
    def bytes(self) -> int:
        """Bytes of a unit in all its ranges."""
        return self.unit_bytes * self.ranges

    @property
    def tokens_per_unit(self) -> float:
        """Tokens in a unit; not always a whole number."""
        whole, rest = divmod(self.unit_bytes, self.token_bytes)
        return self.unit_bytes / self.token_bytes if rest else whole

    @property
    def width(self) -> int:
        """Units of the longest request."""
        return self.units(self.max_tokens)

    def units(self, tokens: int) -> int:
        """Units that `tokens` tokens need."""
        return -(-tokens * self.token_bytes // self.unit_bytes)

    def tokens(self, units: int) -> int:
        """Whole tokens that `units` units can hold."""
        return units * self.unit_bytes // self.token_bytes

    def whole(self, tokens: int) -> tuple[int, int]:
        """(units that hold only the first `tokens` tokens, bytes of the rest in each range)."""
        return divmod(tokens * self.token_bytes, self.unit_bytes)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Positions [first, last) of the units on which tokens [start, stop) lie."""
        return start * self.token_bytes // self.unit_bytes, self.units(stop)
