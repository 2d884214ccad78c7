# Equal models share conversations, not turns.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.core.principals import Caller, Team
from protocol.chat import ChatRequest, Message
from protocol.completions import CompletionRequest
from router import RoutingOptions, choose_route
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.targets import Endpoint
from tests.support.clock import NOON, SetClock
from tests.support.house import model

MODELS = {name: model(name) for name in ("one", "other")}
AUTO = AutoRoute(small=("one", "other"), large=())
CATALOG = Catalog(MODELS, {"upstream": (Endpoint("here", "http://upstream"),)}, {"auto": AUTO}, {}, {})
CLOCK = SetClock()


def call_of(*said: str, team: str = "a", user: str | None = None) -> Call:
    """Return a call of a conversation whose user and model spoke in turns, after the operator."""
    turns = (Message(role="assistant" if place % 2 else "user", content=text) for place, text in enumerate(said))
    asked = ChatRequest(model="auto", messages=(Message(role="system", content="Be kind."), *turns), user=user)
    return Call(
        request_id=CLOCK.new_id(),
        caller=Caller(team=Team(id=team, name=team), key_id="k"),
        endpoint="chat.completions",
        request=asked,
        routing=RoutingOptions(),
        created_at=NOON,
        started=0.0,
    )


def chosen(call: Call) -> str:
    route = choose_route(call.request, call.routing, CATALOG, {}, lambda _: 0.5, share=call.share)
    return route.targets[0].model.name


def test_a_conversation_keeps_its_model_among_equals() -> None:
    """Through all of its turns, at any gateway; many conversations share the models evenly."""
    openings = [f"Which river flows through city {number}?" for number in range(400)]
    first = [chosen(call_of(opening)) for opening in openings]
    later = [chosen(call_of(opening, "The Seine.", "And where does it end?")) for opening in openings]

    assert first == later
    assert 160 < first.count("one") < 240
    assert call_of("Hello").share == 1299938811 / 2**32  # in whatever process


@pytest.mark.parametrize("more", [{"team": "b"}, {"user": "anna"}])
def test_who_begins_a_conversation_counts(more: dict[str, str]) -> None:
    """Teams, and the users that they name, do not all ask the same model the same thing."""
    assert call_of("Hello").share != call_of("Hello", **more).share


def test_a_completion_is_drawn_by_its_prompt() -> None:
    """So what is explained of it holds for the call that follows; long prompts that begin alike share the models."""
    header = "Tell which river flows through a city. " * 100
    prompts = [f"{header}Where is city {number}?" for number in range(200)]

    def of(prompt: str | list[str] | list[int]) -> Call:
        return replace(
            call_of("Hello"), request=CompletionRequest(model="auto", prompt=prompt), request_id=CLOCK.new_id()
        )

    first = [chosen(of(prompt)) for prompt in prompts]

    assert first == [chosen(of(prompt)) for prompt in prompts]
    assert 60 < first.count("one") < 140
    assert of([1, 2]).share != of([1, 2]).share and 0 <= of([1, 2]).share < 1  # no text: by its id
