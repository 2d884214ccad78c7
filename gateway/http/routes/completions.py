# POST /v1/completions, in OpenAI's shapes.

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from gateway.accounts.auth import team_guard
from gateway.dialects.completions import CompletionDialect, check_completion
from gateway.dialects.options import Options
from gateway.http.exchange import AnyRequest, services_of
from gateway.http.inference_requests import read_call
from gateway.http.responses import ReplyResponse
from protocol.completions import CompletionRequest


@post(
    "/v1/completions",
    guards=[team_guard],
    status_code=200,
    summary="Complete a text",
    takes=CompletionRequest,
    options=Options,
    is_direct=True,
)
async def create_completion(request: AnyRequest) -> ASGIApp:
    """Go on from a prompt, whole or as a stream of chunks."""
    call = await read_call(request, CompletionRequest, check_completion, "completions")
    assert isinstance(call.request, CompletionRequest)
    dialect = CompletionDialect(call.request, call.request_id, int(call.created_at))
    return ReplyResponse(services_of(request), call, dialect)


handlers = [create_completion]
