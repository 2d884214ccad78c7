# The route: who is on it, in which order, and what is said when nobody can be.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from billing.core.prices import LaterPrice, Price
from protocol.chat import ChatRequest, HostedTool, ImagePart, ImageUrl, JsonObjectFormat, Message, TextPart, Tool
from protocol.chat import Function as ToolFunction
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from protocol.inference import Request
from router import Capability, RoutingOptions, TargetHealth, Tier, choose_route
from router.catalog.catalog import AutoRoute
from router.catalog.errors import ContextTooShort, CostLimitTooLow, LacksCapability, ModelNotAllowed, UnknownModel
from tests.unit.router.examples import EVERYTHING, catalog, chat, model, names

OPEN = TargetHealth(is_open=True)
FULL = TargetHealth(is_full=True)


def easy(request: Request) -> float:
    return 0.95


def hard(request: Request) -> float:
    return 0.10


@dataclass
class Asked:
    """A complexity model that remembers whether it was asked."""

    times: int = 0

    def __call__(self, request: Request) -> float:
        self.times += 1
        return 0.95


SMALL, LARGE = model("small", dollars="0.10"), model("large", dollars="5.00")
AUTO = catalog(SMALL, LARGE, small=("small",), large=("large",))


def test_a_named_model_goes_to_its_endpoints_in_order_of_preference() -> None:
    """Regions are tried as the configuration lists them."""
    route = choose_route(chat("m"), RoutingOptions(), catalog(model("m", "us-eu")), {}, hard)

    assert (names(route.targets), route.reason, route.complexity) == (["m@us", "m@eu"], "named", None)


def test_a_team_s_own_score_decides_where_it_asks_no_quality() -> None:
    """What it learned meets the route's own quality, and the shipped score stays what is booked; a quality that is
    asked, and another route, go by the shipped score."""
    learned = RoutingOptions(learned={"auto": lambda _: 0.9}, recalibrated={"auto": 0.99})
    own = choose_route(chat("auto"), learned, AUTO, {}, hard)
    asked = choose_route(chat("auto"), replace(learned, quality=0.5), AUTO, {}, hard)
    other = choose_route(chat("auto"), replace(learned, learned={"else": lambda _: 0.9}), AUTO, {}, hard)

    assert own.decision is not None and asked.decision is not None and other.decision is not None
    assert (own.reason, own.complexity, own.decision.score, own.decision.quality) == ("auto_small", 0.1, 0.9, 0.8)
    assert (asked.reason, asked.complexity, asked.decision.quality) == ("auto_large", 0.1, 0.5)
    assert (other.decision.shipped, other.decision.quality) == (None, 0.99)


def test_an_alias_resolves_and_says_so() -> None:
    """The caller's word is kept as asked; the reason tells that it meant another model."""
    route = choose_route(
        chat("old"), RoutingOptions(), catalog(model("new"), aliases={"old": "older", "older": "new"}), {}, hard
    )

    assert (route.asked, names(route.targets), route.reason) == ("old", ["new@one"], "alias")


def test_an_alias_may_mean_the_automatic_route() -> None:
    """What is said then is what the automatic route decided."""
    known = catalog(SMALL, LARGE, small=("small",), large=("large",), aliases={"best": "auto"})

    assert choose_route(chat("best"), RoutingOptions(), known, {}, hard).reason == "auto_large"


@pytest.mark.parametrize("aliases", [{}, {"x": "y", "y": "x"}, {"x": "gone"}])
def test_an_unknown_name_is_a_404(aliases: dict[str, str]) -> None:
    """A name that leads to no model is unknown, also through aliases that go nowhere or in a circle."""
    with pytest.raises(UnknownModel, match="'x' does not exist") as caught:
        choose_route(chat("x"), RoutingOptions(), catalog(SMALL, aliases=aliases), {}, easy)

    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(("asked", "there"), [("gpt-mini", "openai/gpt-mini"), ("openai/small", "small")])
