# What lies below /v1/responses/{id}: stored responses, read, deleted, and the items that they were asked with.

from __future__ import annotations

from litestar import Response, delete, get, post
from litestar.params import FromPath

from gateway.accounts.guards import team_guard
from gateway.http.exchange import AnyRequest, answer, caller_of, part_of, read_parameters, read_whole
from gateway.stored_responses.memory import ResponseMemory
from gateway.stored_responses.turns import Turn, told_items
from protocol.errors import BadRequest, NotFound, invalid_value

LONGEST_PAGE = 100
USUAL_PAGE = 20


@get(
    "/v1/responses/{response_id:str}",
    guards=[team_guard],
    summary="Read a stored response",
    query=("include", "include[]", "include_obfuscation", "stream", "starting_after"),
)
async def get_response(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """Read a response as it was answered. ``include`` adds nothing: all that is known is there."""
    query = read_parameters(request, repeated=("include", "include[]"))
    if query.get("stream", "false") != "false" or "starting_after" in query:
        raise BadRequest("Only the response itself can be read, not its stream. Leave 'stream' out.", param="stream")
    turn = await _turn_of(request, response_id)
    return Response(bytes(turn.response), media_type="application/json")


@delete("/v1/responses/{response_id:str}", guards=[team_guard], status_code=200, summary="Delete a stored response")
async def delete_response(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """Delete a response with its items, for ever. A conversation that it was a turn of cannot go on."""
    if not await part_of(request, ResponseMemory).store.delete(caller_of(request).team.id, response_id):
        raise _not_found(response_id)
    return answer({"id": response_id, "object": "response", "deleted": True})


@post(
    "/v1/responses/{response_id:str}/cancel", guards=[team_guard], status_code=200, summary="Cancel a stored response"
)
async def cancel_response(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """Refuse: only what runs in the background can be cancelled so. To end another response, close its connection."""
    await _turn_of(request, response_id)
    raise BadRequest("A response that does not run in the background cannot be cancelled: close its connection.")


@get(
    "/v1/responses/{response_id:str}/input_items",
    guards=[team_guard],
    summary="List what a stored response was asked with",
    query=("after", "include", "include[]", "limit", "order"),
)
async def get_input_items(request: AnyRequest, response_id: FromPath[str]) -> Response[bytes]:
    """List the input items of a response, those of the turns before it among them, the latest first unless ``order`` is
    asc."""
    query = read_parameters(request, repeated=("include", "include[]"))
    limit = read_whole(query["limit"], "limit", 1, LONGEST_PAGE) if "limit" in query else USUAL_PAGE
    if query.get("order", "desc") not in ("asc", "desc"):
        raise invalid_value("order", "is asc or desc")
    store = part_of(request, ResponseMemory).store
    chain, _ = await store.conversation(caller_of(request).team.id, response_id)
    if not chain:
        raise _not_found(response_id)
    items = told_items(chain)
    if query.get("order") != "asc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid_value("after", "is the id of an item of this list")
        items = items[places[0] + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > limit
    return answer({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


async def _turn_of(request: AnyRequest, response_id: str) -> Turn:
    """Return a stored turn of the caller's team. Raises NotFound."""
    found = await part_of(request, ResponseMemory).store.find(caller_of(request).team.id, [response_id])
    if response_id not in found:
        raise _not_found(response_id)
    return found[response_id]


def _not_found(response_id: str) -> NotFound:
    return NotFound(
        f"Response with id '{response_id[:80]}' not found: it was not stored here, is past its time, was deleted or is "
        "another team's."
    )
