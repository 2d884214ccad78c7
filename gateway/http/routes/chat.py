# POST /v1/chat/completions and the other inference endpoints: one route for each row of the table in gateway/dialects/
# whose bodies are JSON.

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec.structs import replace

from gateway.accounts.guards import team_guard
from gateway.calls.call import Call
from gateway.dialects.chat import ChatWriter
from gateway.dialects.endpoint import ApiEndpoint, ReplyWriter
from gateway.dialects.options import Options
from gateway.dialects.table import ENDPOINTS
from gateway.http.exchange import AnyRequest, part_of
from gateway.http.inference_port import inference_of
from gateway.http.inference_requests import read_call, turns_of
from gateway.http.reply_response import ReplyResponse, WarmUp
from gateway.stored_responses.memory import ResponseMemory


def route_of(endpoint: ApiEndpoint) -> HTTPRouteHandler:
    """Return the route that answers calls to ``endpoint``."""

    async def answer_call(request: AnyRequest) -> ASGIApp:
        call = await read_call(request, endpoint)
        writer = endpoint.writer_of(call)
        if endpoint.has_memory:
            return _remembered(request, call, writer)
        if getattr(call.request, "store", None):
            return _stored(request, call, writer)
        return ReplyResponse(inference_of(request), call, writer)

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


def _stored(request: AnyRequest, call: Call, writer: ReplyWriter) -> ASGIApp:
    """Return what answers a chat that is to be stored; where none is, the answer tells so."""
    assert isinstance(writer, ChatWriter)
    before_end = part_of(request, ResponseMemory).before_end_of_chat(call, writer)
    if before_end is None:
        call = replace(call, extra={**call.extra, "store": True})
    return ReplyResponse(inference_of(request), call, writer, before_end)


def _remembered(request: AnyRequest, call: Call, writer: ReplyWriter) -> ASGIApp:
    """Return what answers a call whose answer may be gone on from: in the background, or over a WebSocket."""
    inference, local = inference_of(request), turns_of(request)
    if local is not None and local.is_warm_up:
        return WarmUp(inference, call, writer)
    if getattr(call.native, "background", None):
        return inference.answer_behind(inference, call, writer)
    return ReplyResponse(inference, call, writer, part_of(request, ResponseMemory).before_end(call, writer, local))


handlers = [route_of(endpoint) for endpoint in ENDPOINTS if not endpoint.files]
