# The ledger: one row per finished call, written once however often it is delivered, and the daily sums beside it.

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.instances import add_gpu_costs
from billing.partitions import ensure_partitions
from billing.records import UsageRecord, bounded, day_of

EPOCH = date(1970, 1, 1)
MOMENT_ZERO = datetime(1970, 1, 1, tzinfo=UTC)

COLUMNS = {
    "day": "date",
    "request_id": "uuid",
    "team_id": "text",
    "key_id": "text",
    "endpoint": "text",
    "model_asked": "text",
    "model_used": "text",
    "provider": "text",
    "provider_endpoint": "text",
    "tier": "text",
    "priority": "text",
    "status": "text",
    "input_tokens": "integer",
    "cached_input_tokens": "integer",
    "cache_write_tokens": "integer",
    "output_tokens": "integer",
    "reasoning_tokens": "integer",
    "cost_nanousd": "bigint",
    "gpu_cost_nanousd": "bigint",
    "queue_ms": "double precision",
    "first_token_ms": "double precision",
    "prefill_ms": "double precision",
    "decode_ms": "double precision",
    "total_ms": "double precision",
    "route_reason": "text",
    "complexity": "double precision",
    "attempts": "jsonb",
    "client_request_id": "text",
    "user_tag": "text",
    "metadata": "jsonb",
    "created_at": "timestamptz",
    "booked_on": "date",
}
FIELDS = tuple(name for name in COLUMNS if name in UsageRecord.__struct_fields__)
ROLLUP_KEY = {
    "team_id": "text",
    "day": "date",
    "booked_on": "date",
    "key_id": "text",
    "model_used": "text",
    "tier": "text",
    "status": "text",
}
SUMS = (
    "calls",
    "input_tokens",
    "cached_input_tokens",
    "cache_write_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost_nanousd",
    "gpu_cost_nanousd",
)


def _arrays(types: dict[str, str]) -> str:
    return ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in types.items())


INSERT = text(
    f"INSERT INTO usage_records ({', '.join(COLUMNS)}) SELECT * FROM unnest({_arrays(COLUMNS)}) "  # noqa: S608
    "ON CONFLICT (day, request_id) DO NOTHING RETURNING request_id"
)
ROLL_UP = text(
    f"INSERT INTO usage_daily ({', '.join((*ROLLUP_KEY, *SUMS))}) "  # noqa: S608
    f"SELECT * FROM unnest({_arrays(ROLLUP_KEY | dict.fromkeys(SUMS, 'bigint'))}) "
    f"ON CONFLICT ({', '.join(ROLLUP_KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = usage_daily.{name} + excluded.{name}" for name in SUMS)
)


async def write_records(connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date) -> int:
    """Write records into the ledger and the daily sums, and return how many of them were new.

    A record whose id is there already changes nothing. Rows for a day that is closed are booked on ``today``.
    """
    return len(await insert_records(connection, records, today=today))


async def insert_records(
    connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date
) -> list[UsageRecord]:
    """Write records into the ledger and the daily sums, and return those that were new."""
    if not records:
        return []
    await ensure_partitions(connection, today)
    closed = await _closed_days(connection, {day_in(record) for record in records}, today)
    # In key order, so that two writers with rows in common wait for each other instead of locking up.
    by_id = {UUID(record.request_id): bounded(record) for record in records}
    rows = {key: _row(key, by_id[key], today if day_in(by_id[key]) in closed else None) for key in sorted(by_id)}
    columns = {name: [row[name] for row in rows.values()] for name in COLUMNS}
    inserted = (await connection.execute(INSERT, columns)).scalars().all()
    new = [rows[key] for key in inserted]
    await _roll_up(connection, new)
    await add_gpu_costs(connection, new)
    return [by_id[key] for key in inserted]


def day_in(record: UsageRecord) -> date:
    """Return the UTC day inside the record's id, which is the day it is booked for."""
    return EPOCH + timedelta(days=day_of(record.request_id))


async def _closed_days(connection: AsyncConnection, days: set[date], today: date) -> set[date]:
    """Return which of ``days`` are closed, and keep the others open until this transaction ends."""
    past = sorted(day for day in days if day < today)
    if not past:
        return set()
    await connection.execute(text("SELECT pg_advisory_xact_lock_shared(hashtext('closed_days'))"))
    query = text("SELECT day FROM closed_days WHERE day = ANY(CAST(:days AS date[]))")
    return set((await connection.execute(query, {"days": past})).scalars())


def _row(request_id: UUID, record: UsageRecord, booked_on: date | None) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(record, name) for name in FIELDS}
    created_at = record.created_at or (request_id.int >> 80) / 1000
    return row | {
        "day": day_in(record),
        "request_id": request_id,
        "status": record.status.value,
        "model_asked": _clean(record.model_asked),
        "attempts": msgspec.json.encode(record.attempts).decode(),
        "client_request_id": _clean(record.client_request_id),
        "user_tag": _clean(record.user_tag),
        "metadata": _metadata(record.metadata),
        "created_at": MOMENT_ZERO + timedelta(seconds=created_at),
        "booked_on": booked_on,
    }


def _clean(words: str | None) -> str | None:
    """Return what a caller wrote as Postgres can store it: it knows no NUL in text."""
    return None if words is None else words.replace("\0", "")


def _metadata(metadata: dict[str, str] | None) -> str | None:
    if metadata is None:
        return None
    return msgspec.json.encode({_clean(key): _clean(value) for key, value in metadata.items()}).decode()


async def _roll_up(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Add exactly these rows to the daily sums."""
    if not rows:
        return
    sums: dict[tuple[str | dt.date, ...], list[int]] = defaultdict(lambda: [0] * len(SUMS))
    for row in rows:
        key = tuple((row["booked_on"] or row["day"]) if name == "booked_on" else row[name] for name in ROLLUP_KEY)
        total = sums[key]
        total[0] += 1
        for position, name in enumerate(SUMS[1:], 1):
            total[position] += row[name]
    ordered = sorted(sums)
    columns: dict[str, list[Any]] = {name: [key[place] for key in ordered] for place, name in enumerate(ROLLUP_KEY)}
    columns |= {name: [sums[key][place] for key in ordered] for place, name in enumerate(SUMS)}
    await connection.execute(ROLL_UP, columns)
