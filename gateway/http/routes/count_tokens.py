# How many tokens a prompt has, in the shapes of Anthropic's API and of OpenAI's responses, for any of our models: a row
# for each. What is read of a request is its endpoint's; it is no call, and counts against no rate of calls.

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, post
from litestar.handlers import HTTPRouteHandler
from msgspec.structs import replace

from gateway.accounts.guards import team_guard
from gateway.dialects import messages, responses
from gateway.dialects.endpoint import ApiEndpoint
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, caller_of, part_of
from gateway.http.inference_requests import read_call
from gateway.http.reply_response import names_of_fields
from gateway.overload.read_limit import CountLimit
from protocol.messages import CountRequest
from protocol.responses import InputTokensRequest

DESCRIPTION = "Tell how many tokens a prompt has, by its upstream's own count where it has one. It costs nothing."
COUNT_TOKENS = replace(
    messages.ENDPOINT, path=f"{messages.ENDPOINT.path}/count_tokens", operation="count_tokens", body_type=CountRequest
)
INPUT_TOKENS = replace(
    responses.ENDPOINT,
    path=f"{responses.ENDPOINT.path}/input_tokens",
    operation="input_tokens",
    body_type=InputTokensRequest,
    check=responses.check_count,
)


def route_of(endpoint: ApiEndpoint, told: dict[str, Any]) -> HTTPRouteHandler:
    """Return the route that counts the prompts of an endpoint, and answers with the count beside what is ``told``."""

    async def count_prompt(request: AnyRequest) -> Response[bytes]:
        part_of(request, CountLimit).take(caller_of(request).team.id)
        call = await read_call(request, endpoint)
        tokens = await edition_of(request).prompt_counter.count(call)
        dropped = endpoint.names_of([*(name for name in call.extra if name not in call.understood), *call.unread])
        headers = {"x-tollgate-dropped": names_of_fields(dropped).decode()} if dropped else {}
        body = msgspec.json.encode(told | {"input_tokens": tokens})
        return Response(body, headers=headers, media_type="application/json")

    count_prompt.__name__, count_prompt.__doc__ = endpoint.operation, DESCRIPTION
    declare = post(
        endpoint.path, guards=[team_guard], status_code=200, summary="Count a prompt's tokens", takes=endpoint.body_type
    )
    return declare(count_prompt)


handlers = [route_of(COUNT_TOKENS, {}), route_of(INPUT_TOKENS, {"object": "response.input_tokens"})]