def test_an_unknown_name_of_another_provider_or_none_is_told_what_there_is(asked: str, there: str) -> None:
    """Names come from a provider's own pages, without the prefix that they have here, and from other gateways."""
    known = catalog(model("openai/gpt-mini"), model("small"))

    with pytest.raises(UnknownModel, match=f"lists those that do, '{there}' among them.$"):
        choose_route(chat(asked), RoutingOptions(), known, {}, easy)


def test_fallbacks_follow_the_named_model() -> None:
    """Fallbacks come behind every endpoint of the model, in the order configured, if they can serve the request."""
    models = (model("m", "us-eu"), model("deaf", capabilities=frozenset()), model("spare"))
    known = catalog(*models, fallbacks={"m": ("deaf", "spare", "m")})

    route = choose_route(chat("m"), RoutingOptions(), known, {}, hard)

    assert (names(route.targets), route.reason) == (["m@us", "m@eu", "spare@one"], "named")


@pytest.mark.parametrize("down", [OPEN, FULL])
def test_what_is_down_goes_last(down: TargetHealth) -> None:
    """A target with an open breaker or a full queue is tried only after all others; the reason says fallback."""
    known = catalog(model("m", "us-eu"), model("spare"), fallbacks={"m": ("spare",)})
    health = {target.key: down for target in known.targets_of(known.models["m"])}

    route = choose_route(chat("m"), RoutingOptions(), known, health, hard)

    assert (names(route.targets), route.reason) == (["spare@one", "m@us", "m@eu"], "fallback")


def test_replicas_of_one_region_are_peers() -> None:
    """Within a region the sooner first token leads."""
    known = catalog(model("m", "own"))
    first, second = (target.key for target in known.targets_of(known.models["m"]))

    times = {first: TargetHealth(first_token_ms=900), second: TargetHealth(first_token_ms=300)}
    slow = choose_route(chat("m"), RoutingOptions(), known, times, hard)

    assert [t.key for t in slow.targets] == [second, first]


def test_replicas_that_answer_as_soon_take_turns() -> None:
    """Whoever asks by name, as by an automatic route: each leads for its part of the draws, and the others follow."""
    known = catalog(model("m", "own"), model("n"), fallbacks={"n": ("m",)})
    keys = [target.key for target in known.targets_of(known.models["m"])]

    for health in ({}, {keys[0]: TargetHealth(first_token_ms=300)}):
        led = [choose_route(chat("m"), RoutingOptions(), known, health, hard, spread=n / 10).targets for n in range(10)]
        assert [targets[0].key for targets in led] == [keys[0]] * 5 + [keys[1]] * 5
        assert all(len(targets) == 2 for targets in led)
    behind = choose_route(chat("n"), RoutingOptions(), known, {}, hard, spread=0.9).targets
    assert [target.key for target in behind[1:]] == [keys[1], keys[0]]


def test_regions_do_not() -> None:
    """Whatever is drawn, the region that is preferred leads."""
    known = catalog(model("m", "us-eu"))

    assert names(choose_route(chat("m"), RoutingOptions(), known, {}, hard, spread=0.9).targets) == ["m@us", "m@eu"]


def test_a_far_region_is_not_preferred_for_being_quick() -> None:
    """Between regions the order configured stands, whatever the predicted times."""
    known = catalog(model("m", "us-eu"))
    us, _ = (target.key for target in known.targets_of(known.models["m"]))

    route = choose_route(chat("m"), RoutingOptions(), known, {us: TargetHealth(first_token_ms=900)}, hard)

    assert names(route.targets) == ["m@us", "m@eu"]


def test_auto_trusts_a_small_model_with_what_is_easy() -> None:
    """At or above the quality asked the small models lead, the large ones stand behind."""
    route = choose_route(chat(), RoutingOptions(), AUTO, {}, easy)

    assert (names(route.targets), route.reason, route.complexity) == (["small@one", "large@one"], "auto_small", 0.95)


