# /v1/batch, in our own shape, and /v1/batches, in OpenAI's: the same jobs.

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath
from litestar.response import Stream
from msgspec import Raw, Struct
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.guards import operating_guard, reading_guard, team_guard
from gateway.accounts.team_secrets import list_secrets
from gateway.accounts.teams import check_team
from gateway.batch.results import ENDED, read_results
from gateway.batch.retention import check_retained
from gateway.batch.shapes import NewBatch, NewOpenAIBatch
from gateway.batch.store import Batch, cancel_batch, failures_of, find_batch, get_batch, list_batches
from gateway.batch.views import batch_view, openai_view
from gateway.core.clock import Clock
from gateway.http.batch_submission import BatchSubmission
from gateway.http.current_edition import edition_of
from gateway.http.exchange import (
    AnyRequest,
    act_of,
    answer,
    caller_of,
    openai_page,
    part_of,
    read_body,
    read_query,
    transaction,
)
from gateway.http.routes.stored.counting import counted_team
from gateway.storage.database import Database
from protocol.decoding import decode, has_more_values
from protocol.errors import BadRequest, TooLarge, invalid_value

STATUSES = ("validating", "in_progress", "cancelling", "completed", "failed", "expired", "cancelled")
JSONL = "application/jsonl"
UNSIGNED = (
    "The team has no webhook secret to sign the callback with: it waits for one, 24 hours at the most. "
    "An administrator makes it."
)
MOST_VALUES = 2_000_000  # in one submission: 40 for each request


New = TypeVar("New", bound=Struct)  # with requests, a list of Raw


class _Whole(Struct):
    requests: Raw


_WHOLE = msgspec.json.Decoder(_Whole)
_REQUESTS = msgspec.json.Decoder(list[Raw])


def submission_of(request: AnyRequest) -> BatchSubmission:
    """Return what takes batches in, under the settings of now."""
    return BatchSubmission(edition_of(request).settings, part_of(request, Database), part_of(request, Clock))


@post("/v1/batch", guards=[team_guard], status_code=202, summary="Submit a batch", takes=NewBatch)
async def post_batch(request: AnyRequest) -> Response[bytes]:
    """Take up to 50,000 requests to one endpoint, to be answered within 24 hours at batch prices."""
    new, _ = await read_body(request, decode_batch)
    caller, is_signed = caller_of(request), True
    if new.callback_url is not None:  # looked at first: no fault may hide a batch that was taken
        async with transaction(request) as connection:
            is_signed = bool(await list_secrets(connection, caller.team.id))
    view = batch_view(await submission_of(request).submit(caller, new))
    if not is_signed:
        view.setdefault("warning", UNSIGNED)
    return answer(view, 202)


def decode_batch(body: bytes) -> NewBatch:
    """Decode a batch in our own shape."""
    return decode_requests(body, NewBatch)


def decode_requests(body: bytes, kind: type[New]) -> New:
    """Decode a batch without looking into its requests: they are many, and each is looked at by itself."""
    if has_more_values(body, MOST_VALUES):
        raise TooLarge("The body holds more values than fit into one submission. Send it as a file, or in parts.")
    try:
        requests = _WHOLE.decode(body).requests
        each = _REQUESTS.decode(requests)
    except (msgspec.DecodeError, RecursionError):
        decode(body, kind)  # raises with our message
        raise BadRequest("The body is not valid JSON.", code="invalid_json") from None
    return replace(decode(body.replace(bytes(requests), b"[]", 1), kind), requests=each)


@get("/v1/batch", guards=[team_guard], summary="List batches", query=("after", "limit"))
async def get_batches(request: AnyRequest) -> Response[bytes]:
    """List the team's batches, newest first. ``after``: the last id of the page before; ``limit``: at most 1000."""
    return await _list(request, batch_view, "batch_id")


