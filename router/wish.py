# What a caller wants of a route beside the request itself.

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from router.targets import Tier


class Wish(Struct, frozen=True, kw_only=True):
    """What the caller asks for in headers, and what its team may have."""

    tier: Tier = Tier.INTERACTIVE
    allowed_models: frozenset[str] | None = None  # None: every one
    allow_smaller: bool = True  # under overload, a small model may answer what was judged hard
    quality: float | None = None  # 0..1, for automatic routes; None: the route's own
    recalibrated: Mapping[str, float] = {}  # by route: what its own quality takes for this team, as measured
    max_cost_nanousd: int | None = None  # the most that the call may cost at worst
