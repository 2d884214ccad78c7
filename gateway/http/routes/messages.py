# POST /v1/messages and its count_tokens, in Anthropic's shapes, for any of our models.

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from litestar import Response, post
from litestar.types import ASGIApp

from gateway.accounts.auth import team_guard
from gateway.calls.rate_limits import anthropic_limit_headers, rate_limit_headers
from gateway.dialects.messages import MessagesDialect, check_message
from gateway.dialects.options import Options
from gateway.http.exchange import AnyRequest, caller_of, read_body, services_of
from gateway.http.inference_requests import call_of, note_model
from gateway.http.responses import ReplyResponse
from gateway.inference.admission import counted
from gateway.inference.counting import count_prompt
from protocol.chat import ChatRequest
from protocol.decoding import decode, decode_with_extra
from protocol.messages import CountRequest, MessagesRequest


@post(
    "/v1/messages",
    guards=[team_guard],
    status_code=200,
    summary="Answer a conversation, in Anthropic's shapes",
    takes=MessagesRequest,
    options=Options,
    is_direct=True,
)
async def create_message(request: AnyRequest) -> ASGIApp:
    """Answer the last turn of a conversation, whole or as a stream of events."""
    (asked, chat, extra), size = await read_body(request, partial(read_message, request))
    call = call_of(request, chat, extra, "messages", size, native=asked)
    return ReplyResponse(services_of(request), call, MessagesDialect(asked.model, call.request_id))


@post(
    "/v1/messages/count_tokens",
    guards=[team_guard],
    status_code=200,
    summary="Count the tokens of a conversation",
    takes=CountRequest,
)
async def count_tokens(request: AnyRequest) -> Response[bytes]:
    """Tell how many tokens a conversation has: by Anthropic's own count for its models, about for all others.

    It counts as a request, and costs nothing.
    """
    asked, size = await read_body(request, partial(_read_count, request))
    services, caller = services_of(request), caller_of(request)
    async with counted(services, request.scope["state"]["request_id"], caller, "messages") as hold:
        tokens = await count_prompt(services, caller, asked, size)
    headers = rate_limit_headers(hold) | anthropic_limit_headers(hold, services.clock.now())
    return Response(msgspec.json.encode({"input_tokens": tokens}), headers=headers, media_type="application/json")


def read_message(request: AnyRequest, body: bytes) -> tuple[MessagesRequest, ChatRequest, dict[str, Any]]:
    """Return the message that a body asks for, the same as a chat, and its fields unknown to us. Raises BadRequest."""
    asked, extra = decode_with_extra(body, MessagesRequest)
    note_model(request, asked)
    check_message(asked)
    if asked.top_k is not None:
        extra["top_k"] = asked.top_k  # our own engine knows it; it has no place in a chat completion
    return asked, asked.as_chat(), extra


def _read_count(request: AnyRequest, body: bytes) -> CountRequest:
    asked = decode(body, CountRequest)
    note_model(request, asked)
    check_message(asked)
    return asked


handlers = [create_message, count_tokens]
