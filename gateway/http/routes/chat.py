# POST /v1/chat/completions and the other inference endpoints: one route for each row of the table in gateway/dialects/.

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from gateway.accounts.guards import team_guard
from gateway.dialects.endpoint import ApiEndpoint
from gateway.dialects.options import Options
from gateway.dialects.table import ENDPOINTS
from gateway.http.exchange import AnyRequest, part_of
from gateway.http.inference_port import inference_of
from gateway.http.inference_requests import read_call
from gateway.http.responses import ReplyResponse
from gateway.stored_responses.memory import ResponseMemory


def route_of(endpoint: ApiEndpoint) -> HTTPRouteHandler:
    """Return the route that answers calls to ``endpoint``."""

    async def answer_call(request: AnyRequest) -> ASGIApp:
        call = await read_call(request, endpoint)
        writer = endpoint.writer_of(call)
        if getattr(call.native, "background", None):
            return inference_of(request).answer_behind(inference_of(request), call, writer)
        before_end = part_of(request, ResponseMemory).before_end(call, writer) if endpoint.has_memory else None
        return ReplyResponse(inference_of(request), call, writer, before_end)

    answer_call.__name__, answer_call.__doc__ = endpoint.operation, endpoint.description
    declare = post(
        endpoint.path,
        guards=[team_guard],
        status_code=200,
        summary=endpoint.summary,
        takes=endpoint.body_type,
        options=Options,
        is_direct=True,
    )
    return declare(answer_call)


handlers = [route_of(endpoint) for endpoint in ENDPOINTS]
