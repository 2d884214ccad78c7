# Pictures of words, by the stock openai package: charged by the tokens that the upstream counts, or by the picture.

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.house import House
from tests.support.leaving import ask_and_leave
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _strict(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    violations = upstream.violations
    upstream.forget()
    assert violations == []


def test_pictures_cost_what_their_tokens_cost(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The upstream's count at the model's price; held for the longest that each can be."""
    raw = openai.images.with_raw_response.generate(model="painter", prompt="A toll gate", n=2, quality="low")
    made, row, (sent,) = raw.parse(), house.record_of(raw.http_response), upstream.requests
    usage = made.usage

    assert sent.body == {"model": "gpt-image-2", "prompt": "A toll gate", "n": 2, "quality": "low"}
    assert made.data is not None and len(made.data) == 2 and made.data[0].b64_json
    assert (made.size, made.quality) == ("1024x1024", "low")
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (3, 544)
    cost = Decimal(3 * 5 + 544 * 30) / 10**6
    assert Decimal(usage.cost_usd) == cost == Decimal(str(row["cost_usd"]))  # type: ignore[attr-defined]
    assert (row["endpoint"], row["units"]) == ("images", {"images": 2})
    assert row["held_nanousd"] >= 2 * 1024 * 30_000 and row["held_tokens"] >= 2 * 1024


def test_pictures_are_priced_by_the_piece(house: House, openai: OpenAI) -> None:
    """Where the upstream has it so, and counts no tokens; nothing more is held."""
    raw = openai.images.with_raw_response.generate(model="brush", prompt="A toll gate", n=3, response_format="url")
    made, row = raw.parse(), house.record_of(raw.http_response)

    assert made.data is not None and [each.url for each in made.data][2] == "https://pictures.example/2"
    assert (row["cost_usd"], row["units"], row["held_nanousd"]) == (0.21, {"images": 3}, 210_000_000)
    assert row["output_tokens"] == 0 and row["held_tokens"] < 100
    with house.client() as client:
        assert client.get("/v1/models/brush").json()["price"]["image"] == 0.07


@pytest.mark.parametrize(
    ("model", "asked", "held", "cost"),
    [
        ("canvas", {"quality": "low", "size": "1536x1024", "n": 2}, "0.04", "0.04"),
        ("canvas", {"quality": "high", "size": "4096x4096"}, "0.17", "0.17"),
        ("canvas", {"size": "1536x1024"}, "0.17", "0.05"),
        ("canvas", {"quality": "auto"}, "0.17", "0.05"),
        ("sketch", {}, "0.17", "0.01"),
        ("sketch", {"quality": "high"}, "0.17", "0.17"),
    ],
)
def test_a_picture_costs_what_its_quality_and_size_do(
    house: House, openai: OpenAI, model: str, asked: dict[str, Any], held: str, cost: str
) -> None:
    """Held for the dearest that may come; charged by what was asked for, else by what the upstream says that it made,
    else by the price of what is left to it. The row's price says so, too."""
    raw: Any = openai.images.with_raw_response.generate(model=model, prompt="A toll gate", **asked)
    row = house.record_of(raw.http_response)
    with house.client() as client:
        call = client.get(f"/v1/calls/{row['request_id']}").json()

    assert Decimal(row["held_nanousd"]).scaleb(-9) == Decimal(held)
    assert Decimal(str(row["cost_usd"])) == Decimal(cost)
    lines = call["price"]["lines"]
    assert [Decimal(str(line["cost_usd"])) for line in lines if line["kind"] == "image"] == [Decimal(cost)]


def test_a_picture_of_an_unknown_price_is_not_asked_for(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The parameter that has no price is named; a model that has one, or one price for all, may answer."""
    for wrong in (
        {"size": "2048x2048", "quality": "low"},
        {"quality": "finest"},
        {"size": "2048x2048", "quality": "low"},
    ):
        asked: dict[str, Any] = {"model": "canvas", "prompt": "A toll gate", **wrong}
        with pytest.raises(BadRequestError, match="at the model that answers here is not known") as caught:
            openai.images.generate(**asked)
        assert caught.value.param == next(iter(wrong))
    assert upstream.requests == []

    other: Any = openai.images.generate(**asked, extra_body={"models": ["brush"]})
    assert other.model_used == "brush"


def test_who_leaves_owes_the_pictures(house: House, upstream: ScriptedUpstream) -> None:
    """The upstream has the prompt and goes on to make them; their tokens are estimated, within the hold."""
    upstream.script("hang-before-headers")
    with house.client() as client:
        for model, dollars in (("brush", 0.14), ("painter", (2 * 272 * 30 + 3 * 5) / 10**6)):
            seen, path = len(upstream.requests), f"/v1/calls?user=leaves-{model}"
            asked = {"model": model, "prompt": "A toll gate", "n": 2, "quality": "low", "user": f"leaves-{model}"}
            ask_and_leave(house, "/v1/images/generations", asked, lambda seen=seen: len(upstream.requests) > seen)
            until(lambda path=path: client.get(path).raise_for_status().json()["data"])
            (row,) = client.get(path).json()["data"]

            assert (row["status"], row["cost_usd"]) == ("interrupted", pytest.approx(dollars, rel=0.01))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": "a" * 32_001}, "at most 32000 characters"),
        ({"n": 11}, "from 1 to 10"),
        ({"stream": True}, "come whole here"),
        ({"output_format": "svg"}, "output_format"),
        ({"model": "claude"}, "lacks images|chat completions alone"),
    ],
)
def test_bad_input_is_told_what_would_be_right(openai: OpenAI, wrong: dict[str, Any], words: str) -> None:
    """A 400 that names the field."""
    asked: dict[str, Any] = {"model": "painter", "prompt": "A toll gate", **wrong}
    with pytest.raises(BadRequestError, match=words) as caught:
        openai.images.generate(**asked)

    assert caught.value.param == next(iter(wrong))


def test_an_answer_without_pictures_fails_over(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """It is a fault of the upstream; the next model answers."""
    upstream.script("not-json", model="gpt-image-2")
    made = openai.images.generate(model="painter", prompt="A toll gate", extra_body={"models": ["brush"]})

    assert made.model_used == "brush"  # type: ignore[attr-defined]
