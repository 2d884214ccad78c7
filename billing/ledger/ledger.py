# The ledger: one row per finished call, written once however often it is delivered and found by the id that its answer
# carried, and the sums by the day and by the minute beside it.
#
# A batch goes to Postgres as one JSON document, and one statement does the rest: an array for each column cost the
# gateway ten times the time, and where all gateways add to one team's daily sum, the time from there to the commit is
# what bounds them (docs/experiments/money/batch-of-rows.md).
#
# A row also spends a lease of its team's limits for its model, where the team has ever set any (limited_models): its
# owner's, if its call held these limits, and else that of no owner, as the limits were set while it ran. Of its end
# user and its tags it spends what its call held (held_scopes), and no other.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import date
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct
from sqlalchemy import select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import date_of
from billing.core.records import CHARGED, COSTS, SAVINGS, TOKENS, UsageRecord, bounded
from billing.ledger import series
from billing.ledger.partitions import ensure_partitions
from billing.ledger.tables import IS_CALL, usage_daily, usage_records

COLUMNS = {column.name: column.type.compile(postgresql.dialect()) for column in usage_records.columns}
# How a key of usage_daily is made of a row.
ROLLUP_KEY = {column.name: column.name for column in usage_daily.primary_key} | {
    "booked_on": "coalesce(booked_on, day)"
}
SUMS = ("calls", *TOKENS, *COSTS, *SAVINGS)

# How a column is made of a record's JSON, r, and of the day and the milliseconds inside its id, d. What is left out of
# the JSON has its default.
MADE = {
    "day": "d.day",
    "created_at": "to_timestamp(coalesce(nullif(r.created_at, 0), d.ms / 1000.0))",
    "booked_on": "CASE WHEN d.day <= book.closed THEN CAST(:today AS date) END",
    "attempts": "coalesce(r.attempts, '[]')",
    "tier": "coalesce(r.tier, 'interactive')",
    "priority": "coalesce(r.priority, 'normal')",
    "route_reason": "coalesce(r.route_reason, '')",
    "total_ms": "coalesce(r.total_ms, 0)",
    "owner": "coalesce(r.owner, '')",
    "held_tokens": "coalesce(r.held_tokens, 0)",
    "held_nanousd": "coalesce(r.held_nanousd, 0)",
    "price": "coalesce(r.price, '')",
} | {name: f"coalesce(r.{name}, 0)" for name in SUMS[1:]}
IN_JSON = {name: kind for name, kind in COLUMNS.items() if name in UsageRecord.__struct_fields__} | {
    "created_at": "double precision"
}

# No process closes a day or drops one while this runs, and it knows all that were before (open_ledger).
# In the order of their keys, by bytes: two writers with rows in common wait for each other instead of locking up. What
# the new rows have spent is booked on the leases of the owners that they name, last: an owner's row is locked there.
# OFFSET 0 makes Postgres compute a row's day once, and not again wherever it is used.
INSERT = text(f"""
    WITH new AS (
        INSERT INTO usage_records ({", ".join(COLUMNS)})
        SELECT {", ".join(MADE.get(name, f"r.{name}") for name in COLUMNS)}
        FROM json_to_recordset(CAST(:records AS json)) AS r ({", ".join(map(" ".join, IN_JSON.items()))}),
             LATERAL (SELECT CAST(CAST('x' || left(replace(CAST(r.request_id AS text), '-', ''), 12) AS bit(48))
                                  AS bigint) AS ms OFFSET 0) AS t,
             LATERAL (SELECT t.ms, CAST('1970-01-01' AS date) + CAST(t.ms / 86400000 AS integer) AS day OFFSET 0) AS d,
             open_ledger() AS book
        WHERE d.day >= coalesce(book.begins, '-infinity')
        ORDER BY d.day, r.request_id
        ON CONFLICT (day, request_id) DO NOTHING
        RETURNING *
    ), summed AS (
        INSERT INTO usage_daily ({", ".join((*ROLLUP_KEY, *SUMS))})
        SELECT {", ".join(ROLLUP_KEY.values())}, count(*) FILTER (WHERE {IS_CALL}),
               {", ".join(f"sum({name})" for name in SUMS[1:])}
        FROM new
        GROUP BY {", ".join(ROLLUP_KEY.values())}
        ORDER BY {", ".join(f'{made} COLLATE "C"' if "day" not in made else made for made in ROLLUP_KEY.values())}
        ON CONFLICT ({", ".join(ROLLUP_KEY)}) DO UPDATE
        SET {", ".join(f"{name} = usage_daily.{name} + excluded.{name}" for name in SUMS)}
        RETURNING 1
    ), own AS (
        INSERT INTO endpoint_days (day, endpoint, gpu_cost_nanousd)
        SELECT day, provider_endpoint, sum(gpu_cost_nanousd) FROM new WHERE gpu_cost_nanousd > 0
        GROUP BY day, provider_endpoint
        ORDER BY day, provider_endpoint COLLATE "C"
        ON CONFLICT (day, endpoint) DO UPDATE
        SET gpu_cost_nanousd = endpoint_days.gpu_cost_nanousd + excluded.gpu_cost_nanousd
        RETURNING 1
    ), charted AS ({series.ADD_NEW}), limited AS MATERIALIZED (
        SELECT name FROM limited_models(ARRAY(SELECT DISTINCT team_id FROM new)) AS name
    ), spent AS (
        SELECT scope.owner, scope.name AS scope, unit.name AS unit, to_char(day, 'YYYY-MM-DD') AS day,
               CAST(sum(unit.amount) AS bigint) AS amount
        FROM new,
             LATERAL (
                 VALUES ('team:' || team_id, owner), ('key:' || key_id, owner)
                 UNION ALL
                 SELECT name, CASE WHEN model_used = ANY (held_models) THEN owner ELSE '' END
                 FROM limited WHERE name = 'model:' || team_id || '/' || model_used
                 UNION ALL
                 SELECT unnest(held_scopes), owner
             ) AS scope (name, owner),
             LATERAL (VALUES ('tokens', CAST(input_tokens AS bigint) + output_tokens),
                             ('nanousd', cost_nanousd)) AS unit (name, amount)
        WHERE status IN ({", ".join(f"'{status}'" for status in sorted(CHARGED))}) AND unit.amount > 0
        GROUP BY scope.owner, scope.name, unit.name, day
    )
    SELECT (SELECT count(*) FROM summed) AS lines, (SELECT count(*) FROM own) AS endpoints,
           (SELECT count(*) FROM charted) AS charted, (SELECT count(*) FROM new) AS new,
           book_spent(:flusher, sums.owners, sums.scopes, sums.units, sums.days, sums.amounts) AS beat
    FROM (
        SELECT array_agg(owner) AS owners, array_agg(scope) AS scopes, array_agg(unit) AS units, array_agg(day) AS days,
               array_agg(amount) AS amounts
        FROM spent
    ) AS sums
""")  # noqa: S608  (columns are ours)


