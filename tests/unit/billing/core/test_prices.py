# What tokens cost, and what a hold must cover.

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.core.money import NanoDollars, to_decimal, to_nano
from billing.core.pictures import PicturePrice
from billing.core.prices import (
    LaterPrice,
    Price,
    PriceStep,
    cost_lines,
    cost_of,
    for_picture,
    kept_an_hour,
    most_cost,
    of_picture,
    picture_prices,
    price_at,
    rates_for,
    says_an_hour,
    times,
)
from protocol.usage import Usage

COUNTS = st.integers(min_value=0, max_value=2_000_000)
NANOS = st.integers(min_value=0, max_value=10**12).map(NanoDollars)
DISCOUNTS = st.sampled_from([1.0, 0.5, 0.75, 0.333333, 1e-7])
GPT_4O = Price(input=to_nano("2.50"), cached_input=to_nano("1.25"), output=to_nano(10))
STEPPED = Price(
    input=to_nano(3),
    output=to_nano(15),
    steps=(
        PriceStep(above=200_000, input=to_nano(6), output=to_nano("22.5")),
        PriceStep(above=500_000, input=to_nano(1), output=to_nano(2)),
    ),
)
MEDIA = ("audio_input", "cached_audio", "image_input", "cached_image", "audio_output")
JULY, AUGUST = 1_782_864_000.0, 1_785_542_400.0  # 2026-07-01 and 2026-08-01, midnight UTC


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    """Draw a usage whose parts fit into its wholes."""
    cached, written, plain, reasoning, said = (draw(COUNTS) for _ in range(5))
    return Usage(cached + written + plain, cached, reasoning + said, reasoning, written)


@st.composite
def spoken_usages(draw: st.DrawFn) -> Usage:
    """Draw the usage of a conversation by voice: prompt and answer have parts that are no words."""
    words, heard, seen, kept_words, kept_heard, kept_seen, said, spoken = (draw(COUNTS) for _ in range(8))
    cached = kept_words + kept_heard + kept_seen
    return Usage(
        words + heard + seen + cached,
        cached,
        said + spoken,
        audio_input_tokens=heard + kept_heard,
        cached_audio_tokens=kept_heard,
        image_input_tokens=seen + kept_seen,
        cached_image_tokens=kept_seen,
        audio_output_tokens=spoken,
    )


@st.composite
def rates(draw: st.DrawFn) -> dict[str, NanoDollars | None]:
    """Draw what each kind costs; some kinds have no price of their own."""
    optional = ("cached_input", "cache_write", "reasoning")
    return {"input": draw(NANOS), "output": draw(NANOS), **{kind: draw(st.none() | NANOS) for kind in optional}}


@st.composite
def prices(draw: st.DrawFn) -> Price:
    """Draw a price of up to three steps, which may rise or fall, with or without prices for caches and reasoning."""
    starts = sorted(draw(st.sets(st.integers(min_value=1, max_value=3_000_000), max_size=3)))
    return Price(
        **draw(rates()),
        request=draw(NANOS),
        steps=tuple(PriceStep(above=start, **draw(rates())) for start in starts),
        batch_discount=draw(DISCOUNTS),
    )


@st.composite
def spoken_prices(draw: st.DrawFn) -> Price:
    """Draw a price with or without rates for what is heard, seen and said."""
    return replace(Price(**draw(rates())), **{kind: draw(st.none() | NANOS) for kind in MEDIA})


@given(usages(), prices(), st.booleans())
def test_cost_is_the_exact_sum_rounded_up_once(usage: Usage, price: Price, batch: bool) -> None:
    """The least whole number of nano-dollars that is not below the exact cost, discount included."""
    at = rates_for(usage.input_tokens, price)
    priced = (
        (usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens, at.input),
        (usage.cached_input_tokens, at.input if at.cached_input is None else at.cached_input),
        (usage.cache_write_tokens, at.input if at.cache_write is None else at.cache_write),
        (usage.output_tokens - usage.reasoning_tokens, at.output),
        (usage.reasoning_tokens, at.output if at.reasoning is None else at.reasoning),
    )
    exact = Fraction(sum(tokens * rate for tokens, rate in priced), 1_000_000) + price.request
    exact *= Fraction(str(price.batch_discount)) if batch else 1

    assert exact <= cost_of(usage, price, batch=batch) < exact + 1


