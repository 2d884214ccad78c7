# The models, their endpoints, and what a name may mean: a model, an alias, or an automatic choice.

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from billing.core.prices import for_picture, kept_an_hour
from router.catalog.targets import Endpoint, ModelSpec, Target

USUAL_TIER = "default"  # as upstreams call it


class ShadowTraffic(Struct, frozen=True, kw_only=True):
    """A share of what small models answered, also asked of a large one and compared: what the scores are worth."""

    share: float  # of a route's calls that a small model answers, 0..1
    explore: bool = False  # of those that a large one answers too: a small one is asked, and its answer only compared
    budget_nanousd: int  # the most that a team's calls may cost in a day, UTC
    judge: str | None = None  # the model that compares; None: answers must be the same
    recalibrate: frozenset[str] = frozenset()  # ids of teams whose own outcomes move their threshold


class Canary(Struct, frozen=True, kw_only=True):
    """A share of what asks for a name goes to another model, until that does worse than what the name means."""

    model: str
    share: float  # of conversations, 0..1
    errors: float = 0.05  # how much larger the share of its calls may be whose first attempt fails
    slower: float = 2.0  # times the median of the first token
    dearer: float = 2.0  # times the mean cost of a call
    least: int = 50  # calls of either, below which nothing is told
    window: float = 600.0  # seconds of calls that are compared


class AutoRoute(Struct, frozen=True, kw_only=True):
    """What ``"model": "auto"`` means: the cheapest that the complexity model trusts with the request."""

    small: tuple[str, ...]
    large: tuple[str, ...]
    quality: float = 0.8
    shadow: ShadowTraffic | None = None

    def among(self, models: Collection[str]) -> AutoRoute:
        """Return the route with no other models than these."""
        small, large = (tuple(name for name in names if name in models) for names in (self.small, self.large))
        return replace(self, small=small, large=large)


