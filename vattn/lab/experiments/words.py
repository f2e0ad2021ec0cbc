"""Numbers as parts of sentences; what noise hides is not claimed."""

from __future__ import annotations

from vattn.lab.bench.intervals import Interval


def compared(found: Interval | None, one: str, other: str, quantity: str) -> str:
    """`one` against `other` in a `quantity`, as a clause; `found` is the ratio one / other."""
    if found is None:
        return f"the {quantity} of {one} and {other} can't be compared"
    if not found.enough:
        return f"{found.n} repeats can't tell the {quantity} of {one} from that of {other}"
    if found.low == found.high:
        same = found.median == 1
        return f"{one} has {'the same' if same else f'{found.median:.2f} times the'} {quantity} " + (
            f"as {other}" if same else f"of {other}"
        )
    span = f"{found.low:.2f} to {found.high:.2f}"
    if found.excludes(1):
        return f"{one} has {found.median:.2f} times the {quantity} of {other} ({span})"
    return f"noise hides whether the {quantity} of {one} differs from that of {other} ({span} times)"


def apart(one: Interval, other: Interval) -> bool:
    """Whether two intervals don't meet."""
    return one.enough and other.enough and (one.high < other.low or other.high < one.low)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:,.1f} KiB"


def sentence(*clauses: str) -> str:
    """Clauses joined by semicolons, with a capital and a full stop."""
    text = "; ".join(clauses)
    return text[0].upper() + text[1:] + "."