@given(spoken_usages(), spoken_prices())
def test_a_conversation_by_voice_costs_what_its_kinds_cost(usage: Usage, price: Price) -> None:
    """Each token at the rate of its kind: what was heard, seen and said by voice at its own, where the price has one;
    what was cached of it without one at that of what was not. No hold for as many tokens is passed."""
    at = price
    words = usage.input_tokens - usage.audio_input_tokens - usage.image_input_tokens
    kept = usage.cached_input_tokens - usage.cached_audio_tokens - usage.cached_image_tokens
    cached_words = at.input if at.cached_input is None else at.cached_input
    priced = [(words - kept, at.input), (kept, cached_words)]
    for count, kept_of, rate, kept_rate in (
        (usage.audio_input_tokens, usage.cached_audio_tokens, at.audio_input, at.cached_audio),
        (usage.image_input_tokens, usage.cached_image_tokens, at.image_input, at.cached_image),
    ):
        fresh_rate = at.input if rate is None else rate
        rate_of_kept = cached_words if rate is None else rate if kept_rate is None else kept_rate
        priced += [(count - kept_of, fresh_rate), (kept_of, rate_of_kept)]
    spoken = at.output if at.audio_output is None else at.audio_output
    priced += [(usage.audio_output_tokens, spoken), (usage.output_tokens - usage.audio_output_tokens, at.output)]
    exact = Fraction(sum(tokens * rate for tokens, rate in priced), 1_000_000)
    lines = cost_lines(usage, price)

    assert exact <= cost_of(usage, price) < exact + 1
    assert cost_of(usage, price) <= most_cost(usage, price)
    assert sum(line.count for line in lines) == usage.total_tokens


@given(usages(), prices(), st.integers(2, 16), st.booleans())
def test_requests_for_one_call_cost_what_each_costs(usage: Usage, price: Price, number: int, batch: bool) -> None:
    """Several replies by several requests: each has the whole prompt, its own step and its own fee, and the call's sum
    is rounded once."""
    together = sum((usage for _ in range(number)), Usage(extra_requests=number - 1))
    alone, sum_of_all = cost_of(usage, price, batch=batch), cost_of(together, price, batch=batch)

    assert number * (alone - 1) < sum_of_all <= number * alone
    assert sum_of_all <= most_cost(together, price, batch=batch)


@given(usages(), prices(), st.integers(0, 15), st.booleans())
def test_the_lines_of_a_cost_add_up_to_it(usage: Usage, price: Price, extra: int, batch: bool) -> None:
    """But for less than a nano-dollar each; no token is in two of them or in none."""
    usage = replace(usage, extra_requests=extra)
    lines = cost_lines(usage, price, batch=batch)
    above = sum(line.cost for line in lines) - cost_of(usage, price, batch=batch)

    assert 0 <= above <= max(0, len(lines) - 1)
    assert sum(line.count for line in lines if line.kind != "request") == usage.total_tokens


@given(usages(), st.data(), prices(), st.booleans())
def test_no_usage_within_a_bound_costs_more_than_its_hold(
    most: Usage, data: st.DataObject, price: Price, batch: bool
) -> None:
    """Whatever the division into kinds, and on whichever side of a step: also of one that lowers the price."""
    edges = [step.above for step in price.steps if step.above <= most.input_tokens]
    upto = st.integers(0, most.input_tokens)
    prompt = data.draw(upto | st.sampled_from(edges) if edges else upto)
    output = data.draw(st.integers(0, most.output_tokens))
    cached = data.draw(st.integers(0, prompt))
    written = data.draw(st.integers(0, prompt - cached))
    used = Usage(prompt, cached, output, data.draw(st.integers(0, output)), written)

    assert cost_of(used, price, batch=batch) <= most_cost(most, price, batch=batch)


@given(usages(), prices(), prices(), NANOS)
def test_a_cache_of_an_hour_costs_what_it_says_and_nothing_else(
    usage: Usage, price: Price, other: Price, hour: int
) -> None:
    """What is written costs the hour's rate at every step and from every change on; all else costs what it did."""
    unsaid = replace(price, later=(LaterPrice(9.0, other),))
    said = replace(
        _by_the_hour(price, NanoDollars(hour)), later=(LaterPrice(9.0, _by_the_hour(other, NanoDollars(hour))),)
    )
    kept = kept_an_hour(said)

    assert kept_an_hour(unsaid) is unsaid and not says_an_hour(unsaid)
    for at in (8.0, 9.0):
        rates = rates_for(usage.input_tokens, price_at(kept, at))
        assert rates.cache_write == hour
        plain = replace(usage, cache_write_tokens=0)
        assert cost_of(plain, kept, at=at) == cost_of(plain, unsaid, at=at)
        assert cost_of(usage, kept, at=at) <= most_cost(usage, kept)


