# Which targets a call may go to, and in which order, by the configuration that it began with and by what is known of
# the targets at this moment. The rules are the router's, which is pure.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.foreign_fields import refuse_not_honoured
from gateway.calls.image_urls import ImageUrls
from gateway.inference.limiter import TargetLimiter
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.canaries import CanaryWatch
from gateway.upstreams.resilience.first_tokens import FirstTokens
from protocol.errors import UnsupportedParameter
from protocol.serving.off_loop import off_loop
from router import Route, choose_route
from router.catalog.catalog import Catalog
from router.catalog.targets import TargetHealth
from router.complexity.classifier import Complexity
from router.ranking import Health
from router.sampling import is_sampled, judge_named


class RouteChooser:
    """Chooses the routes of calls."""

    def __init__(
        self,
        catalog: Catalog,
        providers: ProviderRegistry,
        complexity: Complexity,
        limiter: TargetLimiter,
        breakers: Breakers,
        first_tokens: FirstTokens,
        images: ImageUrls,
        canaries: CanaryWatch,
    ) -> None:
        self._catalog = catalog
        self._providers = providers
        self._complexity = complexity
        self._limiter = limiter
        self._breakers = breakers
        self._first_tokens = first_tokens
        self._images = images
        self._canaries = canaries

    def health(self) -> Mapping[str, TargetHealth]:
        """Return what is known of targets in trouble; a target that is missing is healthy."""
        full, away = self._limiter.health(), self._breakers.health()
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
            *(call.request, call.routing, catalog, snapshot, self._complexity),
            share=share,
            spread=spread,
            at=call.created_at,
            withdrawn=self._canaries.withdrawn,
        )
        return route if call.service_tier is None else _in_tier(route, call.service_tier)

    async def choose(self, call: Call, health: Mapping[str, TargetHealth]) -> Route:
        """Return the route of a call that is to be made, without targets that may not be shown its images. Raises as
        ``choose_route`` does, and BadRequest."""
        route = await off_loop(call.size, partial(self._judged_route, call, self.health_snapshot(health)))
        if call.extra:
            allowed = (self._providers.settings(one.model.provider).allow_fields for one in route.targets)
            refuse_not_honoured(call.extra, call.understood, frozenset().union(*allowed))
        return await self._images.fit(call.request, call.size, call.caller.team.id, route, self._providers)

    def _judged_route(self, call: Call, snapshot: Health) -> Route:
        route = self.route_of(call, snapshot)
        if is_sampled(call.request_id):
            route = judge_named(route, call.request, call.routing, self._catalog_for(call), self._complexity)
        return route

    def _catalog_for(self, call: Call) -> Catalog:
        message = call.as_message
        catalog = self._catalog.kept_an_hour if message is not None and message.is_kept_an_hour else self._catalog
        return catalog if call.service_tier is None else catalog.at_tier(call.service_tier)


def _in_tier(route: Route, tier: str) -> Route:
    """Return a route with the targets alone that have a price for a service tier. Raises UnsupportedParameter."""
    targets = tuple(target for target in route.targets if target.model.price_in(tier) is not None)
    if not targets:
        words = f"'service_tier' {tier!r} has no price at the model that answers here."
        words = f'{words} Leave it out, or send "auto" or "default".'
        raise UnsupportedParameter(words, param="service_tier")
    return replace(route, targets=targets)