def test_auto_gives_what_is_hard_to_a_large_model() -> None:
    """Below the quality asked the large models lead; the small ones are there for overload."""
    route = choose_route(chat(), RoutingOptions(), AUTO, {}, hard)

    assert (names(route.targets), route.reason, route.complexity) == (["large@one", "small@one"], "auto_large", 0.10)


def test_a_team_may_decline_smaller_models() -> None:
    """Without allow_smaller no small model is on the route of a hard request, even when the large one is down."""
    health = {target.key: OPEN for target in AUTO.targets_of(LARGE)}

    route = choose_route(chat(), RoutingOptions(allow_smaller=False), AUTO, health, hard)

    assert names(route.targets) == ["large@one"]


def test_nor_is_one_among_the_fallbacks_of_a_named_model() -> None:
    """Smaller: what an automatic route says, of models that it names both; of others the price of an answer, below half
    of which a model is smaller unless it is the same one elsewhere."""
    equal = model("equal", dollars="0.40")
    models = (LARGE, SMALL, equal, model("mini", dollars="0.40"), model("like", dollars="3.00"))
    models += (model("elsewhere", dollars="0.10", upstream_model="large"),)
    spares = tuple(spare.name for spare in models[1:])
    known = catalog(*models, small=("small",), large=("large", "equal"), fallbacks={"large": spares})

    ways = [
        choose_route(chat("large"), RoutingOptions(allow_smaller=allow), known, {}, hard) for allow in (True, False)
    ]

    assert [[target.model.name for target in way.targets[1:]] for way in ways] == [
        ["small", "equal", "mini", "like", "elsewhere"],
        ["equal", "like", "elsewhere"],
    ]


@pytest.mark.parametrize(("quality", "reason"), [(0.05, "auto_small"), (0.10, "auto_small"), (0.11, "auto_large")])
def test_the_caller_moves_the_threshold(quality: float, reason: str) -> None:
    """The caller's quality replaces the route's own; a score that reaches it suffices."""
    assert choose_route(chat(), RoutingOptions(quality=quality), AUTO, {}, hard).reason == reason


def test_complexity_is_asked_only_when_there_is_a_choice() -> None:
    """With one kind of model left, the answer could not matter."""
    asked = Asked()

    route = choose_route(chat(), RoutingOptions(allowed_models=frozenset({"large"})), AUTO, {}, asked)

    assert (names(route.targets), route.reason, route.complexity, asked.times) == (["large@one"], "auto_large", None, 0)


@pytest.mark.parametrize(
    "request_",
    [chat(), CompletionRequest(model="auto", prompt="Once"), EmbeddingRequest(model="auto", input=["a", "b"])],
    ids=["chat", "completions", "embeddings"],
)
def test_auto_works_with_one_model_in_both_lists(request_: Request) -> None:
    """A house with a single model answers auto with it, once, at every endpoint kind."""
    known = catalog(model("only", capabilities=EVERYTHING), small=("only",), large=("only",))

    assert names(choose_route(request_, RoutingOptions(), known, {}, hard).targets) == ["only@one"]


def test_embeddings_fall_back_to_the_same_model_elsewhere_alone() -> None:
    """Whoever compares vectors would not be told that they come from another model."""
    both = frozenset({Capability.CHAT, Capability.EMBEDDINGS})
    known = catalog(
        model("a", capabilities=both),
        model("other", capabilities=both),
        model("a-too", capabilities=both, upstream_model="a"),
        fallbacks={"a": ("other", "a-too")},
    )
    vectors = choose_route(EmbeddingRequest(model="a", input="x"), RoutingOptions(), known, {}, hard)
    words = choose_route(chat("a"), RoutingOptions(), known, {}, hard)

    assert names(vectors.targets) == ["a@one", "a-too@one"]
    assert names(words.targets) == ["a@one", "other@one", "a-too@one"]


