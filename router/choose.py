# Which targets answer a request, in which order, and why. Pure: the catalogue, the health of the targets, the
# complexity model and the one draw that shares load among equals are arguments.

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from msgspec.structs import replace

from billing.core.prices import cost_of
from protocol.embeddings import EmbeddingRequest
from protocol.inference import Generation, Request
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.errors import ContextTooShort, ModelNotAllowed, NoReplica, UnknownModel
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import ComplexityDecision, ModelSpec, Route, Target, Tier
from router.eligibility import explain_refusal, is_smaller, needs_of, part_that_can, some_of
from router.preferences import at_preferred, granted_with, refuse_other_vectors, with_canary, with_spares
from router.ranking import Health, by_cost, by_preference, expected_usage, unavailable_last
from router.sticky import Score, judge

NEAR = 3  # those that are called alike, of another provider or none


def choose_route(
    request: Request,
    options: RoutingOptions,
    catalog: Catalog,
    health: Health,
    complexity: Score,
    *,
    share: float = 0.0,
    spread: float = 0.0,
    at: float | None = None,
    withdrawn: Collection[str] = (),
) -> Route:
    """Return the targets that can serve the request in the order to try them, and the reason.

    ``health`` is keyed by ``Target.key``; a target without an entry is healthy. ``complexity`` returns the probability
    that a small model suffices; it is asked only when an automatic route has both kinds to choose from. ``share`` in
    [0, 1) is the caller's draw, by which models of equal cost and speed share the load, ``spread`` the one by
    which replicas of a model do; ``at`` is when the call is made (unix seconds), for prices that change on a known day.
    Equal arguments give equal routes. ``withdrawn`` are names whose canary is not asked any more; conversations of a
    ``share`` below a canary's go there.

    Raises ``UnknownModel``, ``ModelNotAllowed``, ``NoReplica``, or a ``NoTargetFits`` that says what no target can do.
    """
    canary = catalog.canaries.get(request.model) if catalog.canaries else None
    if not options.spares and options.providers is None and canary is None:
        return _route_of(request, options, catalog, health, complexity, share, spread, at)

    def route_of(name: str) -> Route:
        named = request if name == request.model else replace(request, model=name)
        route = _route_of(named, options, catalog, health, complexity, share, spread, at)
        if canary is None or named is not request or share >= canary.share or name in withdrawn:
            return route
        asked, granted = replace(request, model=canary.model), granted_with(options, name, canary.model, catalog)
        if granted is None or isinstance(request, EmbeddingRequest):
            return route
        there = partial(_route_of, asked, granted, catalog, health, complexity, share, spread, at)
        return with_canary(route, there, health)

    if not options.spares:
        route = route_of(request.model)
    else:
        refuse_other_vectors(request)
        route = with_spares((request.model, *options.spares), route_of, health)
    return route if options.providers is None else at_preferred(route, options.providers, health)


def _route_of(
    request: Request,
    options: RoutingOptions,
    catalog: Catalog,
    health: Health,
    complexity: Score,
    share: float,
    spread: float,
    at: float | None,
) -> Route:
    """Return the route of the model that a request names, by what is configured alone."""
    name = permitted_name(request.model, options, catalog)
    if name in catalog.models:
        return _named_route(request, options, catalog, health, name, spread)
    auto = catalog.auto[name]
    eligible = _eligible(options.usable(catalog.members_of(name)), request, options, catalog)
    if not isinstance(request, Generation):
        return _plain_route(request, auto, eligible, catalog, health, spread)

    small = [model for model in eligible if model.name in auto.small]
    large = [model for model in eligible if model.name in auto.large]
    decision = _judged(request, options, auto, name, complexity) if small and large else None
    is_small = bool(small) if decision is None else decision.is_small

    chosen, spare = (small, large) if is_small else (large, small if options.allow_smaller else [])
    cost = partial(cost_of, expected_usage(request), batch=options.tier is Tier.BATCH, at=at)
    targets = by_cost(chosen, cost, catalog, health, share, spread)
    targets += by_cost([model for model in spare if model not in chosen], cost, catalog, health, share, spread)
    ordered, reason = _usable(targets, request, health), "auto_small" if is_small else "auto_large"
    if decision is None:
        return Route(request.model, ordered, reason)
    score = decision.score if decision.shipped is None else decision.shipped
    return Route(request.model, ordered, reason, score, decision)


