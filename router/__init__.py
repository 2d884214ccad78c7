# Which model answers; no network, no database.

from router.catalog import Catalog
from router.choose import choose_route
from router.targets import Ability, Endpoint, ModelSpec, Route, Target, TargetHealth, Tier
from router.wish import Wish

__all__ = [
    "Ability",
    "Catalog",
    "Endpoint",
    "ModelSpec",
    "Route",
    "Target",
    "TargetHealth",
    "Tier",
    "Wish",
    "choose_route",
]
