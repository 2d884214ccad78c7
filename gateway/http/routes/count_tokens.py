# POST /v1/messages/count_tokens, in Anthropic's shapes, for any of our models.

from __future__ import annotations

from functools import partial

import msgspec
from litestar import Response, post

from gateway.accounts.guards import team_guard
from gateway.core.clock import Clock
from gateway.dialects.messages import ENDPOINT as MESSAGES
from gateway.dialects.messages import with_betas
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, caller_of, part_of, read_body
from gateway.http.inference_requests import note_model
from gateway.http.reply_response import names_of_fields
from protocol.decoding import decode_with_unread
from protocol.messages import CountRequest


@post(
    f"{MESSAGES.path}/count_tokens",
    guards=[team_guard],
    status_code=200,
    summary="Count the tokens of a conversation",
    takes=CountRequest,
)
async def count_tokens(request: AnyRequest) -> Response[bytes]:
    """Tell how many tokens a conversation has: by Anthropic's own count for its models, about for all others.

    It counts as a request, and costs nothing.
    """
    (asked, dropped), size = await read_body(request, partial(_read, request))
    edition, caller = edition_of(request), caller_of(request)
    request_id = request.scope["state"]["request_id"]
    async with edition.inference.admission.counted(request_id, caller, MESSAGES.limit_headers) as hold:
        tokens = await edition.prompt_counter.count(caller, asked, size)
    headers = MESSAGES.limit_headers(hold, part_of(request, Clock).now())
    if dropped:
        headers["x-tollgate-dropped"] = names_of_fields(dropped).decode()
    return Response(msgspec.json.encode({"input_tokens": tokens}), headers=headers, media_type="application/json")


def _read(request: AnyRequest, body: bytes) -> tuple[CountRequest, list[str]]:
    """Return what is asked, and the names of fields that are unknown to us."""
    asked, extra, unread = decode_with_unread(body, CountRequest)
    note_model(request, asked.model)
    MESSAGES.check(asked)
    return with_betas(asked, request.headers.get("anthropic-beta")), [*extra, *unread]
