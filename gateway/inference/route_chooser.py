# Which targets a call may go to, and in which order, by the configuration that it began with and by what is known of
# the targets at this moment. The rules are the router's, which is pure.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.image_urls import ImageUrls
from gateway.core.principals import Team
from gateway.inference.limiter import TargetLimiter
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.canaries import CanaryWatch
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.team_keys import goes_by_own_keys, variants_of, with_team_keys
from protocol.errors import UnsupportedParameter, not_supported
from protocol.media.images import ImageRequest
from protocol.responses import ResponsesRequest, ResponsesTool
from protocol.serving.off_loop import off_loop
from router import Route, choose_route
from router.catalog.catalog import Catalog
from router.catalog.targets import ModelSpec, Target, TargetHealth
from router.complexity.classifier import Complexity
from router.eligibility import Shortcoming
from router.left_out import left_out_of
from router.ranking import Health
from router.sampling import is_sampled, judge_named

MOST_LEFT_OUT = 16  # models that a call's row names


class RouteChooser(Struct, eq=False):
    """Chooses the routes of calls."""

    _catalog: Catalog
    _providers: ProviderRegistry
    _complexity: Complexity
    _limiter: TargetLimiter
    _breakers: Breakers
    _first_tokens: FirstTokens
    _images: ImageUrls
    _canaries: CanaryWatch

    def health(self, team: Team) -> Mapping[str, TargetHealth]:
        """Return what is known of targets in trouble, for the calls of a team; a target that is missing is healthy."""
        full = self._limiter.health()
        away = self._breakers.health(partial(self._asked_as, team) if goes_by_own_keys(team, self._providers) else None)
        return {**full, **away} if full else away

    def health_snapshot(self, health: Mapping[str, TargetHealth]) -> Mapping[str, TargetHealth]:
        """Return what the router goes by: ``health``, and how soon the others have lately answered."""
        return self._first_tokens.beside(health)

    def route_of(self, call: Call, snapshot: Health) -> Route:
        """Return the route of a call, by what is known of the targets now. Raises as ``choose_route`` does."""
        catalog = self._catalog_for(call)
        asked = call.request.model
        share = call.share if asked in catalog.canaries or catalog.meaning(asked) in catalog.auto else 0.0
        spread = call.spread if catalog.is_replicated else 0.0
        route = choose_route(
            call.request,
            call.routing,
            catalog,
            snapshot,
            self._complexity,
            share=share,
            spread=spread,
            at=call.created_at,
            withdrawn=self._canaries.withdrawn,
        )
        if goes_by_own_keys(call.caller.team, self._providers):
            route = with_team_keys(route, call.caller.team, self._providers)
        route = route if call.service_tier is None else _in_tier(route, call.service_tier)
        return _with_room(route, call.without_room) if call.without_room else route

    async def choose(self, call: Call, health: Mapping[str, TargetHealth]) -> Route:
        """Return the route of a call that is to be made, without targets that may not be shown its images. Raises as
        ``choose_route`` does, and BadRequest."""
        route = await off_loop(call.size, partial(self._judged_route, call, self.health_snapshot(health)))
        if call.extra:
            allowed = (self._providers.settings(one.model.provider).allow_fields for one in route.targets)
            refuse_not_honoured(call.extra, call.understood, frozenset().union(*allowed))
        return await self._images.fit(call.request, call.size, call.caller.team.id, route, self._providers)

    def _asked_as(self, team: Team, target: Target) -> Iterator[Target]:
        """Yield a target as a team's calls are asked there. Breakers may know one of a later configuration: these calls
        do not go there."""
        if self._providers.stands_at(target):
            yield from variants_of(target, team, self._providers)

    def _judged_route(self, call: Call, snapshot: Health) -> Route:
        route = self.route_of(call, snapshot)
        if is_sampled(call.request_id):
            route = judge_named(route, call.request, call.routing, self._catalog_for(call), self._complexity)
        is_of_one = call.request.model in self._catalog.names_of_one and not call.routing.spares
        if not is_of_one and (left_out := self.left_out(call, route)):
            codes = {name: tuple([one.code for one in why]) for name, why in left_out.items()}
            route = replace(route, left_out=dict(islice(codes.items(), MOST_LEFT_OUT)))
        return route

    def left_out(self, call: Call, route: Route) -> dict[str, list[Shortcoming]]:
        """Return which models the call may not go to, of those that its team may use and that it means, and why."""
        catalog = self._catalog_for(call)
        found = left_out_of(route, call.request, call.routing, catalog)
        return (
            {name: why or [self._why_not(call, catalog.models[name])] for name, why in found.items()} if found else {}
        )

    def _why_not(self, call: Call, model: ModelSpec) -> Shortcoming:
        """Return why a call may not go to a model that could serve it."""
        if model.name in call.without_room:
            return Shortcoming("team_limit", "has no room for it within a limit of the team")
        if call.service_tier is not None and model.price_in(call.service_tier) is None:
            return Shortcoming("service_tier", f"has no price in service tier {call.service_tier}")
        return Shortcoming("provider_key", f"is at {model.provider}, where the team has no key of its own")

    def _catalog_for(self, call: Call) -> Catalog:
        message = call.as_message
        catalog = self._catalog.kept_an_hour if message is not None and message.is_kept_an_hour else self._catalog
        asked = call.native.paints if isinstance(call.native, ResponsesRequest) else call.request
        if isinstance(asked, ImageRequest | ResponsesTool):
            catalog = catalog.for_pictures(asked.quality, asked.size)
        return catalog if call.service_tier is None else catalog.at_tier(call.service_tier)


