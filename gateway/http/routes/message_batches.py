# /v1/messages/batches: batches of messages in the shapes of Anthropic's Message Batches API. The jobs are those of
# /v1/batch.

from __future__ import annotations

from functools import partial

from litestar import Response, delete, get, post
from litestar.params import FromPath
from litestar.response import Stream

from gateway.accounts.guards import team_guard
from gateway.batch.message_batches import (
    BODY,
    PATH,
    NewMessageBatch,
    delete_batch,
    get_message_batch,
    message_batch_view,
    new_batch,
    read_message_results,
)
from gateway.batch.retention import check_retained
from gateway.batch.store import cancel_batch, list_batches
from gateway.core.clock import Clock
from gateway.dialects.messages import ENDPOINT
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, answer, caller_of, part_of, read_body, read_query, transaction
from gateway.http.routes.batch import decode_requests, submission_of
from gateway.http.routes.stored.counting import counted_team
from gateway.storage.database import Database
from protocol.errors import BadRequest

JSONL = "application/x-jsonl"
USUAL_PAGE = 20
BETA = ("beta",)  # what Anthropic's packages say of a beta in the query; it means nothing


@post(PATH, guards=[team_guard], status_code=200, summary="Create a batch of messages", takes=NewMessageBatch)
async def post_message_batch(request: AnyRequest) -> Response[bytes]:
    """Take up to 50,000 requests for messages, to be answered within 24 hours."""
    new, _ = await read_body(request, partial(decode_requests, kind=NewMessageBatch))
    asked = new_batch(new, request.headers.get("anthropic-beta"))
    batch = await submission_of(request).submit(caller_of(request), asked, BODY)
    return answer(message_batch_view(batch))


@get(PATH, guards=[team_guard], summary="List batches of messages", query=("after_id", "before_id", "limit", *BETA))
async def get_message_batches(request: AnyRequest) -> Response[bytes]:
    """List the team's batches of messages, newest first. ``after_id``, ``before_id``: the last id of the page before,
    or the first of the page after; ``limit``: at most 1000."""
    query, limit = read_query(request, USUAL_PAGE)
    if "after_id" in query and "before_id" in query:
        raise BadRequest("A page is after one batch or before one. Send 'after_id' or 'before_id'.", param="before_id")
    ends = {"after": query.get("after_id"), "before": query.get("before_id")}
    team_id = counted_team(request)
    async with transaction(request) as connection:
        found = await list_batches(connection, team_id, limit=limit + 1, endpoint=ENDPOINT.path, **ends)
    page = found[-limit:] if ends["before"] is not None else found[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    shown = [message_batch_view(batch) for batch in page]
    return answer({"data": shown, "first_id": first, "last_id": last, "has_more": len(found) > limit})


@get(f"{PATH}/{{batch_id:str}}", guards=[team_guard], summary="Show a batch of messages", query=BETA)
async def get_one_message_batch(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Show how far a batch is."""
    team_id = counted_team(request)
    async with transaction(request) as connection:
        return answer(message_batch_view(await get_message_batch(connection, team_id, batch_id)))


@get(f"{PATH}/{{batch_id:str}}/results", guards=[team_guard], summary="Read a message batch's results", query=BETA)
async def get_message_results(request: AnyRequest, batch_id: FromPath[str]) -> Stream:
    """Stream the results of a batch that has ended as JSON Lines. 410 once they have been erased."""
    database = part_of(request, Database)
    keep, team_id = edition_of(request).settings.retention.batch_files, counted_team(request)
    async with database.begin() as connection:
        batch = await get_message_batch(connection, team_id, batch_id)
        if batch.is_open:
            raise BadRequest(f"The batch '{batch.id}' has not ended: it has no results yet.", param="batch_id")
        await check_retained(connection, part_of(request, Clock), batch, keep)
    return Stream(read_message_results(database, batch.id), media_type=JSONL)


@post(f"{PATH}/{{batch_id:str}}/cancel", guards=[team_guard], status_code=200, summary="Cancel a batch of messages")
async def cancel_message_batch(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Start nothing more of a batch; what runs comes to its end and is kept."""
    keep, team_id = edition_of(request).settings.retention.batch_files, counted_team(request)
    async with transaction(request) as connection:
        await get_message_batch(connection, team_id, batch_id)
        batch = await cancel_batch(connection, part_of(request, Clock), team_id, batch_id, keep)
    return answer(message_batch_view(batch))


@delete(f"{PATH}/{{batch_id:str}}", guards=[team_guard], status_code=200, summary="Delete a batch of messages")
async def delete_message_batch(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Delete a batch that has ended, with its requests and results, for ever."""
    team_id = counted_team(request)
    async with transaction(request) as connection:
        await delete_batch(connection, team_id, batch_id)
    return answer({"id": batch_id, "type": "message_batch_deleted"})
