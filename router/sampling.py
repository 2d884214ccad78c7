# What an automatic route would have done with calls that named a large model: judged for a few of them, so that reports
# can estimate what naming it cost, at next to no cost for the rest.

from __future__ import annotations

from msgspec.structs import replace

from protocol.inference import Generation, Request
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Route
from router.eligibility import can_serve, needs_of
from router.sticky import Score

ONE_IN = 32  # calls; a power of two up to 256


def is_sampled(request_id: str) -> bool:
    """Tell whether a call is one of the few, by the dice at the end of its id (a UUIDv7)."""
    return int(request_id[-2:], 16) % ONE_IN == 0


def judge_named(
    route: Route,
    request: Request,
    options: RoutingOptions,
    catalog: Catalog,
    complexity: Score,
) -> Route:
    """Return ``route`` with the probability that a small model would have sufficed, if the call named a large one.

    0 where no small model of that automatic route could serve the request at all.
    """
    auto = route_with_large(route.asked, catalog)
    if auto is None or route.complexity is not None or not isinstance(request, Generation):
        return route
    small = [catalog.models[name] for name in auto.small]
    needs = needs_of(request, options, small)
    is_possible = any(can_serve(model, needs) for model in small)
    return replace(route, complexity=complexity(request) if is_possible else 0.0)


def route_with_large(asked: str, catalog: Catalog) -> AutoRoute | None:
    """Return the first automatic route that has this model among its large ones and has small ones, if any does."""
    name = catalog.meaning(asked)
    return next((auto for auto in catalog.auto.values() if name in auto.large and auto.small), None)
