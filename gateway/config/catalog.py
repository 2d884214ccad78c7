# The part of tollgate.yaml that the router chooses from: providers, models and their prices, and the names that stand
# for models.

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.config.fields import Faults, Fields, Read, complain
from gateway.config.fleet import pool_names
from gateway.config.models import name_of, read_model
from gateway.config.names import read_alias, read_fallbacks, read_route
from gateway.config.offers import read_offers
from gateway.config.providers import read_provider
from gateway.config.tree import Fault, Node, Section
from gateway.core.settings import LeftOut, ProviderSettings
from router.catalog.catalog import AutoRoute
from router.catalog.targets import ModelSpec

T = TypeVar("T")


class Catalogue(Struct, frozen=True, kw_only=True):
    """What the file offers, references resolved: every model named below is one of ``models``."""

    providers: dict[str, ProviderSettings]
    models: dict[str, ModelSpec]
    auto: dict[str, AutoRoute]
    fallbacks: dict[str, tuple[str, ...]]
    aliases: dict[str, str]


def read_catalogue(root: Fields, faults: Faults) -> Catalogue:
    """Read everything that the router chooses from; faulty entries are noted and stand in half-read."""
    pools = pool_names(root)
    providers = _entries(
        root,
        "providers",
        lambda node, out: read_provider(node, out, is_pool=name_of(node) in pools),
        needed="at least one provider, such as openai",
    )
    known = _keys(root, "providers")

    def read_one(node: Node, out: Faults) -> ModelSpec | None:
        return read_model(node, out, providers, known)

    offers = any(provider.models for provider in providers.values())
    needed = "at least one model to offer, or all of a provider: providers: {NAME: {models: '*'}}"
    models = _entries(root, "models", read_one, needed="" if offers else needed)
    section = root.node("providers")
    rows = section.entries if isinstance(section, Section) else {}
    models |= read_offers(rows, faults, providers, dict.fromkeys(_keys(root, "models")))
    names = tuple(dict.fromkeys((*_keys(root, "models"), *models)))
    aliases = _entries(root, "aliases", lambda node, out: read_alias(node, out, names))
    lead_to = {**aliases, **{name: name for name in names}}
    return Catalogue(
        providers=providers,
        models=models,
        auto=_entries(root, "routes", lambda node, out: read_route(node, out, lead_to, models)),
        fallbacks=read_fallbacks(root, lead_to, models),
        aliases=aliases,
    )


def leave_out(whole: Catalogue) -> tuple[Catalogue, tuple[LeftOut, ...]]:
    """Return the catalogue without optional providers that have no key, and what went with each: a model, and what
    names it. It happens after everything was read and checked, so that a typo is a fault in either case."""
    away = {
        name
        for name, provider in whole.providers.items()
        if provider.optional and not (provider.api_keys or provider.team_keys)
    }
    if not away:
        return whole, ()
    shorter = {name: _without(model, away) for name, model in whole.models.items()}
    models = {name: model for name, model in shorter.items() if model is not None}
    routes = {name: short for name, route in whole.auto.items() if (short := _shortened(route, models)) is not None}
    spares = {
        name: tuple(other for other in others if other in models)
        for name, others in whole.fallbacks.items()
        if name in models
    }
    kept = Catalogue(
        providers={name: provider for name, provider in whole.providers.items() if name not in away},
        models=models,
        auto=routes,
        fallbacks={name: others for name, others in spares.items() if others},
        aliases={name: model for name, model in whole.aliases.items() if model in models},
    )
    return kept, tuple(_what_goes(whole, kept, provider) for provider in whole.providers if provider in away)


def _entries(root: Fields, key: str, read: Read[T], needed: str = "") -> dict[str, T]:
    """Return a section whose keys are names of the user's choice."""
    if needed and not root.has(key):
        root.faults.append(Fault(root.line, key, f"missing; {needed}"))
    section = Fields(root.node(key), key, root.faults).section
    if section is None:
        return {}
    if needed and not section.entries:
        complain(section, root.faults, f"empty; {needed}")
    found: dict[str, T] = {}
    for name, node in section.entries.items():
        if not name.strip() or any(character.isspace() or not character.isprintable() for character in name):
            complain(node, root.faults, "a name is one word, without spaces")
        if (value := read(node, root.faults)) is not None:
            found[name] = value
    return found


def _keys(root: Fields, key: str) -> tuple[str, ...]:
    node = root.node(key)
    return tuple(node.entries) if isinstance(node, Section) else ()


def _without(model: ModelSpec, away: Collection[str]) -> ModelSpec | None:
    """Return the model at the providers that are left, ``None`` where none is."""
    if model.provider not in away and not model.others:
        return model
    left = [one for one in model.everywhere if one.provider not in away]
    return replace(left[0], others=tuple(replace(one, others=()) for one in left[1:])) if left else None


def _shortened(route: AutoRoute, models: Mapping[str, object]) -> AutoRoute | None:
    """Return a route over the models that are left; where one side is empty, the other answers for it."""
    left, shadow = route.among(models.keys()), route.shadow
    if shadow is not None and shadow.judge not in models:
        shadow = replace(shadow, judge=None)
    if not (left.small or left.large):
        return None
    return replace(left, small=left.small or left.large, large=left.large or left.small, shadow=shadow)


def _what_goes(whole: Catalogue, kept: Catalogue, provider: str) -> LeftOut:
    models = tuple(
        name
        for name, model in whole.models.items()
        if name not in kept.models and provider in (one.provider for one in model.everywhere)
    )
    routes = tuple(
        name
        for name, route in whole.auto.items()
        if route != kept.auto.get(name) and not {*models}.isdisjoint((*route.small, *route.large))
    )
    aliases = tuple(name for name, model in whole.aliases.items() if model in models)
    return LeftOut(provider, models, aliases, routes)
