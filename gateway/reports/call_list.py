# Calls one by one, newest first, as teams and operators look at them: rows of the ledger, and refused calls among them,
# which have no row and cost nothing. A page reads a bounded part of the ledger, however large it is.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Select, Table, delete, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import least_id, uuid_of
from billing.core.ids import moment_of as milliseconds_of
from billing.core.prices import Price, cost_lines
from billing.core.records import CHARGED, OWN_KEY, REQUESTS, TOKENS, Status
from billing.ledger.ledger import find_row
from billing.ledger.tables import price_editions, usage_records
from gateway.accounts.serializers import cost_view, dollars, moment
from gateway.reports.advice import ADVICE
from gateway.reports.call_filter import REFUSED, CallFilter
from gateway.storage.tables import audit_log, refused_calls
from protocol.errors import NotFound
from protocol.usage import Usage

# Rows that a page looks at where calls are chosen by what no index has; the next page goes on from there.
SCANNED = 10_000
KEEP_REFUSED = 7 * 86_400.0  # seconds
CLOCKS, WRITTEN_WITHIN = timedelta(minutes=1), timedelta(minutes=10)  # of the audit log, before and after a call
TIMES = ("queue_ms", "first_token_ms", "prefill_ms", "decode_ms", "total_ms")
PROCESS_LOST = "process_lost"
LOST = "The process that ran the call ended before it: it was killed, or its machine was lost. It may be made again."
SHOWN = (
    *("team_id", "key_id", "endpoint", "model_asked", "model_used", "provider", "tier", "priority", "route_reason"),
    *TOKENS,
    *("first_token_ms", "total_ms", "user_tag", "metadata", "client_request_id"),
)


async def list_calls(connection: AsyncConnection, wanted: CallFilter) -> dict[str, Any]:
    """Return a page: ``data``, and ``next``, which is null at the end. A page may be short though others follow."""
    booked, end = await _booked(connection, wanted)
    codes = await _codes(connection, booked)
    found = {row["request_id"]: _row_view(row, codes.get(row["request_id"])) for row in booked}
    if wanted.status in (None, REFUSED):
        refused = await _refused(connection, wanted, end)
        found = {row["request_id"]: _refused_view(row) for row in refused} | found
    newest = sorted(found, reverse=True)
    page = newest[: wanted.limit]
    if len(newest) > wanted.limit:
        end = page[-1]
    return {"object": "list", "data": [found[each] for each in page], "next": None if end is None else str(end)}


async def show_call(connection: AsyncConnection, request_id: str, team_id: str | None = None) -> dict[str, Any]:
    """Return all that is known of one call of that team, or of any. Raises NotFound."""
    row = await find_row(connection, request_id)
    key = uuid_of(request_id)
    refused = None
    if key is not None:
        query = select(refused_calls).where(refused_calls.c.request_id == key)
        refused = (await connection.execute(query)).mappings().one_or_none()
    if row is not None and team_id in (None, row["team_id"]):
        view = _row_view(row, None if refused is None else refused["code"])
        told = {"message": LOST} if view["code"] == PROCESS_LOST else {"advice": ADVICE.get(view["code"] or "")}
        return view | told | await _details(connection, row)
    if row is None and refused is not None and team_id in (None, refused["team_id"]):
        return _refused_view(refused)
    raise NotFound(
        f"There is no call '{request_id[:100]}'. A call shows within 2 seconds of its end, by the x-request-id of its "
        "answer.",
        param="request_id",
        code="call_not_found",
    )


async def purge_refused(connection: AsyncConnection, now: float) -> None:
    """Delete a part of the refused calls that are older than a week."""
    old = select(refused_calls.c.request_id).where(refused_calls.c.request_id < least_id(now - KEEP_REFUSED))
    await connection.execute(delete(refused_calls).where(refused_calls.c.request_id.in_(old.limit(5000))))


async def _booked(connection: AsyncConnection, wanted: CallFilter) -> tuple[list[Mapping[Any, Any]], UUID | None]:
    """Return rows of the ledger, one more than the page holds; and where the next page begins, if they were too many
    to look at all."""
    if wanted.status == REFUSED:
        return [], None
    rows, first, last = usage_records.c, *wanted.days
    query: Select[Any] = select(usage_records).where(rows.day.between(first, last), *_span(usage_records, wanted))
    # The order of ids is that of days; each is in the order of an index.
    query = query.order_by(*(() if wanted.team_id else (rows.day.desc(),)), rows.request_id.desc())
    if wanted.is_plain:
        found = (await connection.execute(query.limit(wanted.limit + 1))).mappings().all()
        return list(found), None
    seen = query.limit(SCANNED).subquery()
    fitting = select(seen).where(*_chosen(seen.c, wanted)).order_by(seen.c.request_id.desc()).limit(wanted.limit + 1)
    found = (await connection.execute(fitting)).mappings().all()
    if len(found) > wanted.limit:
        return list(found), None
    end = (await connection.execute(query.with_only_columns(rows.request_id).offset(SCANNED - 1).limit(1))).scalar()
    return list(found), end


async def _codes(connection: AsyncConnection, booked: Sequence[Mapping[Any, Any]]) -> dict[UUID, str]:
    """Return what the callers of booked calls that did not end well were told."""
    ids = [row["request_id"] for row in booked if row["status"] not in REQUESTS]
    if not ids:
        return {}
    query = select(refused_calls.c.request_id, refused_calls.c.code).where(refused_calls.c.request_id.in_(ids))
    return {row.request_id: row.code for row in await connection.execute(query)}


