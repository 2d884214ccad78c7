# Money as whole billionths of a dollar. Entries are only added; a balance is a sum; one function rounds.

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from typing import NewType

NanoDollars = NewType("NanoDollars", int)

NANO = 1_000_000_000


def to_nano(dollars: Decimal | str | int | float) -> NanoDollars:
    """Return dollars as whole nano-dollars, rounded half to even.

    A float is read as the decimal that it prints as (0.1 is a tenth), so that prices in YAML mean what they say.
    """
    return NanoDollars(int((Decimal(str(dollars)) * NANO).to_integral_value(rounding=ROUND_HALF_EVEN)))


def to_decimal(nano: int) -> Decimal:
    """Return nano-dollars as an exact decimal number of dollars."""
    return Decimal(nano).scaleb(-9)


def to_text(nano: int) -> str:
    """Return nano-dollars as a plain decimal text, two places or as many as needed: ``0.000123``, ``12.00``."""
    whole, part = divmod(abs(nano), NANO)
    return f"{'-' if nano < 0 else ''}{whole}.{f'{part:09}'.rstrip('0').ljust(2, '0')}"
