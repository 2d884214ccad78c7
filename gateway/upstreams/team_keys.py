# Targets with teams' own keys: what a team brought for a provider is used for its calls alone, in the place of the
# deployment's keys or before them, as the team chose. Teams without any go past all of this.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from gateway.core.principals import Team
from gateway.core.settings import ProviderSettings
from gateway.upstreams.registry import ProviderRegistry, takes_team_keys
from router.catalog.catalog import Catalog
from router.catalog.errors import ModelNotAllowed
from router.catalog.targets import Route, Target

MISSING = "provider_key_missing"


def goes_by_own_keys(team: Team, providers: ProviderRegistry) -> bool:
    """Whether it matters whose keys a team's calls are asked with."""
    return bool(team.provider_keys) or team.company_keys == "never" or providers.names_teams


def brings_keys(team: Team, providers: ProviderRegistry) -> bool:
    """Whether a team has a key of its own anywhere, of the API or in tollgate.yaml."""
    return bool(team.provider_keys) or team.id in providers.teams_named


def with_team_keys(route: Route, team: Team, providers: ProviderRegistry) -> Route:
    """Return a route whose targets are asked with the keys that a team's calls go with; of each model those with its
    own come first. Raises ModelNotAllowed where none is left."""
    targets: list[Target] = []
    for _, run in groupby(route.targets, lambda target: target.model.name):
        found = [one for target in run for one in variants_of(target, team, providers)]
        targets += sorted(found, key=lambda one: one.own is None)
    if not targets:
        named = ", ".join(dict.fromkeys(target.model.provider for target in route.targets))
        words = f"This team's calls go to {named} with keys of its own alone, and it has none there. "
        words += "An admin of the team brings one: POST /admin/teams/{team_id}/provider-keys."
        raise ModelNotAllowed(words, param="model", code=MISSING).keeping(words)
    return replace(route, targets=tuple(targets), reason=route.reason_at(targets[0]))


def targets_for(targets: Iterable[Target], team: Team, providers: ProviderRegistry) -> list[Target]:
    """Return targets as a team's calls are asked there; its own keys first."""
    if not goes_by_own_keys(team, providers):
        return list(targets)
    found = [one for target in targets for one in variants_of(target, team, providers)]
    return sorted(found, key=lambda one: one.own is None)


def variants_of(target: Target, team: Team, providers: ProviderRegistry) -> Iterator[Target]:
    """Yield a target with the team's own keys, where it has any, and with the deployment's, where its calls may go with
    those."""
    provider = providers.settings_at(target)
    if (own := providers.own_keys(team, provider)) is not None:
        model = target.free_model if team.own_key_cost == "none" else target.model
        yield Target(model, target.endpoint, own)
    if _may_use_company_keys(team, provider, has_own=own is not None):
        yield target


def models_open_to(team: Team, catalog: Catalog, providers: ProviderRegistry) -> frozenset[str] | None:
    """Return the models for which there is a key that a team's calls may go with; ``None``: all."""
    if not goes_by_own_keys(team, providers):
        return None

    def is_open(name: str) -> bool:
        provider = providers.settings(name)
        has_own = providers.own_keys(team, provider) is not None
        return has_own or _may_use_company_keys(team, provider, has_own=has_own)

    here = {name for name in providers.names() if is_open(name)}
    return frozenset(
        model.name for model in catalog.models.values() if here & {one.provider for one in model.everywhere}
    )


def _may_use_company_keys(team: Team, provider: ProviderSettings, *, has_own: bool) -> bool:
    if provider.team_keys is not None and not provider.api_keys:
        return False  # it is there for teams with keys of their own
    if team.company_keys == "never":
        has_any = provider.api_keys or provider.headers or not takes_team_keys(provider)
        return provider.self_hosted or not has_any
    return team.company_keys == "fallback" or not has_own
