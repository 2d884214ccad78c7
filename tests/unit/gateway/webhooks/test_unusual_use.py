# What is unusual about a key's day, beside its own past.

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from billing.core.money import NANO
from gateway.webhooks.unusual_use import KeyDay, event_data, signals_of
from tests.support.clock import SetClock

USUAL = KeyDay(
    team_id="search",
    key_id="key_a",
    nanousd=2 * NANO,
    calls=900,
    networks=2,
    past_days=20,
    most_nanousd=3 * NANO,
    most_calls=1000,
    most_networks=2,
    past_networks=2,
    network_days=20,
)


@pytest.mark.parametrize(
    ("day", "signals"),
    [
        ({}, []),
        ({"nanousd": 12 * NANO}, ["spend"]),
        ({"nanousd": 12 * NANO - 1}, []),
        ({"nanousd": 12 * NANO, "past_days": 6}, []),  # too little is known of it
        ({"nanousd": NANO // 2, "most_nanousd": 0}, []),  # a first half dollar is no theft
        ({"calls": 4000}, ["velocity"]),
        ({"calls": 400, "most_calls": 2}, []),
        ({"networks": 3, "new_networks": 1}, ["new_address"]),
        ({"networks": 3, "new_networks": 1, "past_networks": 9}, []),  # of a laptop that travels
        (
            {"networks": 30, "new_networks": 30, "past_networks": 1, "network_days": 6},
            [],
        ),  # they are not kept for long yet
        ({"networks": 8, "new_networks": 6}, ["shared"]),
        ({"networks": 40, "most_networks": 12, "past_networks": 90}, []),
        ({"nanousd": 90 * NANO, "calls": 9000, "networks": 30, "new_networks": 28}, ["spend", "velocity", "shared"]),
    ],
)
def test_a_day_is_unusual_beside_its_keys_own_past(day: dict[str, Any], signals: list[str]) -> None:
    """Where there is one, and the day is no trifle."""
    assert signals_of(replace(USUAL, **day)) == signals


def test_an_event_says_what_was_and_what_is_usual() -> None:
    """In exact dollars."""
    day = replace(USUAL, nanousd=41_100_000_000)

    assert event_data(day, "spend", SetClock(1_795_219_200.0).today()) == {
        "team_id": "search",
        "key_id": "key_a",
        "signal": "spend",
        "day": "2026-11-21",
        "used_usd": Decimal("41.1"),
        "most_usd": Decimal("3"),
    }