def _with_room(route: Route, without: Collection[str]) -> Route:
    """Return a route without the targets of some models; the whole, where none is left."""
    targets = tuple(target for target in route.targets if target.model.name not in without)
    if not targets or targets == route.targets:
        return route
    return replace(route, targets=targets, reason=route.reason_at(targets[0]))


def _in_tier(route: Route, tier: str) -> Route:
    """Return a route with the targets alone that have a price for a service tier. Raises UnsupportedParameter."""
    targets = tuple(target for target in route.targets if target.model.price_in(tier) is not None)
    if not targets:
        words = f"'service_tier' {tier!r} has no price at the model that answers here."
        words = f'{words} Leave it out, or send "auto" or "default".'
        raise UnsupportedParameter(words, param="service_tier")
    return replace(route, targets=targets)


# What cannot be honoured, and what to do in its place. A provider whose `allow_fields` names it gets it all the same.
REFUSED: Mapping[str, str] = {
    "mock_response": "Answers come from models; ask 'tollgate-demo' of `tollgate dev` for one that costs nothing",
    "mock_tool_calls": "Answers come from models",
    "api_key": "A team's own key for a provider is set by its admin (POST /admin/teams/ID/provider-keys)",
    "api_base": "Providers' addresses are the operator's, in tollgate.yaml",
    "base_url": "Providers' addresses are the operator's, in tollgate.yaml",
    "custom_llm_provider": "Name one of GET /v1/models, or 'provider': {\"only\": […]}",
    "guardrails": "The content policy is the operator's and the team's, for every call alike",
    "plugins": "Leave it out: nothing is added to a prompt here",
    "drop_params": "Leave it out: what changes no meaning is left out and told in x-tollgate-dropped, all else refused",
    "transforms": "A prompt goes as it is; name a model with a longer context in 'models' for one that is too long",
    "provider.require_parameters": "What a provider lacks and changes no meaning is told in x-tollgate-dropped",
    "provider.data_collection": "Name the providers that may be asked in 'provider.only'",
    "provider.zdr": "Name the providers that may be asked in 'provider.only'",
    "provider.max_price": "Send x-max-cost-usd",
    "provider.quantizations": "Name the models that may be asked",
}


def refuse_not_honoured(extra: Mapping[str, Any], understood: frozenset[str], allowed: frozenset[str]) -> None:
    """Refuse fields that cannot be honoured, unless a provider of the route is ``allowed`` to be sent them. Raises
    UnsupportedParameter."""
    for name in REFUSED.keys() & extra.keys():
        if name not in understood and name.partition(".")[0] not in allowed:
            raise not_supported(name, f"{REFUSED[name]}.")
