# Which model answers; no network, no database.

from router.catalog.catalog import Catalog
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Capability, Endpoint, ModelSpec, Route, Target, TargetHealth, Tier
from router.choose import choose_route

__all__ = [
    "Capability",
    "Catalog",
    "Endpoint",
    "ModelSpec",
    "Route",
    "RoutingOptions",
    "Target",
    "TargetHealth",
    "Tier",
    "choose_route",
]