def test_embeddings_never_fall_over_to_another_model() -> None:
    """Vectors of different models do not compare: the first model that embeds answers, wherever it is served."""
    embeds = frozenset({Capability.EMBEDDINGS})
    models = (
        model("a", "us-eu", capabilities=embeds, dollars="9.00"),
        model("b", capabilities=embeds),
        model("a-too", capabilities=embeds, upstream_model="a"),
    )
    known = catalog(*models, small=("a", "b", "a-too"))

    assert names(
        choose_route(EmbeddingRequest(model="auto", input="x"), RoutingOptions(), known, {}, hard).targets
    ) == [
        "a@us",
        "a@eu",
        "a-too@one",
    ]


def test_the_cheaper_leads_and_batch_prices_count() -> None:
    """Expected cost orders the models of a group, in tier batch with the discount."""
    plain, discounted = model("plain", dollars="1.00"), model("discounted", dollars="1.50")
    price = discounted.price
    halved = model("discounted", price=type(price)(input=price.input, output=price.output, batch_discount=0.5))
    known = catalog(plain, halved, small=("plain", "discounted"))

    now = choose_route(chat(), RoutingOptions(), known, {}, easy)
    later = choose_route(chat(), RoutingOptions(tier=Tier.BATCH), known, {}, easy)

    assert [names(now.targets), names(later.targets)] == [
        ["plain@one", "discounted@one"],
        ["discounted@one", "plain@one"],
    ]


def test_a_price_that_has_changed_since_orders_as_it_is_now() -> None:
    """A change that was announced counts from its moment on, and not before."""
    dear = Price(input=to_nano(9), output=to_nano(36))
    rising = model("rising")
    rising = replace(rising, price=replace(rising.price, later=(LaterPrice(1_000.0, dear),)))
    known = catalog(rising, model("steady", dollars="2.00"), small=("rising", "steady"))

    leaders = [
        choose_route(chat(), RoutingOptions(), known, {}, easy, at=at).targets[0].model.name for at in (999.0, 1_000.0)
    ]

    assert leaders == ["rising", "steady"]


def test_a_model_alone_at_its_cost_keeps_the_order_of_its_endpoints() -> None:
    """An automatic route goes over them as a named one does: regions as configured, replicas by time."""
    known = catalog(model("far", "us-eu"), model("own", "own", dollars="2.00"), small=("far", "own"))
    us, _, first, second = (target.key for target in known.targets())
    times = {us: 900.0, first: 300.0, second: 20.0}
    health = {key: TargetHealth(first_token_ms=time) for key, time in times.items()}

    assert names(choose_route(chat(), RoutingOptions(), known, health, easy).targets) == [
        "far@us",
        "far@eu",
        "own@gpu-1",
        "own@gpu-0",
    ]


def test_among_equal_costs_the_sooner_first_token_leads() -> None:
    """A difference of cost within five per cent is outweighed by the predicted first token."""
    known = catalog(model("a", dollars="1.00"), model("b", dollars="1.04"), small=("a", "b"))
    a, b = (target.key for target in known.targets())
    health = {a: TargetHealth(first_token_ms=800), b: TargetHealth(first_token_ms=400)}

    assert names(choose_route(chat(), RoutingOptions(), known, health, easy).targets) == ["b@one", "a@one"]


def test_a_target_of_unknown_speed_takes_turns_with_the_soonest() -> None:
    """Else a target that has answered once would have all calls, or none."""
    known = catalog(*(model(name) for name in "abc"), small=("a", "b", "c"))
    a, b, _ = (target.key for target in known.targets())
    health = {a: TargetHealth(first_token_ms=800), b: TargetHealth(first_token_ms=400)}

    routes = [choose_route(chat(), RoutingOptions(), known, health, easy, share=share).targets for share in (0.0, 0.9)]

    assert [names(targets) for targets in routes] == [["b@one", "c@one", "a@one"], ["c@one", "b@one", "a@one"]]


def test_equals_share_by_weight() -> None:
    """Over the draw, equal models lead as often as their weights say; the same draw gives the same route."""
    known = catalog(model("a", weight=3.0), model("b", weight=1.0), small=("a", "b"))

    leaders = [
        choose_route(chat(), RoutingOptions(), known, {}, easy, share=i / 100).targets[0].model.name for i in range(100)
    ]

    assert (leaders.count("a"), leaders.count("b")) == (75, 25)


