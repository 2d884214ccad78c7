# What a caller says of who may answer: a list of models to fall back on, and which providers to ask, in which order.

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest
from router.catalog.catalog import Catalog
from router.catalog.errors import ModelNotAllowed, NoReplica, NoTargetFits, UnknownModel
from router.catalog.routing_options import ProviderPreference, RoutingOptions
from router.catalog.targets import Route, Target
from router.ranking import Health, unavailable_last


def with_spares(asked: Sequence[str], route_of: Callable[[str], Route], health: Health) -> Route:
    """Return the first model's route, and behind it the targets of the others, each once, what is unavailable last.

    A model that cannot serve the request, or has no replica now, is passed by; raises the first one's ``NoTargetFits``
    or ``NoReplica`` where none can, and what ``route_of`` raises of a name that may not be asked.
    """
    routes: list[Route] = []
    refusal: NoTargetFits | NoReplica | None = None
    for name in asked:
        try:
            routes.append(route_of(name))
        except (NoTargetFits, NoReplica) as exc:
            refusal = refusal or exc
        except (UnknownModel, ModelNotAllowed) as exc:
            exc.param = exc.param if name == asked[0] else "models"
            raise
    if not routes:
        assert refusal is not None
        raise refusal
    targets = {target.key: target for route in routes for target in route.targets}
    ordered, first = unavailable_last(targets.values(), health), routes[0]
    is_first = first.asked == asked[0] and ordered[0].key in {target.key for target in first.targets}
    if not is_first:
        return Route(asked[0], ordered, "fallback")
    return replace(first, targets=ordered)


def with_canary(base: Route, route_of: Callable[[], Route], health: Health) -> Route:
    """Return the canary's targets, and the base's behind them; the base's alone where the canary cannot serve the
    request, and first where none of the canary's can be asked."""
    try:
        canary = route_of()
    except (NoTargetFits, NoReplica):
        return base
    targets = {target.key: target for target in (*canary.targets, *base.targets)}
    ordered = unavailable_last(targets.values(), health)
    if ordered[0] in canary.targets:
        return Route(base.asked, ordered, "canary")
    return replace(base, targets=ordered)


def granted_with(options: RoutingOptions, asked: str, model: str, catalog: Catalog) -> RoutingOptions | None:
    """Return the options by which a team may be sent to a canary: where it may use the model itself, or an alias or
    automatic route that has it as canary. ``None``: it may not."""
    if options.may_use(model):
        return options
    if asked in catalog.models or not options.may_use(asked):
        return None
    granted = {"allowed_models": options.allowed_models, "key_models": options.key_models}
    return replace(options, **{name: names and names | {model} for name, names in granted.items()})


def at_preferred(route: Route, preference: ProviderPreference, health: Health) -> Route:
    """Return the route by the providers that the caller prefers. Raises NoTargetFits where none is left."""
    only, ignore = preference.only, preference.ignore
    left = [one for one in route.targets if (only is None or _provider(one) in only) and _provider(one) not in ignore]
    places = {name: place for place, name in enumerate(preference.order)}
    targets = sorted(left, key=lambda one: places.get(_provider(one), len(places)))
    if targets and not preference.allow_fallbacks:
        targets = [one for one in targets if _provider(one) == _provider(targets[0])]
    if not targets:
        served = ", ".join(dict.fromkeys(target.model.provider for target in route.targets))
        raise NoTargetFits(f"'provider' leaves none to ask: '{route.asked}' is served by {served}.", param="provider")
    return replace(route, targets=unavailable_last(targets, health))


def refuse_other_vectors(request: object) -> None:
    """Refuse a list of models for texts to embed: vectors of different models do not compare. Raises BadRequest."""
    if isinstance(request, EmbeddingRequest):
        raise BadRequest("Vectors of different models do not compare: name one 'model'.", param="models")


def _provider(target: Target) -> str:
    return target.model.provider.lower()