class Catalog(Struct, frozen=True, dict=True):
    """Everything the router may choose from. A running call keeps the catalogue it started with."""

    models: dict[str, ModelSpec]
    endpoints: dict[str, tuple[Endpoint, ...]]  # by provider, in order of preference
    auto: dict[str, AutoRoute]
    fallbacks: dict[str, tuple[str, ...]]
    aliases: dict[str, str]
    canaries: dict[str, Canary] = {}  # by the name that is asked for

    @cached_property
    def kept_an_hour(self) -> Catalog:
        """The same for calls that have their prompt cached for an hour: models at what that costs."""
        return replace(self, models={name: _kept_an_hour(model) for name, model in self.models.items()})

    def at_tier(self, tier: str) -> Catalog:
        """Return the same for calls that ask for a service tier: models that have it at what that costs."""
        return self._at_tiers.get(tier, self)

    @cached_property
    def _at_tiers(self) -> dict[str, Catalog]:
        tiers = {tier for model in self.models.values() for one in model.everywhere for tier, _ in one.service_tiers}
        return {
            tier: replace(self, models={name: _at_tier(model, tier) for name, model in self.models.items()})
            for tier in tiers
        }

    def for_pictures(self, quality: str | None, size: str | None) -> Catalog:
        """Return the same for calls that ask for pictures: models at what those of some quality and size may cost."""
        asked = tuple(each if each in known else None for each, known in zip((quality, size), self._kinds, strict=True))
        return self._for_pictures(*asked) if any(self._kinds) else self

    def _for_pictures(self, quality: str | None, size: str | None) -> Catalog:
        if (found := self._by_picture.get((quality, size))) is None:
            models = {name: _for_picture(model, quality, size) for name, model in self.models.items()}
            found = self._by_picture[quality, size] = replace(self, models=models)
        return found

    @cached_property
    def _by_picture(self) -> dict[tuple[str | None, str | None], Catalog]:
        return {}

    @cached_property
    def _kinds(self) -> tuple[set[str | None], set[str | None]]:
        """The qualities and sizes that some model has a price for."""
        rows = [row for model in self.models.values() for one in model.everywhere for row in one.price.pictures]
        return {row.quality for row in rows} - {None}, {row.size for row in rows} - {None}

    def targets_of(self, model: ModelSpec) -> tuple[Target, ...]:
        """Return the model at each endpoint of its providers, in order of preference."""
        if not model.others:
            return self.targets_at(model)
        return tuple(target for one in model.everywhere for target in self.targets_at(one))

    def targets_at(self, model: ModelSpec) -> tuple[Target, ...]:
        """Return the model at each endpoint of its first provider."""
        return self._targets[model.name, model.provider]

    @cached_property
    def _targets(self) -> dict[tuple[str, str], tuple[Target, ...]]:  # by model and provider: every decision asks
        return {
            (one.name, one.provider): tuple(Target(one, endpoint) for endpoint in self.endpoints[one.provider])
            for model in self.models.values()
            for one in model.everywhere
        }

    def regions_of(self, model: ModelSpec) -> tuple[tuple[Target, ...], ...]:
        """Return the endpoints of the model's first provider region by region, in order of preference."""
        return self._regions[model.name, model.provider]

    @cached_property
    def _regions(self) -> dict[tuple[str, str], tuple[tuple[Target, ...], ...]]:
        return {
            place: tuple(
                tuple(target for target in targets if target.endpoint.region == region)
                for region in dict.fromkeys(target.endpoint.region for target in targets)
            )
            for place, targets in self._targets.items()
        }

    def has_replicas(self, model: ModelSpec) -> bool:
        """Whether the model has several endpoints in one region of its first provider, which share its calls."""
        place = model.name, model.provider
        return len(self._regions[place]) < len(self._targets[place])

    @cached_property
    def is_replicated(self) -> bool:
        """Whether any model has, or is at several providers."""
        return any(model.others or self.has_replicas(model) for model in self.models.values())

    def members_of(self, route: str) -> tuple[ModelSpec, ...]:
        """Return the models of an automatic route, the small ones first, each once."""
        return self._members[route]

    @cached_property
    def _members(self) -> dict[str, tuple[ModelSpec, ...]]:
        return {
            name: tuple(self.models[member] for member in dict.fromkeys((*route.small, *route.large)))
            for name, route in self.auto.items()
        }

    def targets(self) -> list[Target]:
        """Return every model at every endpoint."""
        return [target for model in self.models.values() for target in self.targets_of(model)]

    def seen_by(self, allowed: frozenset[str] | None) -> Catalog:
        """Return what a team sees that may use ``allowed`` (``None``: all): the models that can answer it, and the
        routes and names that lead to one of them."""
        if allowed is None:
            return self
        asked = allowed.union(map(self.meaning, allowed))
        known = {name for name in self.models if name in asked}
        for route in self.auto.keys() & asked:
            members = {model.name for model in self.members_of(route)}
            known |= members & allowed or members
        auto = {name: route.among(known) for name, route in self.auto.items()}
        seen = known.union(name for name, route in auto.items() if route.small or route.large)
        return replace(
            self,
            models={name: model for name, model in self.models.items() if name in known},
            auto={name: route for name, route in auto.items() if name in seen},
            fallbacks={
                name: tuple(spare for spare in spares if spare in known)
                for name, spares in self.fallbacks.items()
                if name in known
            },
            aliases={name: meant for name, meant in self.aliases.items() if self.meaning(name) in seen},
        )

    def meaning(self, name: str) -> str:
        """Return what a name leads to: itself, or what it is an alias of. It need not exist."""
        seen: set[str] = set()
        while name in self.aliases and name not in seen:
            seen.add(name)
            name = self.aliases[name]
        return name

    @cached_property
    def names_of_one(self) -> frozenset[str]:
        """The names that stand for one model, which has no fallbacks."""
        alone = self.models.keys() - self.fallbacks.keys()
        return frozenset(name for name in (*self.models, *self.aliases) if self.meaning(name) in alone)

    def names(self) -> tuple[str, ...]:
        """Return every name a client may ask for: models, automatic routes, aliases."""
        return (*self.models, *self.auto, *self.aliases)


def _kept_an_hour(model: ModelSpec) -> ModelSpec:
    others = tuple(map(_kept_an_hour, model.others))
    return replace(model, price=kept_an_hour(model.price), others=others)


def _for_picture(model: ModelSpec, quality: str | None, size: str | None) -> ModelSpec:
    others = tuple(_for_picture(one, quality, size) for one in model.others)
    tiers = tuple((tier, for_picture(price, quality, size)) for tier, price in model.service_tiers)
    return replace(model, price=for_picture(model.price, quality, size), service_tiers=tiers, others=others)


def _at_tier(model: ModelSpec, tier: str) -> ModelSpec:
    others = tuple(_at_tier(one, tier) for one in model.others)
    if (price := model.price_in(tier)) is None:
        return replace(model, others=others)
    tiers = (*model.service_tiers, (USUAL_TIER, model.price))
    return replace(model, price=price, service_tiers=tiers, others=others)
