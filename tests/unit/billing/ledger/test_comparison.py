# What the same tokens would have cost elsewhere, and what a choice was worth: by hand, to the nano-dollar.

from __future__ import annotations

from datetime import date
from decimal import Decimal

from billing.core.money import to_nano
from billing.core.prices import LaterPrice, Price, PriceStep
from billing.ledger.choices import Alternative, AskedSum, missed_saving, saving_of_auto
from billing.ledger.comparison import cost_at, price_on, share, sum_of, usd_per_million, uses_of
from billing.ledger.statements import Line, Totals
from protocol.usage import Usage

GPT_4O = Price(input=to_nano("2.50"), cached_input=to_nano("1.25"), output=to_nano(10), batch_discount=0.5)
DAY = date(2026, 4, 5)


def line(model: str | None, tier: str | None, total: Totals, corrections: Totals | None = None) -> Line:
    return Line(groups=(model, tier), total=total, corrections=corrections or Totals())


def test_the_same_tokens_cost_what_the_other_price_says() -> None:
    """4,200,000 tokens in and 840,000 out at GPT-4o: 4.2 x $2.50 + 0.84 x $10 = $18.90; batch at half price."""
    tokens = Totals(requests=840, input_tokens=4_200_000, output_tokens=840_000, cost_nanousd=to_nano("2.352"))

    [use] = uses_of([line("llama", "interactive", tokens), line("llama", "batch", tokens)], GPT_4O)

    assert use.groups == ("llama",)
    assert use.compared_nanousd == to_nano("18.90") + to_nano("9.45")
    assert use.totals == tokens + tokens


def test_uses_hold_what_came_late_and_what_people_booked() -> None:
    """A team owes its corrections too, so the comparison speaks of all of it."""
    total = Totals(requests=1, input_tokens=2_000_000, cost_nanousd=100)
    late = Totals(requests=1, input_tokens=1_000_000, cost_nanousd=-30, entries=1)

    uses = uses_of([line("a", "interactive", total, late), line(None, None, Totals(), late)], GPT_4O)

    assert [use.totals.cost_nanousd for use in uses] == [70, -30]
    assert [use.compared_nanousd for use in uses] == [to_nano("7.50"), to_nano("2.50")]
    assert sum_of(uses, is_compared=True).compared_nanousd == to_nano(10)


def test_tokens_given_back_are_given_back_at_the_other_price() -> None:
    """A correction that leaves fewer tokens than none lowers the comparison, and does not count as free."""
    input_back = Totals(input_tokens=-1_000_000, output_tokens=500_000, entries=1)
    output_back = Totals(input_tokens=1_000_000, output_tokens=-500_000, entries=1)

    uses = uses_of([line("a", None, Totals(), input_back), line("b", None, Totals(), output_back)], GPT_4O)

    assert [use.compared_nanousd for use in uses] == [to_nano("2.50"), to_nano("-2.50")]


def test_without_a_price_nothing_is_compared() -> None:
    """No comparison is asked for, none is shown."""
    [use] = uses_of([line("a", "batch", Totals(input_tokens=5))], None)

    assert use.compared_nanousd is None
    assert sum_of([use], is_compared=False).compared_nanousd is None


def test_sums_are_priced_at_the_first_step() -> None:
    """A million short prompts are no prompt of a billion tokens."""
    steep = Price(
        input=to_nano(1), output=to_nano(2), steps=(PriceStep(above=200_000, input=to_nano(9), output=to_nano(9)),)
    )

    assert cost_at(Usage(1_000_000, output_tokens=1_000_000), 10, price_on(steep, DAY), "interactive") == to_nano(3)


