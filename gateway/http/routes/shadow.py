# GET /v1/route/curve: what a team's own shadow calls say about an automatic route.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from litestar import Response, get

from billing.core.money import to_text
from billing.core.prices import cost_of
from gateway.accounts.guards import team_or_admin_guard
from gateway.accounts.teams import get_team
from gateway.core.clock import Clock
from gateway.core.principals import Admin, Caller
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, part_of, principal_of, read_parameters, transaction
from gateway.http.routes.usage import team_in_question
from gateway.inference.recalibrations import Recalibrations
from gateway.shadow.store import comparisons_of, counts_of
from protocol.errors import NotFound
from protocol.usage import Usage
from router.catalog.catalog import AutoRoute, Catalog, ShadowTraffic
from router.complexity.card import ROWS, card_curve
from router.complexity.classifier import Complexity
from router.recalibration import Comparison, Point, calibration_of, curve_of, interval_of
from router.team_score import TeamScore

CALL = Usage(input_tokens=1000, output_tokens=500)  # whose cost the card's curve tells, which knows of none
STEPS = tuple(round(place / 50, 2) for place in range(1, 50))  # qualities that a curve shows


@get(
    "/v1/route/curve",
    guards=[team_or_admin_guard],
    summary="Show what shadow calls say of an automatic route",
    query=("route", "team_id"),
)
async def get_curve(request: AnyRequest) -> Response[bytes]:
    """Show how often the small models of a route sufficed by measurement, what another quality would bring, and which.

    ``route``: its name, or an alias of it; default ``auto``. An admin adds ``team_id``.
    """
    edition, recalibrations = edition_of(request), part_of(request, Recalibrations)
    query, caller = read_parameters(request), principal_of(request)
    team_id = team_in_question(caller, query.get("team_id"))
    asked = query.get("route", "auto")
    name = edition.catalog.meaning(asked)
    catalog = edition.catalog
    if isinstance(caller, Caller):
        catalog = catalog.seen_by(caller.team.allowed_models).seen_by(caller.key_models)
    if (route := edition.catalog.auto.get(name)) is None or name not in catalog.auto:
        raise NotFound(f"There is no route '{asked[:100]}'.", param="route", code="route_not_found")
    async with transaction(request) as connection:
        if isinstance(caller, Admin):
            await get_team(connection, team_id)
        comparisons = await comparisons_of(connection, team_id, name, route, part_of(request, Complexity).version)
        counts, today = await counts_of(connection, team_id, name, part_of(request, Clock))
    shadow = route.shadow
    return answer(
        {
            "object": "route.curve",
            "team_id": team_id,
            "route": name,
            "quality": route.quality,
            "applied_quality": recalibrations.of(team_id).get(name, route.quality),
            "share": 0.0 if shadow is None else shadow.share,
            "explores": shadow is not None and shadow.explore,
            "compared_by": None if shadow is None else _judge_shown(shadow, catalog),
            "budget_usd_per_day": None if shadow is None else to_text(shadow.budget_nanousd),
            "used_usd_today": to_text(today),
            "calls": counts,
            "learned": _learned_shown(recalibrations.learned(team_id).get(name)),
            "regret": regret_view(comparisons),
            **curve_view(comparisons, route.quality),
            "shipped": shipped_view(catalog, catalog.auto[name], part_of(request, Clock).now()),
        }
    )


def _judge_shown(shadow: ShadowTraffic, catalog: Catalog) -> str:
    """Return what compares answers: a model by its name, where the caller's ``catalog`` has it."""
    if shadow.judge is None:
        return "same words"
    return shadow.judge if shadow.judge in catalog.models else "a model"


def _learned_shown(score: object) -> dict[str, Any] | None:
    """Return what the team's own scores rest on, and how much less each comparison surprises who knows form."""
    if not isinstance(score, TeamScore):
        return None
    return {"comparisons": score.learned.comparisons, "gain_nats": round(score.learned.gain, 4)}


def regret_view(comparisons: list[Comparison]) -> dict[str, Any] | None:
    """Return what hindsight says of the compared calls: how often the small model that answered was the worse one, how
    often the large one was not needed, and what that cost more than a small one; shares with 95 % intervals."""
    if not comparisons:
        return None
    worse = [not one.suffices for one in comparisons if not one.is_explored]
    needless = [one.suffices for one in comparisons if one.is_explored]
    more = sum(one.large_nanousd - one.small_nanousd for one in comparisons if one.is_explored and one.suffices)
    return {
        "small_answered": len(worse),
        "small_was_worse": _share_shown(worse),
        "large_answered": len(needless),
        "large_was_needless": _share_shown(needless),
        "needless_usd": to_text(more),
    }


def _share_shown(found: list[bool]) -> dict[str, Any] | None:
    if not found:
        return None
    edges = interval_of(sum(found), len(found))
    return {"share": round(sum(found) / len(found), 4), "interval": [round(edge, 4) for edge in edges]}


def curve_view(comparisons: list[Comparison], quality: float) -> dict[str, Any]:
    """Return what was said and measured, the quality that keeps the chance asked for, and the curve."""
    if not comparisons:
        return {"small_suffices": None, "recalibrated_quality": None, "curve": []}
    calibration = calibration_of(comparisons)
    found = sum(one.suffices for one in comparisons)
    least = math.floor(min(one.score for one in comparisons) * 1e4) / 1e4
    steps = [step for step in STEPS if step >= least]
    return {
        "small_suffices": {
            "said": round(sum(one.score for one in comparisons) / len(comparisons), 4),
            "measured": round(found / len(comparisons), 4),
            "interval": [round(edge, 4) for edge in interval_of(found, len(comparisons))],
        },
        "recalibrated_quality": {
            "value": round(calibration.threshold(quality), 4),
            "interval": [round(calibration.threshold(quality, by), 4) for by in (-1.96, 1.96)],
        },
        "curve": [_point_view(point) for point in curve_of(comparisons, (least, *steps))],
    }


def shipped_view(catalog: Catalog, route: AutoRoute, at: float) -> dict[str, Any]:
    """Return the curve of the shipped model's card: for each quality, the share of calls to the large model and the
    share that was right on rows that no fit has seen, and what ``CALL`` costs at the first models of the route."""
    prices = [
        [cost_of(CALL, catalog.models[name].price, at=at) for name in names[:1]] for names in (route.small, route.large)
    ]
    points = card_curve()
    return {
        "rows": ROWS,
        "call": {"input_tokens": CALL.input_tokens, "output_tokens": CALL.output_tokens},
        "small_right": points[0].share_right,
        "large_right": points[-1].share_right,
        "curve": [
            {
                "quality": point.quality,
                "share_large": point.share_large,
                "share_right": point.share_right,
                "usd_per_call": _mixed(prices, point.share_large),
            }
            for point in points
        ],
    }


def _mixed(prices: Sequence[Sequence[int]], share_large: float) -> Any:
    """Return the cost of a call of which a share is the large model's; None where one of the models may not be used."""
    if not all(prices):
        return None
    [small], [large] = prices
    return to_text(round(small + share_large * (large - small)))


def _point_view(point: Point) -> dict[str, Any]:
    return {
        "quality": point.quality,
        "calls_small": point.small,
        "share_large": round(point.share_large, 4),
        "small_suffices": None if point.suffices is None else round(point.suffices, 4),
        "interval": None if point.low is None or point.high is None else [round(point.low, 4), round(point.high, 4)],
        "usd_per_call": to_text(round(point.nanousd)),
    }