async def _refused(connection: AsyncConnection, wanted: CallFilter, end: UUID | None) -> list[Mapping[Any, Any]]:
    """Return refused calls, one more than the page holds, none below ``end``; beside booked ones, those too that have a
    row, for they failed."""
    if any((wanted.route_reason, wanted.user, wanted.metadata, wanted.least_nanousd, wanted.least_ms)):
        return []
    rows = refused_calls.c
    query = select(refused_calls).where(*_span(refused_calls, wanted))
    if wanted.key_id is not None:
        query = query.where(rows.key_id == wanted.key_id)
    if wanted.model is not None:
        query = query.where(rows.model_asked == wanted.model)
    if end is not None:
        query = query.where(rows.request_id >= end)
    if wanted.status == REFUSED:
        row, (first, last) = usage_records.c, wanted.days
        booked = exists().where(row.day.between(first, last), row.request_id == rows.request_id)
        query = query.where(~booked)
    return list((await connection.execute(query.order_by(rows.request_id.desc()).limit(wanted.limit + 1))).mappings())


def _span(table: Table, wanted: CallFilter) -> list[ColumnElement[bool]]:
    within = [table.c.request_id >= wanted.since, table.c.request_id < wanted.until]
    return within if wanted.team_id is None else [table.c.team_id == wanted.team_id, *within]


def _chosen(rows: Any, wanted: CallFilter) -> list[ColumnElement[bool]]:
    """Return what the rows of a page have to be."""
    equal = {"key_id": wanted.key_id, "status": wanted.status}
    equal |= {"route_reason": wanted.route_reason, "user_tag": wanted.user}
    chosen = [rows[name] == value for name, value in equal.items() if value is not None]
    if wanted.model is not None:
        chosen.append(or_(rows.model_used == wanted.model, rows.model_asked == wanted.model))
    if wanted.metadata is not None:
        key, value = wanted.metadata
        chosen.append(rows.metadata[key].astext == value)
    if wanted.least_nanousd:
        chosen.append(rows.cost_nanousd >= wanted.least_nanousd)
    if wanted.least_ms:
        chosen.append(rows.total_ms >= wanted.least_ms)
    return chosen


def _row_view(row: Mapping[Any, Any], code: str | None) -> dict[str, Any]:
    request_id, created_at = str(row["request_id"]), moment(row["created_at"])
    # A process that closes a call says how long it took; what one leaves open has no time, and no attempt.
    is_lost = row["status"] in (Status.FAILED, Status.INTERRUPTED) and not (row["attempts"] or row["total_ms"])
    if code is None and is_lost:
        code = PROCESS_LOST
    head = {"object": "call", "request_id": request_id, "created_at": created_at, "status": row["status"], "code": code}
    own = {"key": OWN_KEY} if (row["attempts"] or [{}])[-1].get("key") == OWN_KEY else {}
    return head | cost_view(row["cost_nanousd"]) | {name: row[name] for name in SHOWN} | own


def _refused_view(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a call that was not let in: why, and what would have been right, the message's part that quotes nothing
    and the advice of its code."""
    request_id = str(row["request_id"])
    made = datetime.fromtimestamp(milliseconds_of(request_id) / 1000, UTC)
    head = {"object": "call", "request_id": request_id, "created_at": moment(made), "status": REFUSED}
    names = ("code", "http_status", "param", "message", "team_id", "key_id", "endpoint", "model_asked")
    told = {name: row[name] for name in names} | {"limit": row["limit_name"], "model_used": None}
    return head | told | {"advice": ADVICE.get(row["code"])} | cost_view(0)


async def _details(connection: AsyncConnection, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what only the look at one call shows: times, attempts, the price line by line, the hold."""
    return {
        "times_ms": {name.removesuffix("_ms"): row[name] for name in TIMES},
        "attempts": row["attempts"],
        "provider_endpoint": row["provider_endpoint"],
        "complexity": row["complexity"],
        "left_out": [{"model": name, "codes": codes} for name, codes in (row["left_out"] or {}).items()],
        "held": {"tokens": row["held_tokens"], "cost_usd": dollars(row["held_nanousd"])},
        "price": {"edition": row["price"] or None, "lines": await _price_lines(connection, row)},
        "booked_on": row["booked_on"],
        "safety": await _findings(connection, row),
    }


async def _findings(connection: AsyncConnection, row: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return what the safety checks found in a call, and what became of it, as the audit log has it."""
    acts, request_id = audit_log.c, str(row["request_id"])
    began = datetime.fromtimestamp(milliseconds_of(request_id) / 1000, UTC)
    then = acts.created_at.between(began - CLOCKS, max(began, row["created_at"]) + WRITTEN_WITHIN)
    query = select(acts.action, acts.details).where(acts.team_id == row["team_id"], then)
    query = query.where(acts.request_id == request_id, acts.action.startswith("safety.")).order_by(acts.id)
    found = (await connection.execute(query)).all()
    return [{"action": action.removeprefix("safety."), "findings": details["findings"]} for action, details in found]


async def _price_lines(connection: AsyncConnection, row: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """Return a charged call's cost by kind: tokens at dollars per million, requests at dollars each; None where its
    price is not known.

    What a call is charged is rounded up once: the lines add up to it but for less than a nano-dollar each.
    """
    if row["status"] not in CHARGED or not row["price"]:
        return None
    told = select(price_editions.c.price).where(price_editions.c.edition == row["price"])
    price_json = (await connection.execute(told)).scalar_one_or_none()
    if price_json is None:
        return None
    usage = Usage(**{name: row[name] for name in TOKENS}, **(row["units"] or {}))
    price, made_at = msgspec.convert(price_json, Price), row["created_at"].timestamp()
    return [
        {"kind": line.kind, "count": line.count, "usd": dollars(line.rate), "cost_usd": dollars(line.cost)}
        for line in cost_lines(usage, price, batch=row["tier"] == "batch", at=made_at)
    ]
