# One model at several providers: who gets which part of its calls, what follows when one is down, what each can serve;
# and what callers may say of it.

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from protocol.chat import Function, Tool
from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest
from protocol.inference import Request
from router import Capability, Catalog, ModelSpec, Route, RoutingOptions, TargetHealth, Tier, choose_route
from router.catalog.catalog import Canary
from router.catalog.errors import ContextTooShort, ModelNotAllowed, NoTargetFits, UnknownModel
from router.catalog.routing_options import ProviderPreference
from tests.unit.router.examples import catalog, chat, model, names

DRAWS = 1000
TOOL = Tool(function=Function(name="look"))


def hard(request: Request) -> float:
    return 0.1


def spread_over(*places: ModelSpec) -> ModelSpec:
    return replace(places[0], others=places[1:])


def route(known: Catalog, asked: str = "m", spread: float = 0.0, **more: object) -> Route:
    health = more.pop("health", {})
    options = RoutingOptions(**more)  # type: ignore[arg-type]
    return choose_route(chat(asked), options, known, health, hard, spread=spread)  # type: ignore[arg-type]


def first_of(known: Catalog, **more: object) -> Counter[str]:
    """Count which provider is asked first, over evenly spread calls."""
    routes = (route(known, spread=draw / DRAWS, **more) for draw in range(DRAWS))
    return Counter(each.targets[0].model.provider for each in routes)


def test_weights_say_who_gets_which_part() -> None:
    """Three quarters to one provider, one to the other; a weight of 0 is asked last, and always there."""
    known = catalog(
        spread_over(model("m", portion=3.0), model("m", "us-eu", portion=1.0), model("m", "own", portion=0.0))
    )

    assert first_of(known) == {"us-only": 750, "us-eu": 250}
    order = names(route(known, spread=0.8).targets)
    assert (order[:3], {*order[3:]}) == (["m@us", "m@eu", "m@one"], {"m@gpu-0", "m@gpu-1"})


def test_replicas_of_a_provider_share_its_part() -> None:
    """Which replica is asked has nothing to do with which provider is."""
    known = catalog(spread_over(model("m", portion=1.0), model("m", "own", portion=1.0)))
    routes = [route(known, spread=draw / DRAWS).targets[0] for draw in range(DRAWS)]
    asked = Counter(one.endpoint.base_url for one in routes if one.model.provider == "own")

    assert len(asked) == 2 and min(asked.values()) > 200


def test_without_weights_those_that_answer_soonest_share() -> None:
    """Providers of about one speed share equally; one that is clearly slower is asked after them."""
    known = catalog(spread_over(model("m"), model("m", "us-eu"), model("m", "own")))
    slow = {one.key: TargetHealth(first_token_ms=900) for one in known.targets() if one.model.provider == "own"}
    slow |= {one.key: TargetHealth(first_token_ms=300) for one in known.targets() if one.model.provider != "own"}

    assert first_of(known) == {"us-only": 334, "us-eu": 333, "own": 333}
    assert first_of(known, health=slow) == {"us-only": 500, "us-eu": 500}
    assert route(known, health=slow).targets[-1].model.provider == "own"


def test_a_provider_that_is_down_goes_last() -> None:
    """Its part goes to the others, and the reason stays: it is the same model."""
    known = catalog(spread_over(model("m", portion=9.0), model("m", "us-eu", portion=1.0)))
    down = {one.key: TargetHealth(is_open=True) for one in known.targets() if one.model.provider == "us-only"}
    there = route(known, health=down)

    assert (names(there.targets), there.reason) == (["m@us", "m@eu", "m@one"], "named")


def test_each_place_serves_what_it_can() -> None:
    """A pool for batch and one for people; a provider with the longer context; what none can is refused as ever."""
    people = model("m", tiers=frozenset({Tier.INTERACTIVE}))
    batch = model("m", "us-eu", tiers=frozenset({Tier.BATCH}), context=100, max_output=10)
    known = catalog(spread_over(people, batch))

    assert names(route(known).targets) == ["m@one"]
    assert names(route(known, tier=Tier.BATCH).targets) == ["m@us", "m@eu"]
    with pytest.raises(ContextTooShort, match="8000 maximum"):
        choose_route(chat("m", "word " * 9000), RoutingOptions(), known, {}, hard)
    with pytest.raises(NoTargetFits, match="lacks tools"):
        choose_route(chat("m", tools=(TOOL,)), RoutingOptions(), known, {}, hard)


def test_an_automatic_route_takes_a_model_wherever_it_is() -> None:
    """A member at two providers brings both, in their order."""
    known = catalog(
        spread_over(model("m", portion=1.0), model("m", "us-eu", portion=1.0)),
        model("big"),
        small=("m",),
        large=("big",),
    )
    there = choose_route(chat("auto"), RoutingOptions(quality=0.0), known, {}, hard, spread=0.6)

    assert names(there.targets) == ["m@us", "m@eu", "m@one", "big@one"]


def test_a_callers_list_is_fallen_back_on_in_its_order() -> None:
    """Each target stands once; the first that can be asked names the reason."""
    known = catalog(model("m"), model("n", "us-eu"), model("o", "own"), aliases={"also-n": "n"})
    plain = route(known, spares=("also-n", "m", "o"))
    down = {plain.targets[0].key: TargetHealth(is_open=True)}
    away = route(known, spares=("n",), health=down)

    assert (names(plain.targets), plain.reason, plain.asked) == (
        ["m@one", "n@us", "n@eu", "o@gpu-0", "o@gpu-1"], "named", "m",
    )  # fmt: skip
    assert (names(away.targets), away.reason) == (["n@us", "n@eu", "m@one"], "fallback")


