# POST /v1/chat/completions and the other inference endpoints: one route for each row of the table in gateway/dialects/.

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from gateway.accounts.auth import team_guard
from gateway.dialects.endpoint import ApiEndpoint
from gateway.dialects.options import Options
from gateway.dialects.table import ENDPOINTS
from gateway.http.exchange import AnyRequest
from gateway.http.inference_port import inference_of
from gateway.http.inference_requests import read_call
from gateway.http.responses import ReplyResponse


def route_of(endpoint: ApiEndpoint) -> HTTPRouteHandler:
    """Return the route that answers calls to ``endpoint``."""

    async def answer_call(request: AnyRequest) -> ASGIApp:
        call = await read_call(request, endpoint)
        return ReplyResponse(inference_of(request), call, endpoint.writer_of(call))

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