def _judged(
    request: Request, options: RoutingOptions, auto: AutoRoute, name: str, complexity: Score
) -> ComplexityDecision:
    """Return what is judged of a request: by the team's own scores where it has some and asks for no quality."""
    if options.quality is not None:
        return judge(request, options.quality, complexity)
    if (learned := options.learned.get(name)) is not None:
        return replace(judge(request, auto.quality, learned), shipped=complexity(request))
    return judge(request, options.recalibrated.get(name, auto.quality), complexity)


def _named_route(
    request: Request, options: RoutingOptions, catalog: Catalog, health: Health, name: str, spread: float
) -> Route:
    """Return the model's endpoints in order of preference, then its fallbacks', what is unavailable last.

    For a prompt that is longer than its context, those of the fallbacks that can take it.
    """
    model = catalog.models[name]
    spares = [
        spare
        for spare in map(catalog.models.__getitem__, catalog.fallbacks.get(name, ()))
        if options.may_use(spare.name) and (options.allow_smaller or not is_smaller(spare, model, catalog))
    ]
    needs = needs_of(request, options, [model, *spares])
    part = part_that_can(model, needs)
    refusal = None if part is not None else explain_refusal(model.everywhere, needs, options, catalog)
    if refusal is not None and not isinstance(refusal, (ContextTooShort, NoReplica)):
        raise refusal
    targets = [] if part is None else by_preference(part, catalog, health, spread)
    for spare in spares:
        compares = not isinstance(request, EmbeddingRequest) or spare.upstream_model == model.upstream_model
        if spare.name != name and compares and (part := part_that_can(spare, needs)) is not None:
            targets += by_preference(part, catalog, health, spread)
    if refusal is not None and not targets:
        raise refusal

    ordered = _usable(targets, request, health)
    if ordered[0].model.name != name:
        return Route(request.model, ordered, "fallback")
    return Route(request.model, ordered, "named" if request.model == name else "alias")


def _plain_route(
    request: Request,
    auto: AutoRoute,
    eligible: Sequence[ModelSpec],
    catalog: Catalog,
    health: Health,
    spread: float,
) -> Route:
    """Return the first model that can, wherever it is served: vectors and scores of different models do not compare."""
    first = eligible[0]
    same = [model for model in eligible if model.upstream_model == first.upstream_model]
    targets = [target for model in same for target in by_preference(model, catalog, health, spread)]
    reason = "auto_small" if first.name in auto.small else "auto_large"
    return Route(request.model, _usable(targets, request, health), reason)


def _usable(targets: Sequence[Target], request: Request, health: Health) -> tuple[Target, ...]:
    """Return the targets, what is unavailable last. Raises NoReplica where there are none."""
    if not targets:
        raise NoReplica(f"No replica of '{request.model[:100]}' is up now. Try again soon.")
    return unavailable_last(targets, health)


def permitted_name(asked: str, options: RoutingOptions, catalog: Catalog) -> str:
    """Return the model or automatic route that a name leads to. Raises ModelNotAllowed, UnknownModel.

    A team that may not use every model hears the same of one that there is and of one that there is not: the catalogue
    is not its own to find out.
    """
    name = catalog.meaning(asked)
    is_known = name in catalog.models or name in catalog.auto
    if not (lists := options.lists()):
        if not is_known:
            last = asked.rpartition("/")[2]
            near = [f"'{name}'" for name in catalog.models if name.rpartition("/")[2] == last][:NEAR]
            listed = "GET /v1/models lists those that do" + (f", {', '.join(near)} among them" if near else "")
            words = f"The model '{asked[:100]}' does not exist; {listed}."
            raise UnknownModel(words, param="model").keeping(f"That model does not exist; {listed}.")
        return name
    if is_known:
        members = catalog.members_of(name) if name in catalog.auto else ()
        is_named = options.may_use(name, asked, *(model.name for model in members))
        if is_named and (not members or options.usable(members)):  # none may be what both team and key have
            return name
    names = lists[-1]  # the key's are the narrower ones
    allowed = f"it may use {some_of(sorted(names))}" if names else "it may use none"
    who = "team" if options.key_models is None else "key"
    allowed += " (GET /v1/models lists them)."
    refusal = ModelNotAllowed(f"This {who} may use no model '{asked[:100]}'; {allowed}", param="model")
    raise refusal.keeping(f"This {who} may not use that model; {allowed}")


def _eligible(
    models: Sequence[ModelSpec], request: Request, options: RoutingOptions, catalog: Catalog
) -> Sequence[ModelSpec]:
    needs = needs_of(request, options, models)
    eligible = [part for model in models if (part := part_that_can(model, needs)) is not None]
    if not eligible:
        everywhere = [one for model in models for one in model.everywhere]
        raise explain_refusal(everywhere, needs, options, catalog)
    return eligible