def test_a_model_that_the_team_may_not_use_is_a_403_as_is_one_that_there_is_not() -> None:
    """A team that may not use every model does not find out which there are: models, routes and aliases."""
    known = replace(
        AUTO, auto=AUTO.auto | {"best": AutoRoute(small=("large",), large=("large",))}, aliases={"l": "large"}
    )
    heard = set()
    for name in ("large", "best", "l", "nope"):
        with pytest.raises(ModelNotAllowed) as caught:
            choose_route(chat(name), RoutingOptions(allowed_models=frozenset({"small"})), known, {}, easy)
        heard.add((caught.value.status, caught.value.code, caught.value.message.replace(f"'{name}'", "NAME")))

    assert [(status, code) for status, code, _ in heard] == [(403, "model_not_allowed")]


@pytest.mark.parametrize(
    ("allowed", "models", "routes", "aliases"),
    [
        (None, {"small", "large", "other"}, {"auto", "best"}, {"s", "o", "a"}),
        ({"small"}, {"small"}, {"auto"}, {"s", "a"}),
        ({"o"}, {"other"}, set(), {"o"}),
        ({"auto"}, {"small", "large"}, {"auto", "best"}, {"s", "a"}),
        ({"a", "small"}, {"small"}, {"auto"}, {"s", "a"}),
        ({"nope"}, set(), set(), set()),
    ],
    ids=lambda names: "any" if names is None else " ".join(sorted(names)) or "none",
)
def test_a_team_sees_what_can_answer_it(
    allowed: set[str] | None, models: set[str], routes: set[str], aliases: set[str]
) -> None:
    """Of the catalogue: no other model, and no name or fallback that leads to one."""
    known = catalog(
        SMALL,
        LARGE,
        model("other"),
        small=("small",),
        large=("large",),
        fallbacks={"small": ("large", "other")},
        aliases={"s": "small", "o": "other", "a": "auto"},
    )
    known = replace(known, auto=known.auto | {"best": AutoRoute(small=("large",), large=("large",))})
    seen = known.seen_by(None if allowed is None else frozenset(allowed))

    assert (set(seen.models), set(seen.auto), set(seen.aliases)) == (models, routes, aliases)
    assert {spare for spares in seen.fallbacks.values() for spare in spares} <= models
    assert {name for route in seen.auto.values() for name in (*route.small, *route.large)} <= models


@pytest.mark.parametrize(
    ("team", "key", "asked", "served"),
    [
        ({"auto", "small"}, {"auto"}, "auto", ["small@one"]),  # a key's route has no model more than the team's
        ({"auto"}, {"small"}, "auto", ["small@one"]),
        ({"auto"}, {"small"}, "small", None),  # the team may not name it
        ({"large"}, {"small"}, "auto", None),  # what one may use the other may not
        ({"large"}, {"small"}, "large", None),
        (None, {"small"}, "large", None),
        (None, {"small"}, "small", ["small@one"]),
        ({"small", "large"}, {"large"}, "auto", ["large@one"]),
        ({"small"}, set(), "small", None),
    ],
)
def test_a_key_has_the_part_that_both_it_and_its_team_may_use(
    team: set[str] | None, key: set[str], asked: str, served: list[str] | None
) -> None:
    """No list of a key opens what the team's leaves shut, nor the other way round."""
    lists = RoutingOptions(allowed_models=None if team is None else frozenset(team), key_models=frozenset(key))

    if served is None:
        with pytest.raises(ModelNotAllowed, match="This key may use no model"):
            choose_route(chat(asked), lists, AUTO, {}, hard)
    else:
        assert names(choose_route(chat(asked), lists, AUTO, {}, hard).targets) == served


