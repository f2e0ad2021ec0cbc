"""How a device's total is divided: equally, within what each needs at least and asks at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vattn.scale.shares import Claim, divide

claims = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda two: Claim(min(two), max(two))),
    max_size=8,
)


def test_equal_claims_get_equal_shares() -> None:
    assert divide(90, [Claim(10, 100)] * 3) == [30, 30, 30]


def test_what_one_does_not_ask_for_the_others_share() -> None:
    assert divide(90, [Claim(0, 10), Claim(0, 100), Claim(0, 100)]) == [10, 40, 40]


def test_a_large_floor_comes_out_of_the_others_shares() -> None:
    assert divide(90, [Claim(60, 100), Claim(0, 100), Claim(5, 100)]) == [60, 15, 15]


def test_enough_for_all_is_what_they_asked() -> None:
    assert divide(10**12, [Claim(1, 7), Claim(2, 9)]) == [7, 9]


def test_floors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 engines need 12 bytes at least; the total is 11"):
        divide(11, [Claim(6, 9), Claim(6, 9)])


@given(claims, st.integers(0, 1000))
def test_shares_are_max_min_fair(claims: list[Claim], extra: int) -> None:
    total = sum(claim.floor for claim in claims) + extra
    shares = divide(total, claims)
    assert all(floor <= share <= ask for share, (floor, ask) in zip(shares, claims, strict=True))
    wanting = [s for s, c in zip(shares, claims, strict=True) if s < c.ask]
    spare = total - sum(shares)
    assert spare >= 0 and (not wanting or spare < len(wanting)), "bytes are left although somebody wants them"
    for share, (floor, _) in zip(shares, claims, strict=True):
        # Nobody has more than one who would take more, unless it is its floor.
        assert share == floor or all(share <= other for other in wanting)
