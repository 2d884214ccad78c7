# /v1/files, in OpenAI's shapes: uploads go to Postgres as they arrive, contents come from there as they are read.

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from litestar import Response, delete, get, post
from litestar.params import FromPath
from litestar.response import Stream
from msgspec import Meta, Struct

from gateway.accounts.guards import team_guard
from gateway.batch.file_store import delete_file, get_file, list_files, read_chunks
from gateway.batch.results import ERRORS, OUTPUT, read_results
from gateway.batch.shapes import LARGEST_FILE
from gateway.batch.store import batch_of_output
from gateway.batch.upload import FORM_ROOM, receive_file
from gateway.batch.views import file_view
from gateway.http.current_edition import edition_of
from gateway.http.exchange import (
    LONGEST_PAGE,
    AnyRequest,
    answer,
    openai_page,
    part_of,
    read_order,
    read_query,
    transaction,
)
from gateway.http.routes.batch import JSONL
from gateway.http.routes.stored.counting import counted_team
from gateway.storage.database import Database

LONGEST_LIST = 10_000  # files


class UploadedFile(Struct):
    """The form of an upload, as the API's description shows it; it is read as a stream."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


@post(
    "/v1/files",
    guards=[team_guard],
    status_code=200,
    request_max_body_size=LARGEST_FILE + FORM_ROOM,
    summary="Upload a file",
    takes=UploadedFile,
    body_type="multipart/form-data",
)
async def post_file(request: AnyRequest) -> Response[bytes]:
    """Take a file of requests, as multipart/form-data with ``purpose`` "batch": up to 200 MB of JSON Lines."""
    settings = edition_of(request).settings
    file = await receive_file(
        part_of(request, Database),
        counted_team(request),
        request.headers.get("content-type", ""),
        request.stream(),
        settings.retention.batch_files,
        settings.batch,
    )
    return answer(file_view(file))


@get("/v1/files", guards=[team_guard], summary="List files", query=("purpose", "after", "limit", "order"))
async def get_files(request: AnyRequest) -> Response[bytes]:
    """List the team's files, newest first. ``purpose``, ``after``, ``limit`` and ``order`` as OpenAI has them."""
    query, limit = read_query(request, LONGEST_PAGE, LONGEST_LIST)
    is_rising, team_id = read_order(query), counted_team(request)
    async with transaction(request) as connection:
        found = await list_files(
            connection,
            team_id,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=limit + 1,
            ascending=is_rising,
        )
    return openai_page([file_view(file) for file in found], limit)


@get("/v1/files/{file_id:str}", guards=[team_guard], summary="Show a file")
async def get_one_file(request: AnyRequest, file_id: FromPath[str]) -> Response[bytes]:
    """Show what is known of a file."""
    team_id = counted_team(request)
    async with transaction(request) as connection:
        return answer(file_view(await get_file(connection, team_id, file_id)))


@get("/v1/files/{file_id:str}/content", guards=[team_guard], summary="Read a file")
async def get_content(request: AnyRequest, file_id: FromPath[str]) -> Stream:
    """Stream a file's contents."""
    database, team_id = part_of(request, Database), counted_team(request)
    async with database.begin() as connection:
        file = await get_file(connection, team_id, file_id)
        source = await batch_of_output(connection, file.id) if file.purpose == "batch_output" else None
    contents: AsyncIterator[bytes]
    if source is None:
        contents = read_chunks(database, file.id)
    else:
        contents = read_results(database, source.id, OUTPUT if source.output_file_id == file.id else ERRORS)
    return Stream(contents, media_type=JSONL, headers={"content-disposition": "attachment"})


@delete("/v1/files/{file_id:str}", guards=[team_guard], status_code=200, summary="Delete a file")
async def delete_one_file(request: AnyRequest, file_id: FromPath[str]) -> Response[bytes]:
    """Delete a file with its contents, for ever."""
    team_id = counted_team(request)
    async with transaction(request) as connection:
        await delete_file(connection, team_id, file_id)
    return answer({"id": file_id, "object": "file", "deleted": True})