def test_an_auto_route_serves_with_what_the_team_may_use() -> None:
    """Models that the team may not use drop out; a team allowed the route by name, and no model of it, has all."""
    rest = choose_route(chat(), RoutingOptions(allowed_models=frozenset({"small"})), AUTO, {}, hard)
    whole = choose_route(chat(), RoutingOptions(allowed_models=frozenset({"auto"})), AUTO, {}, hard)

    assert [names(rest.targets), names(whole.targets)] == [["small@one"], ["large@one", "small@one"]]
    with pytest.raises(ModelNotAllowed):
        choose_route(chat(), RoutingOptions(allowed_models=frozenset({"else"})), AUTO, {}, hard)


def test_fallbacks_that_the_team_may_not_use_are_left_out() -> None:
    """A failing model is no way around the team's list."""
    known = catalog(model("m"), model("dear"), fallbacks={"m": ("dear",)})

    route = choose_route(chat("m"), RoutingOptions(allowed_models=frozenset({"m"})), known, {}, hard)

    assert names(route.targets) == ["m@one"]


TOOL = (Tool(ToolFunction("look_up")),)
PICTURE = (TextPart("What is this?"), ImagePart(ImageUrl("data:image/png;base64,AAAA")))


@pytest.mark.parametrize(
    ("request_", "lacks", "param"),
    [
        (chat("plain", tools=TOOL), "tools", "tools"),
        (chat("plain", response_format=JsonObjectFormat()), "json", "response_format"),
        (chat("plain", logprobs=True), "logprobs", "logprobs"),
        (ChatRequest(model="plain", messages=(Message(role="user", content=PICTURE),)), "vision", "messages"),
        (CompletionRequest(model="plain", prompt="x"), "completions", "model"),
        (EmbeddingRequest(model="plain", input="x"), "embeddings", "model"),
    ],
)
def test_a_refusal_names_what_is_lacking_and_who_could(request_: Request, lacks: str, param: str) -> None:
    """What no target can do is a 400 that names the capability, the field and the models that have it."""
    known = catalog(model("plain"), model("able", capabilities=EVERYTHING), model("secret", capabilities=EVERYTHING))

    with pytest.raises(LacksCapability) as caught:
        choose_route(request_, RoutingOptions(allowed_models=frozenset({"plain", "able"})), known, {}, easy)

    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", param)
    assert f"lacks {lacks}." in caught.value.message
    assert caught.value.message.endswith("Models that can: able.")


def test_a_refusal_names_no_model_that_would_refuse_the_search_too() -> None:
    """What a search costs there is not known, so none is run."""
    priced = Price(input=to_nano(1), output=to_nano(1), web_search=to_nano("0.01"))
    able = model("able", capabilities=EVERYTHING), model("searches", capabilities=EVERYTHING, price=priced)

    with pytest.raises(LacksCapability, match=r"Models that can: searches\.$"):
        search = HostedTool(ToolFunction("web_search"), most=1)
        choose_route(chat("plain", tools=(search,)), RoutingOptions(), catalog(model("plain"), *able), {}, easy)


def test_a_refusal_names_ten_models_of_many() -> None:
    """A catalogue may have hundreds; an error is for reading."""
    able = [model(f"able-{place:02}", capabilities=EVERYTHING) for place in range(11)]

    with pytest.raises(LacksCapability, match=r"Models that can: able-00, .*, able-09, …\.$"):
        choose_route(chat("plain", tools=TOOL), RoutingOptions(), catalog(model("plain"), *able), {}, easy)


def test_auto_passes_over_models_that_lack_a_capability() -> None:
    """What a small model cannot do goes to a large one without asking how hard it is."""
    known = catalog(SMALL, model("large", capabilities=EVERYTHING), small=("small",), large=("large",))

    route = choose_route(chat(tools=TOOL), RoutingOptions(), known, {}, easy)

    assert (names(route.targets), route.reason) == (["large@one"], "auto_large")


