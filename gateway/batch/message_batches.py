# Batches of messages as Anthropic's Message Batches API shows them: the same batches, those of one endpoint, and the
# same items, a result in a line.

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.serializers import cost_view, moment
from gateway.batch.results import ENDED, read_pages
from gateway.batch.shapes import NewBatch
from gateway.batch.store import Batch, get_batch
from gateway.batch.views import ended_at
from gateway.dialects.messages import ENDPOINT
from gateway.storage.database import Database
from gateway.storage.tables import batches, files
from protocol.errors import BadRequest, NotFound

PATH = f"{ENDPOINT.path}/batches"
BODY = "params"  # what a request's body is called here


class NewMessageBatch(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/messages/batches``: requests are ``{"custom_id", "params"}``."""

    requests: list[Raw]


class _Response(Struct, frozen=True):
    body: Raw


_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_RESPONSE = msgspec.json.Decoder(_Response)


def new_batch(new: NewMessageBatch, betas: str | None) -> NewBatch:
    """Return the batch that is asked for; ``betas``, a header's, are each request's."""
    named = [name.strip() for name in (betas or "").split(",") if name.strip()]
    requests = [_with_betas(said, named) for said in new.requests] if named else new.requests
    return NewBatch(requests=requests, endpoint=ENDPOINT.path)


def _with_betas(said: Raw, betas: Sequence[str]) -> Raw:
    """Return a request with betas in its body, unless it names some; one that makes no sense as it is."""
    try:
        fields = _FIELDS.decode(said)
        body = _FIELDS.decode(fields[BODY])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return said
    if "anthropic_beta" in body:
        return said
    plain = bytes(fields[BODY]).rstrip()[:-1].rstrip()
    comma = b"" if plain.endswith(b"{") else b","
    with_betas = plain + comma + b'"anthropic_beta":' + msgspec.json.encode(betas) + b"}"
    return Raw(bytes(said).replace(bytes(fields[BODY]), with_betas, 1))


async def get_message_batch(connection: AsyncConnection, team_id: str, batch_id: str, *, lock: bool = False) -> Batch:
    """Return a team's batch of messages; as ``get_batch``. Raises NotFound."""
    batch = await get_batch(connection, team_id, batch_id, lock=lock)
    if batch.endpoint != ENDPOINT.path:
        words = f"The batch '{batch_id[:100]}' is none of messages: it is shown at /v1/batches."
        raise NotFound(words, param="batch_id", code="batch_not_found")
    return batch


async def delete_batch(connection: AsyncConnection, team_id: str, batch_id: str) -> None:
    """Delete a batch that has ended, with its requests and results, for ever. Raises NotFound, BadRequest."""
    batch = await get_message_batch(connection, team_id, batch_id, lock=True)
    if batch.is_open:
        raise BadRequest(f"The batch '{batch.id}' has not ended. Cancel it first.", param="batch_id")
    made = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    await connection.execute(delete(batches).where(batches.c.id == batch.id))
    await connection.execute(delete(files).where(files.c.id.in_(made)))


def message_batch_view(batch: Batch) -> dict[str, Any]:
    """Return a batch in Anthropic's shape."""
    canceling = batch.status == "cancelling"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "canceling" if canceling else "in_progress" if batch.is_open else "ended",
        "request_counts": _counts(batch),
        "created_at": moment(batch.created_at),
        "expires_at": moment(batch.expires_at),
        "ended_at": moment(ended_at(batch)),
        "cancel_initiated_at": moment(batch.cancelling_at),
        "archived_at": None,
        "results_url": None if batch.is_open else f"{PATH}/{batch.id}/results",
        "usage": {
            "input_tokens": batch.input_tokens,
            "output_tokens": batch.output_tokens,
            **cost_view(batch.cost_nanousd),
        },
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Return how the requests ended; all of them are on their way until the batch has."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.is_open:
        return counts | {"processing": batch.total}
    rest = batch.total - batch.completed - batch.failed
    why = "expired" if batch.expired_at is not None else "canceled"
    return counts | {"succeeded": batch.completed, "errored": batch.failed, why: rest}


async def read_message_results(database: Database, batch_id: str) -> AsyncIterator[bytes]:
    """Yield the lines of a batch's results, many at a time."""
    async for rows in read_pages(database, batch_id, (*ENDED, "cancelled")):
        yield b"".join(map(_line, rows))


def _line(row: Mapping[Any, Any]) -> bytes:
    line = {"custom_id": row["custom_id"], "result": _result(row)}
    return msgspec.json.encode(line) + b"\n"


def _result(row: Mapping[Any, Any]) -> dict[str, Any]:
    match row["status"]:
        case "completed":
            return {"type": "succeeded", "message": _RESPONSE.decode(row["response"]).body}
        case "failed" if row["response"] is not None:
            return {"type": "errored", "error": _RESPONSE.decode(row["response"]).body}
        case "failed":
            told = msgspec.json.decode(row["error"])
            error = {"type": "api_error", "message": told["message"]}
            return {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}
        case "expired":
            return {"type": "expired"}
    return {"type": "canceled"}
