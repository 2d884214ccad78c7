# What is held for a call on its route, before any upstream hears of it.

from __future__ import annotations

from msgspec.structs import replace

from billing.core.money import to_nano
from billing.core.prices import LaterPrice, Price, PriceStep, cost_of
from gateway.calls.call import Call
from gateway.core.principals import Caller, Team
from gateway.inference.admission import legs_of
from protocol.chat import ChatRequest, Message
from protocol.usage import Usage
from router import RoutingOptions
from router.catalog.targets import Endpoint, ModelSpec, Route, Target, Tier
from tests.support.clock import NOON, SetClock
from tests.support.house import model

PRICE = Price(input=to_nano(3), output=to_nano(15), batch_discount=0.5)
LONG = PriceStep(above=1_000, input=to_nano(6), output=to_nano("22.5"))
ASKED = ChatRequest(model="small", messages=(Message(role="user", content="word " * 400),), max_tokens=100)


def call_of(created_at: float = NOON, tier: Tier = Tier.INTERACTIVE) -> Call:
    """Return a call whose prompt has 2,000 bytes and some hundred tokens."""
    return Call(
        request_id=SetClock().new_id(),
        caller=Caller(team=Team(id="a", name="A"), key_id="k"),
        endpoint="chat.completions",
        request=ASKED,
        routing=RoutingOptions(tier=tier),
        created_at=created_at,
        started=0.0,
    )


def route_of(*models: ModelSpec) -> Route:
    """Return a route over these models."""
    return Route("small", tuple(Target(spec, Endpoint("here", "http://upstream")) for spec in models), "named")


def test_each_target_is_held_at_its_own_price() -> None:
    """A leg for every target of the route; the dearest of them is held, whichever answers."""
    cheap, dear = model("small", price=PRICE), model("large", price=replace(PRICE, output=to_nano(100)))

    legs = legs_of(call_of(), route_of(cheap, dear))

    assert legs[0].tokens == legs[1].tokens > 2_000
    assert legs[1].cost_nanousd - legs[0].cost_nanousd == 100 * 85_000  # 100 tokens, $85 a million dearer


def test_both_sides_of_a_step_are_held_for() -> None:
    """The bytes of the prompt pass the step, its tokens may not: what it will cost is covered on either side."""
    for step in (LONG, PriceStep(above=1_000, input=to_nano(1), output=to_nano(1))):
        price = replace(PRICE, steps=(step,))
        [leg] = legs_of(call_of(), route_of(model("small", price=price)))

        for prompt in (401, 1_000, 1_001, leg.tokens - 100):
            assert cost_of(Usage(prompt, output_tokens=100), price) <= leg.cost_nanousd


def test_a_call_is_held_at_the_price_of_its_moment() -> None:
    """As it is charged: an announced change counts from its moment on."""
    spec = model("small", price=replace(PRICE, later=(LaterPrice(NOON, replace(PRICE, input=to_nano(6))),)))
    before, after = (legs_of(call_of(moment), route_of(spec))[0] for moment in (NOON - 1, NOON))

    assert after.cost_nanousd - before.cost_nanousd == (before.tokens - 100) * 3_000


def test_a_batch_call_is_held_with_its_discount() -> None:
    """Half of everything, where the file says so of an own engine."""
    whole, half = (legs_of(call_of(tier=tier), route_of(model("small", price=PRICE)))[0] for tier in Tier)

    assert half.cost_nanousd == whole.cost_nanousd / 2