def test_the_price_is_that_of_the_day() -> None:
    """An announced change counts from its day on, and the batch discount outlives it."""
    change = LaterPrice(1_775_347_200.0, Price(input=to_nano(4), output=to_nano(8)))  # 2026-04-05
    price = Price(input=to_nano(1), output=to_nano(2), batch_discount=0.5, later=(change,))
    million = Usage(1_000_000)

    assert cost_at(million, 1, price_on(price, date(2026, 4, 4)), "interactive") == to_nano(1)
    assert cost_at(million, 1, price_on(price, DAY), "interactive") == to_nano(4)
    assert cost_at(million, 1, price_on(price, DAY), "batch") == to_nano(2)


def test_a_price_for_each_call_counts_every_call() -> None:
    """A fee of a tenth of a cent a call comes to a dollar for a thousand calls."""
    price = Price(input=to_nano(1), output=to_nano(1), request=to_nano("0.001"))

    assert cost_at(Usage(), 1000, price_on(price, DAY), "interactive") == to_nano(1)


def test_calls_whose_answers_were_blocked_cost_their_fee_too() -> None:
    """Somebody answered them. Tokens given back bring no fee back."""
    price = Price(input=to_nano(1), output=to_nano(1), request=to_nano("0.001"))
    calls = Totals(requests=3, blocked=2, input_tokens=-1_000_000)

    [use] = uses_of([line("a", "interactive", calls)], price)

    assert use.compared_nanousd == to_nano("0.005") - to_nano(1)


def test_dollars_per_million_tokens() -> None:
    """$12.34 for five million tokens are $2.468 a million; none used, no rate."""
    assert usd_per_million(to_nano("12.34"), 5_000_000) == Decimal("2.468")
    assert usd_per_million(1, 3) == Decimal("0.000333")
    assert usd_per_million(5, 0) is None
    assert usd_per_million(5, -7) is None


def test_shares_of_a_whole() -> None:
    """A third is a third, and nothing has no shares."""
    assert share(1, 3) == Decimal("0.333333")
    assert share(0, 0) is None
    assert share(1, -1) is None


AUTO = Alternative(asked="auto", is_auto=True, price=Price(input=to_nano(5), output=to_nano(20)))
LARGE = Alternative(asked="large", is_auto=False, price=Price(input=to_nano(1), output=to_nano(2)), quality=0.8)


def asked(name: str, suffices: bool | None, requests: int, tokens: int, cost: str) -> AskedSum:
    return AskedSum(
        team_id="team_a",
        asked=name,
        tier="interactive",
        suffices=suffices,
        requests=requests,
        usage=Usage(tokens),
        cost_nanousd=to_nano(cost),
    )


def test_auto_saved_what_its_large_model_would_have_cost_more() -> None:
    """Ten million tokens for $10 instead of $50."""
    saving = saving_of_auto([asked("auto", None, 3, 10_000_000, "10"), asked("large", None, 1, 10, "1")], [AUTO, LARGE])

    assert (saving.requests, saving.cost_nanousd, saving.saved_nanousd) == (3, to_nano(10), to_nano(40))


def test_a_choice_may_have_cost_more() -> None:
    """When automatic routes went to dearer models than the first large one, the saving is negative."""
    saving = saving_of_auto([asked("auto", None, 1, 1_000_000, "7")], [AUTO])

    assert saving.saved_nanousd == -to_nano(2)


def test_a_sample_speaks_for_all() -> None:
    """In the sample $3 of $5 were not needed; of all the $50 that is $30."""
    sums = [
        asked("large", None, 90, 9_000_000, "45"),  # not judged
        asked("large", True, 8, 1_000_000, "4"),  # a small model's price: $1
        asked("large", False, 2, 1_000_000, "1"),
    ]

    missed = missed_saving(sums, [AUTO, LARGE])

    assert (missed.requests, missed.sample_requests, missed.cost_nanousd) == (100, 10, to_nano(50))
    assert missed.saved_nanousd == to_nano(30)


def test_without_a_sample_there_is_no_estimate() -> None:
    """Nothing is made up."""
    missed = missed_saving([asked("large", None, 9, 9, "45")], [LARGE])

    assert (missed.sample_requests, missed.saved_nanousd) == (0, None)
    assert missed_saving([], []).saved_nanousd is None
