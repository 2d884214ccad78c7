# What every route shares: what a request brings with it (caller, query, the parts of this process), and how an answer
# is written.

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, TypeVar

from litestar import Request, Response
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.core.clock import Clock
from gateway.core.json_text import to_json
from gateway.core.parts import Parts
from gateway.core.principals import Admin, Caller
from gateway.overload.body_memory import BodyRoom
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from protocol.errors import BadRequest, invalid_value
from protocol.serving.off_loop import HEAVY, off_loop

AnyRequest = Request[Any, Any, Any]

LARGEST_BODY = 32 * 1024 * 1024  # bytes
REASON, LONGEST_REASON = "x-audit-reason", 500  # a header, and characters of it
USUAL_PAGE = 100
LONGEST_PAGE = 1000
OF_METADATA, KEY_OF_METADATA = "metadata[KEY]", re.compile(r"metadata\[(.+)\]")  # how a query says one


T = TypeVar("T")


async def read_body(request: AnyRequest, read: Callable[[bytes], T]) -> tuple[T, int]:
    """Return what ``read`` makes of a request's body, a long one beside the event loop; and the body's bytes."""
    announced = request.content_length
    if announced is not None and not HEAVY < announced <= LARGEST_BODY:  # a longer one is refused unread
        body = await request.body()
        return read(body), len(body)
    pieces, begun = request.stream(), b""
    if announced is None:  # in chunks: most are short all the same
        begun = await _first_of(pieces)
        if len(begun) <= HEAVY:
            return read(begun), len(begun)
    caller = principal_of(request)
    team_id = caller.team.id if isinstance(caller, Caller) else ""
    async with part_of(request, BodyRoom).taken(team_id, announced or LARGEST_BODY):
        body = begun + b"".join([piece async for piece in pieces])
        return await off_loop(len(body), lambda: read(body)), len(body)


async def _first_of(pieces: AsyncIterator[bytes]) -> bytes:
    """Return all of a short body, or as much of a long one as tells that it is."""
    begun = bytearray()
    async for piece in pieces:
        begun += piece
        if len(begun) > HEAVY:
            break
    return bytes(begun)


def part_of(request: AnyRequest, kind: type[T]) -> T:
    """Return the part of this process that is a ``kind``."""
    parts: Parts = request.app.state["parts"]
    return parts.get(kind)


def transaction(request: AnyRequest) -> AbstractAsyncContextManager[AsyncConnection]:
    """Return a transaction in Postgres: a connection inside the block, committed at its end."""
    return part_of(request, Database).begin()


def caller_of(request: AnyRequest) -> Caller:
    """Return the caller of a request to a team's route."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def principal_of(request: AnyRequest) -> Caller | Admin:
    """Return the caller or admin of a request to a route of teams and admins."""
    caller: Caller | Admin = request.scope["state"]["caller"]
    return caller


def admin_of(request: AnyRequest) -> Admin:
    """Return the caller of a request to a route of admins."""
    caller: Admin = request.scope["state"]["caller"]
    return caller


def act_of(request: AnyRequest) -> Act:
    """Return the acting admin, for the audit log."""
    return own_act(request, admin_of(request).actor)


def own_act(request: AnyRequest, actor: str) -> Act:
    """Return what ``actor`` does by a request, for the audit log. Raises BadRequest for a reason that is none."""
    state, reason = request.scope["state"], request.headers.get(REASON)
    if reason is not None and not (reason.isprintable() and len(reason) <= LONGEST_REASON):
        raise invalid_value(REASON, f"is a header of at most {LONGEST_REASON} printable characters")
    return Act(actor, state.get("request_id"), state.get("address"), reason or None)


def own_team(request: AnyRequest, team_id: str, missing: Exception) -> None:
    """Raise ``missing`` where a team's admin asks for what is another team's."""
    if admin_of(request).team_id not in (None, team_id):
        raise missing


def now_of(request: AnyRequest) -> datetime:
    """Return the current time by the gateway's clock."""
    return part_of(request, Clock).moment()


def metadata_of(query: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs of metadata that a query asks for, as ``metadata[KEY]=VALUE``."""
    return {found[1]: query[name] for name in query if (found := KEY_OF_METADATA.fullmatch(name)) is not None}


def read_query(
    request: AnyRequest, usual: int = USUAL_PAGE, most: int = LONGEST_PAGE, repeated: Container[str] = ()
) -> tuple[dict[str, str], int]:
    """Return the query's parameters and the page's length. Raises BadRequest."""
    query = read_parameters(request, repeated)
    return query, read_whole(query["limit"], "limit", 1, most) if "limit" in query else usual


def read_order(query: Mapping[str, str]) -> bool:
    """Return whether a list is asked for with the oldest first, by its ``order``. Raises BadRequest."""
    if query.get("order", "desc") not in ("asc", "desc"):
        raise invalid_value("order", "is asc or desc")
    return query.get("order") == "asc"


def read_parameters(request: AnyRequest, repeated: Container[str] = ()) -> dict[str, str]:
    """Return the query's parameters; each is one of its handler's ``query`` and comes once, but for those ``repeated``.
    Raises BadRequest."""
    known = request.route_handler.opt.get("query", ())
    query: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known and not (OF_METADATA in known and KEY_OF_METADATA.fullmatch(name)):
            raise BadRequest(
                f"Unknown query parameter '{name[:50]}'. Known here: {', '.join(known) or 'none'}.",
                param=name[:50],
                code="unknown_parameter",
            )
        if name in query and name not in repeated:
            raise invalid_value(name, "appears twice. Send it once")
        if not value.isprintable():
            raise invalid_value(name, "holds characters that cannot be shown")
        query[name] = value
    return query


def read_flag(query: Mapping[str, str], name: str, *, usual: bool = False) -> bool:
    """Return whether a query says ``true``; ``usual`` where it says nothing. Raises BadRequest."""
    if query.get(name, "true") not in ("true", "false"):
        raise invalid_value(name, "is true or false")
    return query.get(name) == "true" if name in query else usual


def read_whole(value: str, name: str, least: int, most: int) -> int:
    """Return a whole number from ``least`` to ``most``. Raises BadRequest."""
    if value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most:
        return int(value)
    raise invalid_value(name, f"must be a whole number from {least} to {most}")


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    """Return ``value`` as a JSON answer."""
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


def openai_page(shown: Sequence[Mapping[str, Any]], limit: int, name: str = "id") -> Response[bytes]:
    """Return a page as OpenAI's SDKs go through them, by the ids that its items have under ``name``; ``shown`` may hold
    one more than ``limit``, which tells of a next."""
    page = shown[:limit]
    first, last = (page[0][name], page[-1][name]) if page else (None, None)
    return answer({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(shown) > limit})
