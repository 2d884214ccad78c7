# What came out of a batch, as lines: one for each request, in the order of the input. They are made from the items by
# Postgres, a page at a time, so that neither memory nor disk holds them.

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import TextClause, text

from gateway.storage.database import Database

PAGE = 200  # items in one transaction
PAGE_BYTES = 4 * 1024 * 1024  # of responses in one page, about

OUTPUT = ("completed",)
ERRORS = ("failed", "expired")
ENDED = (*OUTPUT, *ERRORS)

# One line, OpenAI's shape. The id is made from the item's position, so that every read gives the same.
LINE = """(
    '{"id":"batch_req_' || left(encode(sha256(convert_to(batch_id || ':' || position, 'UTF8')), 'hex'), 24)
    || '","custom_id":' || to_json(custom_id) || ',"response":' || coalesce(convert_from(response, 'UTF8'), 'null')
    || ',"error":' || coalesce(convert_from(error, 'UTF8'), 'null') || E'}\\n'
)"""

# As many items as fit into a page by the size of what they hold; at least one.
READ_LINES, READ_PARTS = (
    text(f"""
        SELECT position, {columns}
        FROM (
            SELECT *, sum(coalesce(octet_length(response), 0)) OVER (ORDER BY position)
                      - coalesce(octet_length(response), 0) AS before
            FROM batch_items
            WHERE batch_id = :batch_id AND position > :after AND status = ANY(CAST(:statuses AS text[]))
            ORDER BY position LIMIT :page
        ) AS taken
        WHERE before < :bytes
        ORDER BY position
    """)  # noqa: S608  (the columns are ours)
    for columns in (f"convert_to({LINE}, 'UTF8') AS line", "custom_id, status, response, error")
)


async def read_results(database: Database, batch_id: str, statuses: Sequence[str]) -> AsyncIterator[bytes]:
    """Yield the lines of a batch's items that ended so, many at a time."""
    async for rows in read_pages(database, batch_id, statuses, READ_LINES):
        yield b"".join(bytes(row["line"]) for row in rows)


async def read_pages(
    database: Database, batch_id: str, statuses: Sequence[str], query: TextClause = READ_PARTS
) -> AsyncIterator[Sequence[Mapping[Any, Any]]]:
    """Yield the rows of a batch's items that ended so, a page at a time."""
    page = {"batch_id": batch_id, "after": -1, "statuses": list(statuses), "page": PAGE, "bytes": PAGE_BYTES}
    while True:
        async with database.begin() as connection:
            rows = (await connection.execute(query, page)).mappings().all()
        if not rows:
            return
        page["after"] = rows[-1]["position"]
        yield rows


def response_of(status: int, request_id: str, body: bytes, dropped: Sequence[str] = ()) -> bytes:
    """Return the "response" of a line: the endpoint's answer, and the fields that its upstream was not sent."""
    head: dict[str, Any] = {"status_code": status, "request_id": request_id}
    if dropped:
        head["dropped"] = dropped
    return msgspec.json.encode(head)[:-1] + b',"body":' + body + b"}"


def error_of(code: str, message: str) -> bytes:
    """Return the "error" of a line: why the endpoint was not called, or its call did not complete."""
    told: dict[str, Any] = {"code": code, "message": message}
    return msgspec.json.encode(told)