def _by_the_hour(price: Price, hour: NanoDollars) -> Price:
    steps = tuple(replace(step, cache_write_1h=hour) for step in price.steps)
    return replace(price, cache_write_1h=hour, steps=steps)


@given(usages(), prices())
def test_a_hold_is_no_larger_than_some_usage_can_cost(most: Usage, price: Price) -> None:
    """The bound is reached: at the longest prompt of some step, all of it and of the answer of the dearest kinds."""
    prompts = [most.input_tokens, *(step.above for step in price.steps if step.above < most.input_tokens)]
    output = most.output_tokens
    reachable = [
        Usage(prompt, cached, output, reasoning, prompt - cached if writes else 0)
        for prompt in prompts
        for cached, writes in ((0, False), (prompt, False), (0, True))
        for reasoning in (0, output)
    ]

    assert most_cost(most, price) == max(cost_of(used, price) for used in reachable)


@given(usages(), rates(), st.booleans())
def test_a_kind_without_a_price_of_its_own_costs_what_its_whole_costs(
    usage: Usage, some: dict[str, NanoDollars], batch: bool
) -> None:
    """No price is zero by accident: caches cost what input costs, reasoning what output costs."""
    plain = Price(input=some["input"], output=some["output"])
    whole = Usage(usage.input_tokens, output_tokens=usage.output_tokens)

    assert cost_of(usage, plain, batch=batch) == cost_of(whole, plain, batch=batch)


@pytest.mark.parametrize(
    ("prompt", "dollars"),
    [
        (200_000, "0.615"),  # 200,000 × $3 + 1,000 × $15
        (200_001, "1.222506"),  # all of it × $6, the answer × $22.50
        (500_000, "3.0225"),
        (500_001, "0.502001"),  # beyond the next, cheaper step
    ],
)
def test_a_step_prices_the_whole_call(prompt: int, dollars: str) -> None:
    """The token that passes a step changes the price of all tokens, in and out; the step itself is still below it."""
    assert cost_of(Usage(prompt, output_tokens=1_000), STEPPED) == to_nano(dollars)


def test_a_batch_costs_the_same_where_no_discount_is_said() -> None:
    """Not every provider gives one."""
    assert cost_of(Usage(1_000), STEPPED, batch=True) == cost_of(Usage(1_000), STEPPED)


def test_a_bound_at_a_step_is_held_below_it() -> None:
    """A prompt of so many tokens at the most cannot pass the step; one more can."""
    most = [most_cost(Usage(prompt, output_tokens=1_000), STEPPED) for prompt in (200_000, 200_001, 600_000)]

    # The last is dearest just below the step that lowers the price: 500,000 × $6 + 1,000 × $22.50.
    assert most == [to_nano("0.615"), to_nano("1.222506"), to_nano("3.0225")]


def test_cached_tokens_count_towards_a_step() -> None:
    """Providers choose the step by the whole prompt, whatever part of it was cached."""
    assert rates_for(200_001, STEPPED).input == to_nano(6)
    assert cost_of(Usage(200_001, 200_001), STEPPED) == to_nano("1.200006")


def test_an_announced_change_takes_effect_at_its_moment() -> None:
    """Calls are charged at the price of when they were made; holds of unknown moment at the dearest."""
    july = Price(input=to_nano(2), output=to_nano(2), batch_discount=0.5)
    price = Price(
        input=to_nano(1),
        output=to_nano(1),
        batch_discount=0.5,
        later=(LaterPrice(JULY, july), LaterPrice(AUGUST, Price(input=to_nano(1), output=to_nano(1)))),
    )
    usage = Usage(1_000_000)
    costs = [to_decimal(cost_of(usage, price, at=at)) for at in (JULY - 1, JULY, AUGUST - 1, AUGUST)]

    assert [str(cost) for cost in costs] == ["1.000000000", "2.000000000", "2.000000000", "1.000000000"]
    assert (cost_of(usage, price), most_cost(usage, price)) == (to_nano(1), to_nano(2))
    assert most_cost(usage, price, at=AUGUST) == to_nano(1)
    assert cost_of(usage, price, batch=True, at=JULY) == to_nano(1)  # the file's discount stays
    assert price_at(price, JULY) == july


