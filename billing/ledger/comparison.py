# What the same tokens would have cost elsewhere, dollars per million tokens, and shares of a whole: arithmetic over the
# lines of statements. Nothing is looked up here.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_EVEN, Decimal

from msgspec import Struct
from msgspec.structs import replace

from billing.core.money import NanoDollars
from billing.core.prices import Price, cost_of, price_at
from billing.core.records import TOKENS
from billing.ledger.statements import Line, Totals, sum_totals
from protocol.usage import Usage

BATCH = "batch"  # the tier with a discount at our own engines
PLACES = Decimal("0.000001")  # of rates and shares, which have no end


class Use(Struct, frozen=True, kw_only=True):
    """What one group used in all, what was booked late or by hand included, and what it would have cost elsewhere."""

    groups: tuple[str | None, ...]
    totals: Totals
    compared_nanousd: NanoDollars | None = None

    def __add__(self, other: Use) -> Use:
        compared = None
        if self.compared_nanousd is not None:
            compared = NanoDollars(self.compared_nanousd + (other.compared_nanousd or 0))
        return Use(groups=self.groups, totals=self.totals + other.totals, compared_nanousd=compared)


def uses_of(lines: Iterable[Line], price: Price | None) -> list[Use]:
    """Return the uses of lines whose last group is the tier, added up over the tiers, in the order of the lines.

    ``price`` is that of the model to compare with, as ``price_on`` returns it.
    """
    uses = []
    for line in lines:
        totals = line.total + line.corrections
        compared = None if price is None else _cost_of_totals(totals, price, line.groups[-1])
        uses.append(Use(groups=line.groups, totals=totals, compared_nanousd=compared))
    return add_up(uses, slice(-1))


def add_up(uses: Iterable[Use], part: slice) -> list[Use]:
    """Return the uses added up over all but a part of their groups, in the order in which each part is first met."""
    found: dict[tuple[str | None, ...], Use] = {}
    for use in uses:
        groups = use.groups[part]
        found[groups] = found[groups] + use if groups in found else replace(use, groups=groups)
    return list(found.values())


def sum_of(uses: Sequence[Use], *, is_compared: bool) -> Use:
    """Return the sum of all uses."""
    compared = NanoDollars(sum(use.compared_nanousd or 0 for use in uses)) if is_compared else None
    return Use(groups=(), totals=sum_totals(use.totals for use in uses), compared_nanousd=compared)


def price_on(price: Price, day: date) -> Price:
    """Return ``price`` as it can be used on sums: that of a day, at its first step.

    Where a price rises with the length of a prompt, sums do not say how long each prompt was.
    """
    now = price_at(price, datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    return replace(now, steps=(), later=(), batch_discount=price.batch_discount)


def cost_at(usage: Usage, calls: int, price: Price, tier: str | None) -> NanoDollars:
    """Return what so many calls with the summed ``usage`` would cost at ``price``, as ``price_on`` returns it."""
    return cost_of(usage, replace(price, request=price.request * calls), batch=tier == BATCH)


def usd_per_million(nano: int, tokens: int) -> Decimal | None:
    """Return dollars per million tokens, to the sixth place; None where no tokens were used."""
    if tokens <= 0:
        return None
    return (Decimal(nano) / (Decimal(tokens) * 1000)).quantize(PLACES, ROUND_HALF_EVEN)


def share(part: int, whole: int) -> Decimal | None:
    """Return which part of the whole this is, 0 to 1, to the sixth place; None where there is no whole."""
    if whole <= 0:
        return None
    return (Decimal(part) / Decimal(whole)).quantize(PLACES, ROUND_HALF_EVEN)


def _cost_of_totals(totals: Totals, price: Price, tier: str | None) -> NanoDollars:
    """Return the cost of sums in which corrections may have left fewer tokens than none: these are given back."""
    used = Usage(**{name: getattr(totals, name) for name in TOKENS})
    given_back = Usage(max(0, -totals.input_tokens), output_tokens=max(0, -totals.output_tokens))
    calls = totals.requests + totals.blocked
    return NanoDollars(cost_at(used, calls, price, tier) - cost_at(given_back, 0, price, tier))
