# Money: whole nano-dollars, one rounding rule.

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from billing.core.money import to_decimal, to_nano, to_text

NANOS = st.integers(min_value=0, max_value=10**18)


@given(NANOS)
def test_nano_dollars_survive_being_written_and_read(nano: int) -> None:
    """What is shown as text or as a decimal is the very amount."""
    assert to_nano(to_text(nano)) == nano
    assert to_nano(to_decimal(nano)) == nano


@given(st.decimals(min_value=0, max_value=10**6, places=12))
def test_dollars_round_to_the_nearest_nano(dollars: Decimal) -> None:
    """An amount finer than a nano-dollar moves by at most half of one."""
    assert abs(to_decimal(to_nano(dollars)) - dollars) <= Decimal("0.0000000005")


def test_a_float_means_what_it_prints() -> None:
    """Prices in YAML arrive as floats: a tenth is a tenth."""
    assert to_nano(0.1) == 100_000_000
    assert to_nano(1.5e-9) == 2  # the nearest float is a little less
    assert to_nano(2.5) == 2_500_000_000


def test_text_has_two_places_or_as_many_as_needed() -> None:
    """Amounts look like money, and like the small money that tokens cost."""
    assert to_text(0) == "0.00"
    assert to_text(12_000_000_000) == "12.00"
    assert to_text(123_000) == "0.000123"
    assert to_text(1) == "0.000000001"
