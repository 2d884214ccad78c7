# What lies below /v1/responses/{id}: stored responses, read, deleted, and the items that they were asked with.

from __future__ import annotations

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from gateway.accounts.guards import team_guard
from gateway.core.errors import UpgradeRequired
from gateway.core.json_text import to_json
from gateway.dialects.responses import ENDPOINT
from gateway.http.background_response import ListenResponse
from gateway.http.exchange import (
    AnyRequest,
    answer,
    caller_of,
    part_of,
    read_flag,
    read_order,
    read_parameters,
    read_query,
    read_whole,
)
from gateway.http.inference_port import inference_of
from gateway.http.routes.stored.counting import counted_team
from gateway.http.websocket.protocol import SOCKET
from gateway.http.websocket.session import ResponseSession
from gateway.stored_responses.background import BackgroundResponses
from gateway.stored_responses.memory import ResponseMemory
from gateway.stored_responses.store import Chain
from gateway.stored_responses.turns import Turn, told_items
from protocol.errors import BadRequest, NotFound, invalid_value
from protocol.serving.off_loop import HUGE, off_loop

LONGEST_PAGE = 100
USUAL_PAGE = 20


@get(ENDPOINT.path, guards=[team_guard], summary="Answer responses over a WebSocket")
async def open_responses(request: AnyRequest) -> Response[bytes]:
    """Open a WebSocket (``upgrade: websocket``), over which ``response.create`` asks for one response after the
    other."""
    extensions: Any = request.scope.get("extensions")
    session: ResponseSession | None = extensions.get(SOCKET) if extensions else None
    if session is None:
        raise UpgradeRequired("GET opens a WebSocket: send 'upgrade: websocket'. To ask for one response, POST it.")
    if "idempotency-key" in request.headers:
        words = "An Idempotency-Key is for one response: send it as 'idempotency_key' in a 'response.create'."
        raise BadRequest(words, param="Idempotency-Key")
    session.begin(caller_of(request))
    return answer({})


@get(
    "/v1/responses/{response_id:str}",
    guards=[team_guard],
    summary="Read a stored response",
    query=("include", "include[]", "include_obfuscation", "stream", "starting_after"),
)
async def get_response(request: AnyRequest, response_id: FromPath[str]) -> ASGIApp:
    """Read a response as it was answered, or as far as it is in the background. ``include`` adds nothing: all that is
    known is there. ``stream`` gives the events of one that runs in the background, or did, after ``starting_after``.
    """
    query = read_parameters(request, repeated=("include", "include[]"))
    is_stream = read_flag(query, "stream")
    after = read_whole(query["starting_after"], "starting_after", 0, 2**31) if "starting_after" in query else -1
    if "starting_after" in query and not is_stream:
        raise BadRequest("'starting_after' needs 'stream=true'.", param="starting_after")
    backgrounds, team_id = part_of(request, BackgroundResponses), counted_team(request, "responses")
    turn = await _turn_of(request, team_id, response_id)
    if is_stream:
        if not turn.ran_behind():
            words = "Only a response in the background has a stream to be read: leave 'stream' out."
            raise BadRequest(words, param="stream")
        backgrounds.refuse_listener(team_id)
        return ListenResponse(backgrounds, inference_of(request).keep_alive, team_id, response_id, after)
    turn = await backgrounds.settled(team_id, response_id, turn)
    return ASGIResponse(body=bytes(turn.response), media_type="application/json")


@delete("/v1/responses/{response_id:str}", guards=[team_guard], status_code=200, summary="Delete a stored response")
async def delete_response(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """Delete a response with its items, for ever, and end it should it run in the background. A conversation that it
    was a turn of cannot go on."""
    if not await part_of(request, BackgroundResponses).delete(counted_team(request, "responses"), response_id):
        raise _not_found(response_id)
    return answer({"id": response_id, "object": "response", "deleted": True})


@post(
    "/v1/responses/{response_id:str}/cancel", guards=[team_guard], status_code=200, summary="Cancel a stored response"
)
async def cancel_response(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """End a response that runs in the background, and return it as it is then. To end another one, close its
    connection."""
    team_id = counted_team(request, "responses")
    turn = await _turn_of(request, team_id, response_id)
    turn = await part_of(request, BackgroundResponses).cancel(team_id, response_id, turn)
    return Response(bytes(turn.response), media_type="application/json")


@get(
    "/v1/responses/{response_id:str}/input_items",
    guards=[team_guard],
    summary="List what a stored response was asked with",
    query=("after", "include", "include[]", "limit", "order"),
)
async def get_input_items(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """List the input items of a response, those of the turns before it among them, the latest first unless ``order`` is
    asc."""
    query, limit = read_query(request, USUAL_PAGE, LONGEST_PAGE, repeated=("include", "include[]"))
    rising, after = read_order(query), query.get("after")
    store = part_of(request, ResponseMemory).store
    chain, _ = await store.conversation(counted_team(request, "responses"), response_id)
    if not chain:
        raise _not_found(response_id)
    page = await off_loop(HUGE, lambda: _page(chain, rising, after, limit))  # its turns may be long
    return Response(page, media_type="application/json")


def _page(chain: Chain, is_rising: bool, after: str | None, limit: int) -> bytes:
    """Return the input items of the last of some turns as a list of OpenAI's form. Raises BadRequest."""
    items = told_items(chain)
    if not is_rising:
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid_value("after", "is the id of an item of this list")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    told = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
    return to_json(told)


async def _turn_of(request: AnyRequest, team_id: str, response_id: str) -> Turn:
    """Return a stored turn of the caller's team. Raises NotFound."""
    found = await part_of(request, ResponseMemory).store.find(team_id, [response_id])
    if response_id not in found:
        raise _not_found(response_id)
    return found[response_id]


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"Response with id '{response_id[:80]}' not found: it was not stored here, is past its time, was deleted or is "
        "another team's."
    )
