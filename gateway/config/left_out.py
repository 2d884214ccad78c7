# Providers that may be missing: one that is marked `optional` and has no key is left out, with its models and whatever
# names them. It happens after everything was read and checked, so that a typo is a fault in either case.

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gateway.config.catalog import Catalogue
from gateway.core.settings import LeftOut
from router.catalog.catalog import AutoRoute


def leave_out(whole: Catalogue) -> tuple[Catalogue, tuple[LeftOut, ...]]:
    """Return the catalogue without optional providers that have no key, and what went with each."""
    away = {name for name, provider in whole.providers.items() if provider.optional and not provider.api_keys}
    if not away:
        return whole, ()
    models = {name: model for name, model in whole.models.items() if model.provider not in away}
    routes = {name: short for name, route in whole.auto.items() if (short := _shortened(route, models)) is not None}
    spares = {name: _those_in(models, others) for name, others in whole.fallbacks.items() if name in models}
    kept = Catalogue(
        providers={name: provider for name, provider in whole.providers.items() if name not in away},
        models=models,
        auto=routes,
        fallbacks={name: others for name, others in spares.items() if others},
        aliases={name: model for name, model in whole.aliases.items() if model in models},
    )
    return kept, tuple(_what_goes(whole, kept, provider) for provider in whole.providers if provider in away)


def _shortened(route: AutoRoute, models: Mapping[str, object]) -> AutoRoute | None:
    """Return a route over the models that are left; where one side is empty, the other answers for it."""
    small, large = _those_in(models, route.small), _those_in(models, route.large)
    if not (small or large):
        return None
    shadow = route.shadow
    if shadow is not None and shadow.judge not in models:
        shadow = replace(shadow, judge=None)
    return replace(route, small=small or large, large=large or small, shadow=shadow)


def _what_goes(whole: Catalogue, kept: Catalogue, provider: str) -> LeftOut:
    models = tuple(name for name, model in whole.models.items() if model.provider == provider)
    routes = tuple(
        name
        for name, route in whole.auto.items()
        if route != kept.auto.get(name) and not {*models}.isdisjoint((*route.small, *route.large))
    )
    aliases = tuple(name for name, model in whole.aliases.items() if model in models)
    return LeftOut(provider, models, aliases, routes)


def _those_in(models: Mapping[str, object], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in models)