# Waits for the writers that go by what was remembered before, so that nothing is inserted into days that are dropped.
FORGET = text("""
    WITH locked AS (SELECT pg_advisory_xact_lock(hashtext('closed_days')))
    INSERT INTO ledger_memory (begins) SELECT CAST(:before AS date) FROM locked
    ON CONFLICT (id) DO UPDATE SET begins = greatest(ledger_memory.begins, excluded.begins)
""")
BEGINS = text("SELECT begins FROM ledger_memory")


class TooOld(Exception):
    """Records of days whose rows the ledger has dropped: whether they were booked before, nothing tells any more."""

    def __init__(self, begins: date, request_ids: Collection[str]) -> None:
        super().__init__(f"{len(request_ids)} calls are older than {begins}, with which the ledger's memory begins")
        self.request_ids = request_ids


class Inserted(Struct, frozen=True):
    """How many records were new, and the beat of the owner that wrote them."""

    new: int
    beat: int | None = None


async def insert_records(connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date) -> int:
    """Write records into the ledger as ``write_records`` does, in a transaction; return how many were new."""
    if records:
        await ensure_partitions(connection, today)
    return (await write_records(connection, records, today=today)).new


async def write_records(
    connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date, flusher: str = ""
) -> Inserted:
    """Write records into the ledger, its sums and the leases that they have spent; tell how many were new.

    One statement, but where some were there already. A record whose id is there already changes nothing. Rows for a
    day that is closed are booked on ``today``. ``flusher``: the owner whose beat counts this. Raises TooOld where a
    record is of a day that the ledger has forgotten; it is not written, and in a transaction nothing may be committed.
    """
    if not records:
        return Inserted(0)
    by_id = {record.request_id: bounded(record) for record in records}
    rows = {"records": _to_json(list(by_id.values())), "today": today, "flusher": flusher}
    said = (await connection.execute(INSERT, rows)).one()
    if said.new < len(by_id):
        begins = await memory_begins(connection)
        if begins is not None and (too_old := [which for which in by_id if date_of(which) < begins]):
            raise TooOld(begins, too_old)
    return Inserted(said.new, said.beat)


async def memory_begins(connection: AsyncConnection) -> date | None:
    """Return the first day whose rows were not dropped; None as long as none were."""
    return (await connection.execute(BEGINS)).scalar_one_or_none()


async def find_row(connection: AsyncConnection, request_id: str) -> Mapping[Any, Any] | None:
    """Return the row of a call, its columns by name, or ``None``. The id says the day, so one partition is read."""
    try:
        day = date_of(request_id)
        key = UUID(request_id)
    except (ValueError, OverflowError):  # no UUID, or not one of version 7
        return None
    query = select(usage_records).where(usage_records.c.day == day, usage_records.c.request_id == key)
    return (await connection.execute(query)).mappings().one_or_none()


async def forget_days(connection: AsyncConnection, before: date) -> None:
    """Take nothing more for the days before ``before``: their rows are about to be dropped."""
    begins = await memory_begins(connection)
    if begins is None or begins < before:
        await connection.execute(FORGET, {"before": before})


def _to_json(records: Sequence[UsageRecord]) -> str:
    """Return records as one JSON list. What callers wrote loses its NULs: Postgres knows none in text."""
    encoded = msgspec.json.encode(records)
    if b"\\u0000" in encoded:
        encoded = msgspec.json.encode([_clean(record) for record in records])
    return encoded.decode()


def _clean(record: UsageRecord) -> UsageRecord:
    return msgspec.structs.replace(
        record,
        model_asked=_without_nul(record.model_asked),
        client_request_id=record.client_request_id and _without_nul(record.client_request_id),
        user_tag=record.user_tag and _without_nul(record.user_tag),
        metadata=record.metadata and {_without_nul(key): _without_nul(value) for key, value in record.metadata.items()},
    )


def _without_nul(words: str) -> str:
    return words.replace("\0", "")
