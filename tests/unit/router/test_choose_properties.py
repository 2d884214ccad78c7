# What holds for every catalogue, request and state of health.

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from billing.core.prices import cost_of
from protocol.chat import Function, JsonObjectFormat, Tool
from protocol.embeddings import EmbeddingRequest
from protocol.inference import Request
from router import Capability, Catalog, RoutingOptions, Target, TargetHealth, Tier, choose_route
from router.catalog.capabilities import needed_capabilities
from router.catalog.errors import ModelNotAllowed, NoTargetFits
from router.prompt_size.bounds import cost_most
from router.prompt_size.prompt_bounds import bound_prompt
from router.prompt_size.prompt_lengths import prompt_tokens_least
from router.ranking import SAME_COST, expected_usage
from tests.unit.router.examples import catalog, chat, model

NAMES = ("a", "b", "c", "d")

models = st.builds(
    lambda name, provider, cents, capabilities, context, tiers, weight: model(
        name,
        provider,
        f"{cents / 100:.2f}",
        capabilities=frozenset(capabilities),
        context=context,
        tiers=frozenset(tiers),
        weight=weight,
    ),
    st.just("?"),
    st.sampled_from(["us-only", "us-eu", "own"]),
    st.integers(1, 300),
    st.sets(st.sampled_from(list(Capability))).map(lambda some: some | {Capability.CHAT}),
    st.sampled_from([40, 1_000, 10_000]),
    st.sampled_from([{Tier.INTERACTIVE}, {Tier.BATCH}, set(Tier)]),
    st.sampled_from([0.5, 1.0, 2.0]),
)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    chosen = [
        model(
            name,
            spec.provider,
            price=spec.price,
            capabilities=spec.capabilities,
            context=spec.context,
            tiers=spec.tiers,
            weight=spec.weight,
        )
        for name, spec in zip(NAMES, draw(st.lists(models, min_size=4, max_size=4)), strict=True)
    ]
    lists = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple)
    return catalog(*chosen, small=draw(lists), large=draw(lists), fallbacks={"a": draw(lists)})


requests = st.one_of(
    st.builds(
        lambda name, words, tools, json: chat(
            name,
            "word " * words,
            tools=(Tool(Function("f")),) if tools else None,
            response_format=JsonObjectFormat() if json else None,
        ),
        st.sampled_from(["auto", "a"]),
        st.sampled_from([1, 50, 2_000]),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(lambda name: EmbeddingRequest(model=name, input="some words"), st.sampled_from(["auto", "a"])),
)
wishes = st.builds(
    RoutingOptions,
    tier=st.sampled_from(Tier),
    allowed_models=st.none() | st.frozensets(st.sampled_from(NAMES), min_size=1),
    allow_smaller=st.booleans(),
    quality=st.none() | st.floats(0, 1),
    max_cost_nanousd=st.none() | st.integers(0, 20_000_000),
)
states = st.builds(
    TargetHealth,
    is_open=st.booleans(),
    is_full=st.booleans(),
    first_token_ms=st.floats(0, 2_000),
)


@st.composite
def healths(draw: st.DrawFn, known: Catalog) -> dict[str, TargetHealth]:
    keys = [target.key for spec in known.models.values() for target in known.targets_of(spec)]
    return draw(st.dictionaries(st.sampled_from(keys), states))


def serves(target: Target, request: Request, options: RoutingOptions) -> bool:
    """Whether a target can answer, written out anew: the judge of the code under test."""
    spec = target.model
    room = 0 if isinstance(request, EmbeddingRequest) else 1
    return (
        (options.allowed_models is None or spec.name in options.allowed_models)
        and needed_capabilities(request) <= spec.capabilities
        and options.tier in spec.tiers
        and prompt_tokens_least(request) + room <= spec.context
        and (
            options.max_cost_nanousd is None
            or cost_most(request, spec, bound_prompt(request).closely(), batch=options.tier is Tier.BATCH)
            <= options.max_cost_nanousd
        )
    )


@given(st.data(), catalogs(), requests, wishes, st.floats(0, 1), st.floats(0, 0.999))
def test_a_route_holds_only_what_can_serve(
    data: st.DataObject, known: Catalog, request: Request, options: RoutingOptions, score: float, share: float
) -> None:
    """Every target of a route can serve the request, and none is on it twice."""
    health = data.draw(healths(known))
    try:
        route = choose_route(request, options, known, health, lambda _: score, share=share)
    except (NoTargetFits, ModelNotAllowed):
        return

    assert route.targets
    assert all(serves(target, request, options) for target in route.targets)
    assert len({target.key for target in route.targets}) == len(route.targets)


@given(st.data(), catalogs(), requests, wishes, st.floats(0, 1))
def test_no_request_is_refused_while_something_fits(
    data: st.DataObject, known: Catalog, request: Request, options: RoutingOptions, score: float
) -> None:
    """A refusal means that no model which the name may mean can serve the request, whatever their health.

    Where a prompt is too long for the named model, its fallbacks may serve it.
    """
    health = data.draw(healths(known))
    auto = known.auto["auto"]
    meant = {*auto.small, *auto.large} if request.model == "auto" else {"a"}
    eligible = [
        target for name in meant for target in known.targets_of(known.models[name]) if serves(target, request, options)
    ]
    try:
        choose_route(request, options, known, health, lambda _: score)
        refused = False
    except (NoTargetFits, ModelNotAllowed):
        refused = True

    is_too_long = request.model != "auto" and prompt_tokens_least(request) > known.models["a"].context - 1
    spares = known.fallbacks.get("a", ()) if is_too_long else ()
    targets = [target for name in spares for target in known.targets_of(known.models[name])]
    if refused:
        assert not eligible
    else:
        assert eligible or any(serves(target, request, options) for target in targets)


@given(st.data(), catalogs(), requests, wishes, st.floats(0, 1), st.floats(0, 0.999))
def test_equal_arguments_give_equal_routes(
    data: st.DataObject, known: Catalog, request: Request, options: RoutingOptions, score: float, share: float
) -> None:
    """Choosing is a function of its arguments."""
    health = data.draw(healths(known))

    def outcome() -> object:
        try:
            return choose_route(request, options, known, health, lambda _: score, share=share)
        except (NoTargetFits, ModelNotAllowed) as refusal:
            return (type(refusal), refusal.message)

    assert outcome() == outcome()


@given(st.data(), catalogs(), wishes, st.floats(0, 1), st.floats(0, 0.999))
def test_auto_orders_by_health_then_trust_then_cost(
    data: st.DataObject, known: Catalog, options: RoutingOptions, score: float, share: float
) -> None:
    """What is down comes last; among the rest the trusted kind leads, and in each kind cost never falls past a tie."""
    health, request = data.draw(healths(known)), chat()
    try:
        route = choose_route(request, options, known, health, lambda _: score, share=share)
    except (NoTargetFits, ModelNotAllowed):
        return
    auto = known.auto["auto"]
    trusted = auto.small if route.reason == "auto_small" else auto.large

    def rank(target: Target) -> tuple[bool, bool]:
        state = health.get(target.key, TargetHealth())
        return (state.is_open or state.is_full, target.model.name not in trusted)

    def cost(target: Target) -> int:
        return cost_of(expected_usage(request), target.model.price, batch=options.tier is Tier.BATCH)

    ranks = [rank(target) for target in route.targets]
    assert ranks == sorted(ranks)
    for before, after in pairwise(route.targets):
        assert rank(before) != rank(after) or cost(before) <= cost(after) * SAME_COST
