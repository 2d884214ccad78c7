# POST /v1/route: how a call would be routed, without making it. Nothing is held, called or charged.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from typing import Any

from litestar import Response, post
from msgspec import Struct

from billing.core.money import to_text
from billing.core.prices import cost_of
from billing.core.records import OWN_KEY
from gateway.accounts.guards import team_guard
from gateway.calls.call import Call
from gateway.calls.rate_limits import rate_limit_headers
from gateway.dialects.endpoint import ApiEndpoint, Asked
from gateway.dialects.options import Options
from gateway.dialects.table import ENDPOINTS, endpoint_of_body
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, read_body
from gateway.http.inference_requests import call_of, note_model, recalled
from gateway.inference.admission import legs_of
from gateway.inference.route_chooser import RouteChooser
from protocol.decoding import decode_with_extra
from protocol.serving.off_loop import off_loop
from router import Catalog, Route, Tier
from router.catalog.capabilities import needed_capabilities
from router.catalog.targets import HEALTHY, Capability, ComplexityDecision, TargetHealth
from router.prompt_size.prompt_bounds import bound_prompt
from router.ranking import expected_usage
from router.team_score import TeamScore


@post(
    "/v1/route",
    guards=[team_guard],
    status_code=200,
    summary="Explain where a request would go",
    takes=reduce(or_, (endpoint.body_type for endpoint in ENDPOINTS if endpoint.route_field)),
    options=Options,
)
async def explain_route(request: AnyRequest) -> Response[bytes]:
    """Take the body and headers of a chat completion, response, completion, embedding or (``anthropic-version``)
    message, and say which targets it would meet. A body of ``model`` and ``input`` alone is an embedding's.

    What the router would refuse is refused here in the same words; the content policy is not asked. It counts as a
    request, and costs nothing.
    """
    (endpoint, asked), size = await read_body(request, partial(_read, request))
    asked, size = await recalled(request, endpoint, asked, size)
    call = call_of(request, endpoint, asked, size)
    edition = edition_of(request)
    chooser = edition.inference.chooser
    async with edition.inference.admission.counted(call.request_id, call.caller, call.limit_headers) as hold:
        snapshot = chooser.health_snapshot(chooser.health(call.caller.team))
        view = await off_loop(size, lambda: route_view(edition.catalog, call, chooser, snapshot))
    return answer(view, headers=rate_limit_headers(hold))


def _read(request: AnyRequest, body: bytes) -> tuple[ApiEndpoint, Asked]:
    """Return the endpoint that a body is for, and what it asks. Raises BadRequest."""
    _, fields = decode_with_extra(body, _AnyObject)
    endpoint = endpoint_of_body(fields, request.headers)
    return endpoint, endpoint.read(body, partial(note_model, request))


class _AnyObject(Struct):
    """A body whose endpoint is not known yet."""


def route_view(
    catalog: Catalog, call: Call, chooser: RouteChooser, health: Mapping[str, TargetHealth]
) -> dict[str, Any]:
    """Return the decision, what it rests on, every target in order with its costs, and which models were left out."""
    route = chooser.route_of(call, health)
    decision, left_out = route.decision, chooser.left_out(call, route)
    return {
        "object": "route",
        "model": route.asked,
        "model_used": route.targets[0].model.name,
        "reason": route.reason,
        "small_suffices": None if decision is None else decision.score,
        "quality": None if decision is None else decision.quality,
        "learned": None if decision is None else _learned(catalog, call, decision),
        "turns_back": None if decision is None else decision.turns_back,
        "explanation": explanation_of(call, route, catalog),
        "targets": _targets(call, route, health),
        "left_out": [
            {"model": name, "codes": [one.code for one in why], "reasons": [one.words for one in why]}
            for name, why in left_out.items()
        ],
    }


def _learned(catalog: Catalog, call: Call, decision: ComplexityDecision) -> dict[str, Any] | None:
    """Return what the team's own score rests on, where one decided: the shipped score, how sure the team's own is
    (95 %), and how many comparisons it was learned from."""
    score = call.routing.learned.get(catalog.meaning(call.request.model))
    if decision.shipped is None or not isinstance(score, TeamScore):
        return None
    return {
        "shipped": decision.shipped,
        "interval": [round(edge, 4) for edge in score.interval(call.request)],
        "comparisons": score.learned.comparisons,
    }


def explanation_of(call: Call, route: Route, catalog: Catalog) -> str:
    """Return the reason in a sentence; where the models that should answer cannot, another says so."""
    auto = catalog.auto.get(catalog.meaning(route.asked))
    if auto is None:
        return _reason(route)
    if Capability.EMBEDDINGS in needed_capabilities(call.request):
        return "Vectors of different models do not compare, so the first model of the route that embeds answers."
    used, wanted = route.targets[0].model.name, auto.small if route.reason == "auto_small" else auto.large
    kind = "small" if route.reason == "auto_small" else "large"
    return _reason(route) + ("" if used in wanted else f" No {kind} model can be asked now, so '{used}' comes first.")


def _reason(route: Route) -> str:
    used, decision = route.targets[0].model.name, route.decision
    if route.reason == "named":
        return f"'{route.asked}' was named."
    if route.reason == "alias":
        return f"'{route.asked}' is another name of '{used}'."
    if route.reason == "canary":
        return f"This conversation is one of those of '{route.asked}' that try '{used}'."
    if route.reason == "fallback":
        return f"'{route.asked}' cannot be asked now; '{used}' is its fallback."
    if decision is None:
        return "The route has one kind of model that can serve the request, so nothing was judged."
    sides = "reaches" if decision.score >= decision.quality else "is below"
    words = (
        f"The chance that a small model suffices, {decision.score:.3f}, {sides} the quality asked, {decision.quality:g}"
    )
    if decision.shipped is not None:
        words += f" (learned from the team's own compared calls; the shipped score is {decision.shipped:.3f})"
    if decision.turns_back:
        turns = "the turn before it" if decision.turns_back == 1 else f"{decision.turns_back} turns earlier"
        return f"{words}, but not clearly; the thread stays with what was right {turns}."
    return f"{words}."


def _targets(call: Call, route: Route, health: Mapping[str, TargetHealth]) -> list[dict[str, Any]]:
    usage, batch = expected_usage(call.request), call.routing.tier is Tier.BATCH
    shown = []
    legs = legs_of(call, route, bound_prompt(call.request).closely())  # as x-max-cost-usd is compared
    for target, leg in zip(route.targets, legs, strict=True):
        known = health.get(target.key, HEALTHY)
        shown.append(
            {
                "model": target.model.name,
                "provider": target.model.provider,
                "region": target.endpoint.region,
                "is_available": not (known.is_open or known.is_full),
                "first_token_ms": round(known.first_token_ms, 1) or None,
                "expected_cost_usd": to_text(cost_of(usage, target.model.price, batch=batch, at=call.created_at)),
                "most_cost_usd": to_text(leg.cost_nanousd),
                **({} if target.own is None else {"key": OWN_KEY}),
            }
        )
    return shown
