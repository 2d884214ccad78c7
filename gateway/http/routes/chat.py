# POST /v1/chat/completions, in OpenAI's shapes.

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from gateway.accounts.auth import team_guard
from gateway.dialects.chat import ChatDialect, check_chat
from gateway.dialects.options import Options
from gateway.http.exchange import AnyRequest, services_of
from gateway.http.inference_requests import read_call
from gateway.http.responses import ReplyResponse
from protocol.chat import ChatRequest


@post(
    "/v1/chat/completions",
    guards=[team_guard],
    status_code=200,
    summary="Answer a conversation",
    takes=ChatRequest,
    options=Options,
    is_direct=True,
)
async def create_chat_completion(request: AnyRequest) -> ASGIApp:
    """Answer the last turn of a conversation, whole or as a stream of chunks."""
    call = await read_call(request, ChatRequest, check_chat, "chat.completions")
    assert isinstance(call.request, ChatRequest)
    return ReplyResponse(services_of(request), call, ChatDialect(call.request, call.request_id, int(call.created_at)))


handlers = [create_chat_completion]
