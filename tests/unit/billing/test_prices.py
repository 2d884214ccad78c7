# What tokens cost.

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from billing.money import NanoDollars, to_nano
from billing.prices import Price, cost_of
from protocol.usage import Usage

COUNTS = st.integers(min_value=0, max_value=2_000_000)
NANOS = st.integers(min_value=0, max_value=10**12).map(NanoDollars)
GPT_4O = Price(input=to_nano("2.50"), cached_input=to_nano("1.25"), output=to_nano(10))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    """Draw a usage whose parts fit into its wholes."""
    cached, written, plain, output = (draw(COUNTS) for _ in range(4))
    return Usage(cached + written + plain, cached, output, 0, written)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    """Draw a price, with or without prices for caches."""
    return Price(
        input=draw(NANOS),
        output=draw(NANOS),
        cached_input=draw(st.none() | NANOS),
        cache_write=draw(st.none() | NANOS),
        batch_discount=draw(st.sampled_from([1.0, 0.5, 0.75, 0.333333])),
    )


@given(usages(), prices(), st.booleans())
def test_cost_is_the_exact_sum_rounded_up_once(usage: Usage, price: Price, batch: bool) -> None:
    """The cost is never below the exact one, and less than two nano-dollars above it."""
    cached = price.input if price.cached_input is None else price.cached_input
    written = price.input if price.cache_write is None else price.cache_write
    plain = usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens
    exact = Decimal(
        plain * price.input
        + usage.cached_input_tokens * cached
        + usage.cache_write_tokens * written
        + usage.output_tokens * price.output
    ) / Decimal(1_000_000)
    exact *= Decimal(str(price.batch_discount)) if batch else 1

    assert exact - Decimal("0.000001") <= cost_of(usage, price, batch=batch) < exact + 1


@given(usages(), usages(), prices())
def test_more_tokens_never_cost_less(some: Usage, more: Usage, price: Price) -> None:
    """A hold for the most tokens covers every smaller usage of the same kinds."""
    assert cost_of(some, price) <= cost_of(some + more, price)


@given(usages(), prices())
def test_a_cache_without_a_price_of_its_own_costs_what_input_costs(usage: Usage, price: Price) -> None:
    """No price is zero by accident."""
    plain = Price(input=price.input, output=price.output)

    assert cost_of(usage, plain) == cost_of(Usage(usage.input_tokens, output_tokens=usage.output_tokens), plain)


def test_known_prices_come_out_to_the_cent() -> None:
    """4,200,000 input tokens, half of them cached, and 840,000 output tokens of GPT-4o are 16.275 dollars."""
    usage = Usage(4_200_000, 2_100_000, 840_000)

    assert cost_of(usage, GPT_4O) == to_nano("16.275")
    assert cost_of(usage, Price(**{**as_dict(GPT_4O), "batch_discount": 0.5}), batch=True) == to_nano("8.1375")


def test_the_smallest_call_is_not_free() -> None:
    """One token of a millionth of a nano-dollar costs a whole one."""
    assert cost_of(Usage(1), Price(input=NanoDollars(1), output=NanoDollars(0))) == 1


def as_dict(price: Price) -> dict[str, NanoDollars]:
    """Return the prices per million."""
    assert price.cached_input is not None
    return {"input": price.input, "output": price.output, "cached_input": price.cached_input}
