# What a caller wants of a route beside the request itself.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from protocol.inference import Request
from router.catalog.targets import ModelSpec, Tier


class ProviderPreference(Struct, frozen=True, kw_only=True):
    """Which providers may answer, by their names in tollgate.yaml in lower case."""

    only: frozenset[str] | None = None  # None: all
    ignore: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()  # these first
    allow_fallbacks: bool = True  # whether another than the first of them may be asked


class RoutingOptions(Struct, frozen=True, kw_only=True):
    """What the caller asks for in headers, and what its team and its key may have."""

    tier: Tier = Tier.INTERACTIVE
    allowed_models: frozenset[str] | None = None  # the team's; None: every one
    key_models: frozenset[str] | None = None  # the key's, of those; None: every one
    allow_smaller: bool = True  # under overload, a small model may answer what was judged hard
    quality: float | None = None  # 0..1, for automatic routes; None: the route's own
    recalibrated: Mapping[str, float] = {}  # by route: what its own quality takes for this team, as measured
    learned: Mapping[str, Callable[[Request], float]] = {}  # by route: the team's own scores, where it asks no quality
    max_cost_nanousd: int | None = None  # the most that the call may cost at worst
    spares: tuple[str, ...] = ()  # models to fall back on, by the names that the caller gives
    providers: ProviderPreference | None = None

    def lists(self) -> tuple[frozenset[str], ...]:
        """Return the lists of names that bound what may be asked: the team's and the key's, those that there are."""
        return tuple([one for one in (self.allowed_models, self.key_models) if one is not None])

    def may_use(self, *names: str) -> bool:
        """Whether team and key may use what goes by any of these names, such as an alias and what it leads to."""
        return not any(allowed.isdisjoint(names) for allowed in self.lists())

    def usable(self, members: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """Return the models of a route that team and key may use; a list that names the route and none of them means
        all of them."""
        left = members
        for allowed in self.lists():
            if any(model.name in allowed for model in members):
                left = [model for model in left if model.name in allowed]
        return left
