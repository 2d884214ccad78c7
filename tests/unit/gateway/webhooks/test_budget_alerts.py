# Which thresholds are reached, and which of them are news.

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from billing.core.holds import LimitName, Limits
from gateway.webhooks.budget_alerts import Reached, Spending, event_data, news, thresholds_reached

DAY = date(2026, 11, 21)


def spending(limits: Limits, **used: int) -> Spending:
    usual: dict[str, Any] = {"day_tokens": 0, "day_nanousd": 0, "month_nanousd": 0, "webhook_url": None}
    return Spending(team_id="search", limits=limits, **(usual | used))


@pytest.mark.parametrize(
    ("used", "expected"), [(0, []), (79, []), (80, [80]), (99, [80]), (100, [80, 100]), (200, [80, 100])]
)
def test_a_threshold_is_reached_at_its_share_of_the_cap(used: int, expected: list[int]) -> None:
    """To the nano-dollar: neither before nor after."""
    cap = 10**15
    reached = thresholds_reached(spending(Limits(nanousd_per_day=cap), day_nanousd=cap // 100 * used), DAY)

    assert [each.threshold for each in reached] == expected
    assert thresholds_reached(spending(Limits(nanousd_per_day=cap), day_nanousd=cap // 100 * 80 - 1), DAY) == []


def test_each_limit_has_its_own_period() -> None:
    """Days by their date, months by theirs."""
    limits = Limits(nanousd_per_day=10, nanousd_per_month=10, tokens_per_day=10, requests_per_minute=1)
    reached = thresholds_reached(spending(limits, day_tokens=8, day_nanousd=8, month_nanousd=8), DAY)

    assert {(each.limit, each.period) for each in reached} == {
        (LimitName.USD_PER_DAY, "2026-11-21"),
        (LimitName.USD_PER_MONTH, "2026-11"),
        (LimitName.TOKENS_PER_DAY, "2026-11-21"),
    }


def test_a_cap_of_nothing_is_no_budget() -> None:
    """A limit of 0 shuts a team out; there is nothing to warn of."""
    assert thresholds_reached(spending(Limits(nanousd_per_day=0, tokens_per_day=0)), DAY) == []


def reached(threshold: int, key_id: str = "") -> Reached:
    return Reached(
        team_id="search",
        key_id=key_id,
        limit=LimitName.USD_PER_DAY,
        period=f"{DAY}",
        threshold=threshold,
        used=9,
        cap=10,
    )


def test_only_the_highest_new_threshold_is_told() -> None:
    """Deliveries may overtake each other: 80 after 100 would mislead."""
    both = [reached(80), reached(100)]

    assert news(both[:1], set()) == [reached(80)]
    assert news(both, set()) == [reached(100)]
    assert news(both, {reached(80).place}) == [reached(100)]
    assert news(both, {reached(100).place}) == []
    assert news(both[:1], {reached(80).place}) == []


def test_a_key_and_its_team_are_told_apart() -> None:
    """Each scope has thresholds of its own."""
    assert news([reached(80), reached(80, "key_1")], {reached(80).place}) == [reached(80, "key_1")]


def test_an_event_says_what_was_used_of_what() -> None:
    """Dollars for money, tokens for tokens; a key where it is one's own limit."""
    money = Reached(
        team_id="search",
        key_id="key_1",
        limit=LimitName.USD_PER_MONTH,
        period="2026-11",
        threshold=80,
        used=8_100_000_000,
        cap=10_000_000_000,
    )
    tokens = Reached(
        team_id="search", key_id="", limit=LimitName.TOKENS_PER_DAY, period=f"{DAY}", threshold=100, used=7, cap=7
    )

    assert event_data(money) == {
        "team_id": "search",
        "key_id": "key_1",
        "limit": "usd_per_month",
        "threshold": 80,
        "used_usd": Decimal("8.10"),
        "cap": Decimal("10.00"),
        "period": "2026-11",
    }
    assert event_data(tokens) == {
        "team_id": "search",
        "limit": "tokens_per_day",
        "threshold": 100,
        "used_tokens": 7,
        "cap": 7,
        "period": "2026-11-21",
    }
