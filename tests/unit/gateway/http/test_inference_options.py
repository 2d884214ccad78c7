# What a caller may say beyond OpenAI's fields, in headers or body.

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.checks import refuse_unpriced
from gateway.dialects.options import DEFAULT_OPTIONS, read_options
from protocol.errors import BadRequest, UnsupportedParameter


def test_nothing_said_is_the_default() -> None:
    """Without options a call is interactive and of normal priority."""
    assert read_options({}, {}) is DEFAULT_OPTIONS


@pytest.mark.parametrize("body", [{"tier": "batch"}, {"x-tier": "batch"}])
def test_body_and_header_mean_the_same(body: dict[str, Any]) -> None:
    """The names of the headers are accepted in the body, with their x- or without, and do not travel on."""
    options = read_options({"x-tier": "batch"}, body)

    assert options.tier == "batch"
    assert body == {}


def test_header_and_body_that_disagree_are_refused() -> None:
    """Nobody can say which of two different wishes was meant."""
    with pytest.raises(BadRequest, match="x-tier") as caught:
        read_options({"x-tier": "batch"}, {"tier": "interactive"})

    assert (caught.value.param, caught.value.code) == ("tier", "invalid_value")


def test_numbers_agree_by_value() -> None:
    """A header is text: 0.50 there and 0.5 in the body are the same number."""
    assert read_options({"x-quality": "0.50"}, {"quality": 0.5}).quality == 0.5


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"x-tier": "soon"}, "tier"),
        ({"x-priority": "urgent"}, "priority"),
        ({"x-quality": "1.5"}, "quality"),
        ({"x-quality": "nan"}, "quality"),
        ({"x-quality": "good"}, "quality"),
        ({"x-max-cost-usd": "-1"}, "max_cost_usd"),
        ({"x-max-cost-usd": "inf"}, "max_cost_usd"),
    ],
)
def test_values_out_of_range_are_refused_by_name(headers: dict[str, str], word: str) -> None:
    """A refusal names the option, as it was said, and what would be right."""
    with pytest.raises(BadRequest, match=f"'{next(iter(headers))}' must be") as caught:
        read_options(headers, {})

    assert (caught.value.param, caught.value.code) == (word, "invalid_value")


def test_a_team_that_is_no_text_is_refused_by_name() -> None:
    """In the body, where it can be a number."""
    with pytest.raises(BadRequest, match="'team_id' must be a text, not '5'") as caught:
        read_options({}, {"team_id": 5})

    assert caught.value.param == "team_id"


def test_a_number_too_large_for_any_is_refused() -> None:
    """JSON knows integers of four hundred digits, in the body and beside a header."""
    for headers in ({}, {"x-max-cost-usd": "1"}):
        with pytest.raises(BadRequest, match="max_cost_usd"):
            read_options(headers, {"max_cost_usd": 10**400})


def test_fields_that_change_the_price_are_refused() -> None:
    """What no price of ours covers is refused; the harmless default of the same field is not."""
    refuse_unpriced({"service_tier": "auto", "unknown": 1})

    with pytest.raises(UnsupportedParameter, match="service_tier"):
        refuse_unpriced({"service_tier": "scale"})
