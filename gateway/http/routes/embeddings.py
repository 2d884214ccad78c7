# POST /v1/embeddings, in OpenAI's shapes.

from __future__ import annotations

from litestar import post
from litestar.types import ASGIApp

from gateway.accounts.auth import team_guard
from gateway.dialects.embeddings import EmbeddingDialect, check_embeddings
from gateway.dialects.options import Options
from gateway.http.exchange import AnyRequest, services_of
from gateway.http.inference_requests import read_call
from gateway.http.responses import ReplyResponse
from protocol.embeddings import EmbeddingRequest


@post(
    "/v1/embeddings",
    guards=[team_guard],
    status_code=200,
    summary="Turn texts into vectors",
    takes=EmbeddingRequest,
    options=Options,
    is_direct=True,
)
async def create_embeddings(request: AnyRequest) -> ASGIApp:
    """Return one vector for each input, as floats or as base64 of little-endian float32."""
    call = await read_call(request, EmbeddingRequest, check_embeddings, "embeddings")
    assert isinstance(call.request, EmbeddingRequest)
    is_base64 = call.request.encoding_format == "base64"
    return ReplyResponse(services_of(request), call, EmbeddingDialect(call.request.model, is_base64))


handlers = [create_embeddings]
