# What a caller wants of a route beside the request itself.

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from router.catalog.targets import ModelSpec, Tier


class ProviderPreference(Struct, frozen=True, kw_only=True):
    """Which providers may answer, by their names in tollgate.yaml in lower case."""

    only: frozenset[str] | None = None  # None: all
    ignore: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()  # these first
    allow_fallbacks: bool = True  # whether another than the first of them may be asked


class RoutingOptions(Struct, frozen=True, kw_only=True):
    """What the caller asks for in headers, and what its team may have."""

    tier: Tier = Tier.INTERACTIVE
    allowed_models: frozenset[str] | None = None  # None: every one
    allow_smaller: bool = True  # under overload, a small model may answer what was judged hard
    quality: float | None = None  # 0..1, for automatic routes; None: the route's own
    recalibrated: Mapping[str, float] = {}  # by route: what its own quality takes for this team, as measured
    max_cost_nanousd: int | None = None  # the most that the call may cost at worst
    spares: tuple[str, ...] = ()  # models to fall back on, by the names that the caller gives
    providers: ProviderPreference | None = None

    def may_use(self, *names: str) -> bool:
        """Whether the team may use what goes by any of these names, such as an alias and what it leads to."""
        return self.allowed_models is None or not self.allowed_models.isdisjoint(names)

    def usable(self, members: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """Return the models of a route that the team may use: all, when its list names the route and none of them."""
        if self.allowed_models is None:
            return members
        return [model for model in members if model.name in self.allowed_models] or members