def test_known_prices_come_out_to_the_cent() -> None:
    """4,200,000 input tokens, half of them cached, and 840,000 output tokens of GPT-4o are 16.275 dollars."""
    usage = Usage(4_200_000, 2_100_000, 840_000)
    half = Price(input=GPT_4O.input, cached_input=GPT_4O.cached_input, output=GPT_4O.output, batch_discount=0.5)

    assert cost_of(usage, GPT_4O) == to_nano("16.275")
    assert cost_of(usage, half, batch=True) == to_nano("8.1375")
    assert cost_of(usage, half) == to_nano("16.275")


def test_the_smallest_call_is_not_free() -> None:
    """One token of a millionth of a nano-dollar costs a whole one, and so does a ten-millionth of it."""
    tiny = Price(input=NanoDollars(1), output=NanoDollars(0), batch_discount=1e-7)

    assert cost_of(Usage(1), tiny) == 1
    assert cost_of(Usage(1), tiny, batch=True) == 1
    assert cost_of(Usage(1), Price(input=to_nano("0.0000001"), output=NanoDollars(0))) == 1


def test_a_year_of_calls_adds_up_exactly() -> None:
    """A million calls a day for a year: no sum leaves the whole numbers, and rounding costs a nano-dollar a call."""
    price = Price(input=to_nano("0.0375"), output=to_nano("0.15"))
    calls = 365_000_000
    exact = Fraction("94462.5")  # nano-dollars a call: 1,235 × 37.5 + 321 × 150

    total = sum([cost_of(Usage(1_235, output_tokens=321), price)] * 1_000) * (calls // 1_000)

    assert total == (exact + Fraction(1, 2)) * calls
    assert str(to_decimal(total)) == "34478.995000000"


@pytest.mark.parametrize(
    ("absurd", "sane"),
    [
        (Usage(-5, output_tokens=10), Usage(0, output_tokens=10)),
        (Usage(10, output_tokens=-5), Usage(10)),
        (Usage(10, 30), Usage(10, 10)),
        (Usage(10, -3), Usage(10)),
        (Usage(10, 6, 0, 0, 9), Usage(10, 6, 0, 0, 4)),
        (Usage(10, 0, 5, 50), Usage(10, 0, 5, 5)),
        (Usage(10, 0, 5, -50), Usage(10, 0, 5)),
    ],
)
def test_counts_that_cannot_be_never_make_a_call_cheaper_than_nothing(absurd: Usage, sane: Usage) -> None:
    """None is below zero, and no part is larger than its whole."""
    price = Price(**dict.fromkeys(("input", "output"), to_nano(1)), cached_input=to_nano(9), cache_write=to_nano(2))

    assert cost_of(absurd, price) == cost_of(sane, price) >= 0


def test_absurdly_many_tokens_cost_an_absurd_but_exact_amount() -> None:
    """Python's integers do not overflow; what the ledger cannot hold is bounded where it is written."""
    assert cost_of(Usage(10**18), GPT_4O) == 10**18 * 2_500


KINDS = st.sampled_from([None, "auto", "low", "high"])
SIZES = st.sampled_from([None, "auto", "1x1", "2x1"])
ROWS = st.builds(
    lambda quality, size, price: PicturePrice(quality=quality, size=size, price=price), KINDS, SIZES, NANOS
)


@given(st.lists(ROWS, min_size=1, max_size=6), KINDS, SIZES, KINDS, SIZES, st.sampled_from([1.0, 0.5, 2.0]))
def test_pictures_cost_no_more_than_was_held(
    rows: list[PicturePrice], quality: str | None, size: str | None, made: str | None, as_large: str | None, tier: float
) -> None:
    """Whatever is left open and whatever the upstream says that it made; by a price that the database can be told."""
    dearest = NanoDollars(max(row.price for row in rows))
    price = times(Price(input=NanoDollars(0), output=NanoDollars(0), image=dearest, pictures=tuple(rows)), tier)
    held = for_picture(price, quality, size)
    charged = of_picture(held, made, as_large)
    used = Usage(images=3)

    assert cost_of(used, charged) <= most_cost(used, held) <= most_cost(used, price)
    assert {held, charged} <= {*picture_prices(price), price}
    assert not charged.pictures and charged.image in [row.price for row in price.pictures]
