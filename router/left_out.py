# Which models that a call might have gone to are not on its route, and why. Looked at after the choice, and only where
# a name stands for several models.

from __future__ import annotations

from collections.abc import Sequence

from protocol.inference import Request
from router.catalog.catalog import Catalog
from router.catalog.routing_options import ProviderPreference, RoutingOptions
from router.catalog.targets import Capability, ModelSpec, Route
from router.eligibility import Needs, Shortcoming, needs_of, shortcomings


def left_out_of(
    route: Route, request: Request, options: RoutingOptions, catalog: Catalog
) -> dict[str, list[Shortcoming]]:
    """Return the models that the caller may use, that the name asked or a spare of the caller's stands for, and that
    are no target of ``route``, with what keeps each away: nothing where that is not the router's doing."""
    if request.model in catalog.names_of_one and not options.spares:
        return {}
    used = {target.model.name for target in route.targets}
    asked = dict.fromkeys(map(catalog.meaning, (request.model, *options.spares)))
    missing = {one.name: one for each in asked for one in _meant(each, options, catalog) if one.name not in used}
    if not missing:
        return {}
    needs = needs_of(request, options, [*missing.values()])
    return {model.name: _why(model, needs, options, catalog) for model in missing.values()}


def _meant(name: str, options: RoutingOptions, catalog: Catalog) -> Sequence[ModelSpec]:
    """Return the models that a name stands for, and that the caller may use."""
    if name in catalog.auto:
        return options.usable(catalog.members_of(name))
    if name not in catalog.models:
        return ()
    spares = (catalog.models[spare] for spare in catalog.fallbacks.get(name, ()))
    return (catalog.models[name], *(spare for spare in spares if options.may_use(spare.name)))


def _why(model: ModelSpec, needs: Needs, options: RoutingOptions, catalog: Catalog) -> list[Shortcoming]:
    if found := shortcomings(model, needs):
        return found
    if Capability.EMBEDDINGS in needs.capabilities:
        return [Shortcoming("other_vectors", "has vectors of its own, which do not compare")]
    if not catalog.targets_of(model):
        return [Shortcoming("no_replica", "has no replica that is up now")]
    if options.providers is not None and _passes_by(options.providers, model):
        return [Shortcoming("provider_preference", f"is at {model.provider}, where 'provider' lets no call go")]
    if not options.allow_smaller:
        return [Shortcoming("smaller", "is smaller than the request needs, for this team")]
    return []


def _passes_by(preferred: ProviderPreference, model: ModelSpec) -> bool:
    """Whether a caller's preference may leave no provider of the model."""
    named = {one.provider.lower() for one in model.everywhere} - preferred.ignore
    return not preferred.allow_fallbacks or not (named if preferred.only is None else named & preferred.only)