def test_a_spare_takes_what_the_first_cannot() -> None:
    """A model that cannot serve a request is passed by; where none can, the first one's refusal is told."""
    known = catalog(model("m", context=10, max_output=5), model("n", capabilities=frozenset(Capability)))
    long = chat("m", "word " * 50)

    there = choose_route(long, RoutingOptions(spares=("n",)), known, {}, hard)
    assert (names(there.targets), there.reason, there.asked) == (["n@one"], "fallback", "m")
    with pytest.raises(ContextTooShort, match=r"prompt is too long: \d+ tokens > 10 maximum, the context of 'm'"):
        choose_route(long, RoutingOptions(spares=("m",)), known, {}, hard)


def test_a_name_of_the_list_is_held_to_what_the_first_is() -> None:
    """Unknown, not the team's, or of other vectors: refused by the field."""
    known = catalog(model("m"), model("n"))
    with pytest.raises(UnknownModel) as unknown:
        route(known, spares=("gone",))
    with pytest.raises(ModelNotAllowed) as forbidden:
        route(known, spares=("n",), allowed_models=frozenset({"m"}))
    with pytest.raises(BadRequest, match="do not compare") as vectors:
        asked = EmbeddingRequest(model="m", input="x")
        choose_route(asked, RoutingOptions(spares=("n",)), known, {}, hard)

    assert {unknown.value.param, forbidden.value.param, vectors.value.param} == {"models"}


@pytest.mark.parametrize(
    ("preference", "left"),
    [
        (ProviderPreference(order=("own", "us-eu")), ["m@gpu-0", "m@gpu-1", "m@us", "m@eu", "m@one"]),
        (ProviderPreference(order=("us-eu",), allow_fallbacks=False), ["m@us", "m@eu"]),
        (ProviderPreference(only=frozenset({"own"})), ["m@gpu-0", "m@gpu-1"]),
        (ProviderPreference(ignore=frozenset({"us-only", "own"})), ["m@us", "m@eu"]),
    ],
)
def test_a_caller_may_prefer_providers(preference: ProviderPreference, left: list[str]) -> None:
    """Only these, none of those, these first, or the first alone."""
    known = catalog(spread_over(model("m"), model("m", "us-eu"), model("m", "own")))

    assert names(route(known, providers=preference).targets) == left


def test_a_preference_that_leaves_nobody_is_refused() -> None:
    """The refusal says who serves the model."""
    with pytest.raises(NoTargetFits, match="'m' is served by us-only") as refused:
        route(catalog(model("m")), providers=ProviderPreference(only=frozenset({"azure"})))

    assert refused.value.param == "provider"


def tried(share: float, asked: str = "m", withdrawn: frozenset[str] = frozenset(), **more: object) -> Route:
    """Return the route of a conversation whose hash is ``share``, where a twentieth tries another model."""
    canary = Canary(model="new", share=0.05)
    known = catalog(
        model("m"), model("new", "us-eu"), model("big"), aliases={"also": "m"}, small=("m",), large=("big",)
    )
    known = replace(known, canaries={"m": canary, "also": canary, "auto": canary})
    health = more.pop("health", {})
    request = more.pop("request", chat(asked))
    options = RoutingOptions(**more)  # type: ignore[arg-type]
    return choose_route(request, options, known, health, hard, share=share, withdrawn=withdrawn)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["m", "also", "auto"])
def test_a_share_of_conversations_tries_the_canary(asked: str) -> None:
    """Model, alias or route: below the share the canary first and what the name means behind it; else as without it."""
    there, plain = tried(0.049, asked), tried(0.05, asked)

    assert (names(there.targets)[:2], there.reason, there.asked) == (["new@us", "new@eu"], "canary", asked)
    assert plain.reason != "canary"
    assert names(there.targets)[2:] == names(plain.targets)
    assert tried(0.0, asked, withdrawn=frozenset({asked})) == plain


def test_a_canary_that_cannot_be_asked_is_passed_by() -> None:
    """Down, or without what the request needs: what the name means answers, for its own reason."""
    down = {target.key: TargetHealth(is_open=True) for target in tried(0.0).targets[:2]}
    lacks = replace(chat("m"), max_tokens=None, messages=chat("m", "word " * 9000).messages)

    assert (names(tried(0.0, health=down).targets), tried(0.0, health=down).reason) == (
        ["m@one", "new@us", "new@eu"], "named",
    )  # fmt: skip
    with pytest.raises(ContextTooShort, match="'m'"):
        tried(0.0, request=lacks)


def test_a_team_meets_no_canary_that_it_may_not_use() -> None:
    """A list that names the model alone means that model; one that names the alias means what the alias does."""
    assert tried(0.0, allowed_models=frozenset({"m"})).reason == "named"
    assert tried(0.0, allowed_models=frozenset({"m", "new"})).reason == "canary"
    assert tried(0.0, "also", allowed_models=frozenset({"also"})).reason == "canary"


def test_texts_to_embed_meet_no_canary() -> None:
    """Vectors of different models do not compare."""
    both = frozenset({Capability.EMBEDDINGS})
    known = catalog(model("m", capabilities=both), model("new", capabilities=both))
    known = replace(known, canaries={"m": Canary(model="new", share=1.0)})
    asked = EmbeddingRequest(model="m", input="x")

    assert choose_route(asked, RoutingOptions(), known, {}, hard).reason == "named"