@get("/v1/batch/{batch_id:str}", guards=[team_guard], summary="Show a batch")
async def get_one_batch(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Show how far a batch is, its cost so far and when it will be done; once it has ended, its failures by code."""
    team_id = counted_team(request)
    async with transaction(request) as connection:
        return answer(await _view_with_failures(connection, await get_batch(connection, team_id, batch_id)))


@get("/v1/batch/{batch_id:str}/results", guards=[team_guard], summary="Read a batch's results")
async def get_results(request: AnyRequest, batch_id: FromPath[str]) -> Stream:
    """Stream what is there so far as JSON Lines, in the order of the requests: answers and errors alike.

    410 once they, or a part of them, have been erased.
    """
    database, keep = part_of(request, Database), edition_of(request).settings.retention.batch_files
    team_id = counted_team(request)
    async with database.begin() as connection:
        batch = await get_batch(connection, team_id, batch_id)
        await check_retained(connection, part_of(request, Clock), batch, keep)
    return Stream(read_results(database, batch.id, ENDED), media_type=JSONL)


@post("/v1/batch/{batch_id:str}/cancel", guards=[team_guard], status_code=200, summary="Cancel a batch")
async def post_cancel(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Start nothing more of a batch; what runs comes to its end and is kept."""
    return await _cancel(request, batch_id, batch_view)


@post("/v1/batches", guards=[team_guard], status_code=200, summary="Create a batch of a file", takes=NewOpenAIBatch)
async def post_openai_batch(request: AnyRequest) -> Response[bytes]:
    """Take the requests of an uploaded file, OpenAI's way."""
    new, _ = await read_body(request, lambda body: decode(body, NewOpenAIBatch))
    return answer(openai_view(await submission_of(request).submit_file(caller_of(request), new)))


@get("/v1/batches", guards=[team_guard], summary="List batches, OpenAI's way", query=("after", "limit"))
async def get_openai_batches(request: AnyRequest) -> Response[bytes]:
    """List the team's batches, newest first."""
    return await _list(request, openai_view, "id")


@get("/v1/batches/{batch_id:str}", guards=[team_guard], summary="Show a batch, OpenAI's way")
async def get_openai_batch(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Show a batch."""
    return await _show(request, batch_id, openai_view)


@post("/v1/batches/{batch_id:str}/cancel", guards=[team_guard], status_code=200, summary="Cancel a batch, OpenAI's way")
async def post_openai_cancel(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Start nothing more of a batch."""
    return await _cancel(request, batch_id, openai_view)


@get(
    "/admin/batches",
    guards=[reading_guard],
    summary="List the batches of all teams",
    query=("team_id", "status", "after", "limit"),
)
async def get_batches_of_all(request: AnyRequest) -> Response[bytes]:
    """List batches of all teams, or of ``team_id``, newest first, also by ``status`` (OpenAI's words)."""
    query, limit = read_query(request)
    team_id, status = query.get("team_id"), query.get("status")
    if status is not None and status not in STATUSES:
        raise invalid_value("status", f"is one of {', '.join(STATUSES)}")
    async with transaction(request) as connection:
        await check_team(connection, team_id)
        found = await list_batches(connection, team_id, after=query.get("after"), limit=limit + 1, status=status)
    return openai_page([{"team_id": batch.team_id, **batch_view(batch)} for batch in found], limit, "batch_id")


@get("/admin/batches/{batch_id:str}", guards=[reading_guard], summary="Show a batch of any team")
async def get_batch_of_any(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Show how far a batch is, and whose it is; once it has ended, its failures by code."""
    async with transaction(request) as connection:
        batch = await find_batch(connection, batch_id)
        return answer({"team_id": batch.team_id, **await _view_with_failures(connection, batch)})


@post(
    "/admin/batches/{batch_id:str}/cancel", guards=[operating_guard], status_code=200, summary="Cancel any team's batch"
)
async def post_cancel_of_any(request: AnyRequest, batch_id: FromPath[str]) -> Response[bytes]:
    """Start nothing more of a batch; what runs comes to its end and is kept. The audit log tells who did it."""
    keep = edition_of(request).settings.retention.batch_files
    async with transaction(request) as connection:
        team_id = (await find_batch(connection, batch_id)).team_id
        batch = await cancel_batch(connection, part_of(request, Clock), team_id, batch_id, keep, act_of(request))
    return answer({"team_id": batch.team_id, **batch_view(batch)})


async def _view_with_failures(connection: AsyncConnection, batch: Batch) -> dict[str, Any]:
    return {**batch_view(batch), "failures": await failures_of(connection, batch)}


async def _show(request: AnyRequest, batch_id: str, view: Any) -> Response[bytes]:
    team_id = counted_team(request)
    async with transaction(request) as connection:
        return answer(view(await get_batch(connection, team_id, batch_id)))


async def _list(request: AnyRequest, view: Any, name: str) -> Response[bytes]:
    (query, limit), team_id = read_query(request), counted_team(request)
    async with transaction(request) as connection:
        found = await list_batches(connection, team_id, after=query.get("after"), limit=limit + 1)
    return openai_page([view(batch) for batch in found], limit, name)


async def _cancel(request: AnyRequest, batch_id: str, view: Any) -> Response[bytes]:
    keep, team_id = edition_of(request).settings.retention.batch_files, counted_team(request)
    async with transaction(request) as connection:
        batch = await cancel_batch(connection, part_of(request, Clock), team_id, batch_id, keep)
    return answer(view(batch))