def test_earlier_tool_calls_need_tools_too() -> None:
    """A model without tools cannot read a tool's result."""
    known = catalog(model("plain"))
    turns = (Message(role="user", content="Hi"), Message(role="tool", content="42", tool_call_id="c"))

    with pytest.raises(LacksCapability, match="lacks tools"):
        choose_route(ChatRequest(model="plain", messages=turns), RoutingOptions(), known, {}, easy)


def test_a_prompt_longer_than_every_context_is_refused() -> None:
    """More words than the context has tokens cannot fit; the message says which model has room."""
    known = catalog(model("m"), model("wide", context=100_000))

    with pytest.raises(ContextTooShort, match="> 8000 maximum") as caught:
        choose_route(chat("m", "word " * 9_000), RoutingOptions(), known, {}, easy)

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.message.endswith("Models that can: wide.")


def test_a_prompt_longer_than_a_named_model_holds_goes_to_its_fallbacks() -> None:
    """To those with room for it; a fallback that lacks another need, or a model that does, changes nothing."""
    models = (
        model("m"),
        model("short"),
        model("wide", context=100_000),
        model("deaf", context=100_000, capabilities=frozenset()),
    )
    known = catalog(*models, fallbacks={"m": ("short", "deaf", "wide")})

    route = choose_route(chat("m", "word " * 9_000), RoutingOptions(), known, {}, easy)

    assert (names(route.targets), route.reason) == (["wide@one"], "fallback")
    with pytest.raises(ContextTooShort, match="> 8000 maximum"):
        choose_route(chat("m", "word " * 200_000), RoutingOptions(), known, {}, easy)
    with pytest.raises(LacksCapability):
        choose_route(chat("deaf"), RoutingOptions(), replace(known, fallbacks={"deaf": ("m",)}), {}, easy)


def test_token_ids_count_exactly() -> None:
    """A prompt of token ids must leave room for one token of reply, and is not refused when it does."""
    known = catalog(model("m", capabilities=EVERYTHING))

    fits = choose_route(CompletionRequest(model="m", prompt=[1] * 7_999), RoutingOptions(), known, {}, easy)

    assert names(fits.targets) == ["m@one"]
    with pytest.raises(ContextTooShort):
        choose_route(CompletionRequest(model="m", prompt=[1] * 8_000), RoutingOptions(), known, {}, easy)


def test_a_tier_that_is_not_served_is_refused() -> None:
    """A model may be for batch alone."""
    known = catalog(model("m", tiers=frozenset({Tier.BATCH})))

    assert choose_route(chat("m"), RoutingOptions(tier=Tier.BATCH), known, {}, easy).targets
    with pytest.raises(LacksCapability, match="tier interactive") as caught:
        choose_route(chat("m"), RoutingOptions(), known, {}, easy)
    assert caught.value.param == "x-tier"


def test_a_cost_limit_drops_what_could_exceed_it() -> None:
    """Targets whose worst cost is above the caller's limit drop out; with none left it is a 400 that names it."""
    within = choose_route(chat(max_tokens=100), RoutingOptions(max_cost_nanousd=1_000_000), AUTO, {}, hard)

    assert names(within.targets) == ["small@one"]
    with pytest.raises(CostLimitTooLow, match="x-max-cost-usd") as caught:
        choose_route(chat(max_tokens=100), RoutingOptions(max_cost_nanousd=10), AUTO, {}, hard)
    assert (caught.value.status, caught.value.param) == (400, "x-max-cost-usd")


def test_a_recalibrated_quality_takes_the_place_of_the_routes_own() -> None:
    """For its team and route alone; a quality that the caller says stands."""
    score = 0.85  # above the route's 0.8

    def reason(**options: Any) -> str:
        return choose_route(chat(), RoutingOptions(**options), AUTO, {}, lambda _: score).reason

    assert (reason(), reason(recalibrated={"other": 0.9})) == ("auto_small", "auto_small")
    assert reason(recalibrated={"auto": 0.9}) == "auto_large"
    assert reason(recalibrated={"auto": 0.9}, quality=0.8) == "auto_small"
