# The ledger: one row per finished call, written once however often it is delivered, and the daily sums beside it.
#
# A batch goes to Postgres as one JSON document, and one statement does the rest: an array for each column cost the
# gateway ten times the time (docs/experiments.md).

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import date

import msgspec
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import date_of
from billing.instances import add_gpu_costs
from billing.partitions import coming_partitions, ensure_partitions
from billing.records import CHARGED, UsageRecord, bounded

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
    "owner": "text",
    "held_tokens": "bigint",
    "held_nanousd": "bigint",
    "price": "text",
}
# How a key of usage_daily is made of a row.
ROLLUP_KEY = {
    "team_id": "team_id",
    "day": "day",
    "booked_on": "coalesce(booked_on, day)",
    "key_id": "key_id",
    "model_used": "model_used",
    "tier": "tier",
    "status": "status",
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

# How a column is made of a record's JSON, r, and of the day and the milliseconds inside its id, d. What is left out of
# the JSON has its default.
MADE = {
    "day": "d.day",
    "created_at": "to_timestamp(coalesce(nullif(r.created_at, 0), d.ms / 1000.0))",
    "booked_on": "CASE WHEN d.day <= (SELECT max(day) FROM closed_days) THEN CAST(:today AS date) END",
    "attempts": "coalesce(r.attempts, '[]')",
    "tier": "coalesce(r.tier, 'interactive')",
    "priority": "coalesce(r.priority, 'normal')",
    "route_reason": "coalesce(r.route_reason, '')",
    "total_ms": "coalesce(r.total_ms, 0)",
    "owner": "coalesce(r.owner, '')",
    "held_tokens": "coalesce(r.held_tokens, 0)",
    "held_nanousd": "coalesce(r.held_nanousd, 0)",
    "price": "coalesce(r.price, '')",
} | {name: f"coalesce(r.{name}, 0)" for name in SUMS if name != "calls"}
IN_JSON = {name: kind for name, kind in COLUMNS.items() if name in UsageRecord.__struct_fields__} | {
    "created_at": "double precision"
}

# Nobody closes a day while this transaction runs; the statement after this one sees every day that was closed before.
BEGIN = text(
    "SELECT pg_advisory_xact_lock_shared(hashtext('closed_days')),"
    " EXISTS (SELECT FROM unnest(CAST(:names AS text[])) AS name WHERE to_regclass(name) IS NULL) AS is_missing"
)
# In the order of their keys, by bytes: two writers with rows in common wait for each other instead of locking up. What
# the new rows have spent is booked on the leases of the owners that they name, last: an owner's row is locked there.
INSERT = text(f"""
    WITH new AS (
        INSERT INTO usage_records ({", ".join(COLUMNS)})
        SELECT {", ".join(MADE.get(name, f"r.{name}") for name in COLUMNS)}
        FROM json_to_recordset(CAST(:records AS json)) AS r ({", ".join(map(" ".join, IN_JSON.items()))}),
             LATERAL (SELECT CAST(CAST('x' || left(replace(CAST(r.request_id AS text), '-', ''), 12) AS bit(48))
                                  AS bigint) AS ms) AS t,
             LATERAL (SELECT t.ms, CAST('1970-01-01' AS date) + CAST(t.ms / 86400000 AS integer) AS day) AS d
        WHERE d.day >= coalesce((SELECT begins FROM ledger_memory), '-infinity')
        ORDER BY d.day, r.request_id
        ON CONFLICT (day, request_id) DO NOTHING
        RETURNING *
    ), summed AS (
        INSERT INTO usage_daily ({", ".join((*ROLLUP_KEY, *SUMS))})
        SELECT {", ".join(ROLLUP_KEY.values())}, count(*), {", ".join(f"sum({name})" for name in SUMS[1:])}
        FROM new
        GROUP BY {", ".join(ROLLUP_KEY.values())}
        ORDER BY {", ".join(f'{made} COLLATE "C"' if "day" not in made else made for made in ROLLUP_KEY.values())}
        ON CONFLICT ({", ".join(ROLLUP_KEY)}) DO UPDATE
        SET {", ".join(f"{name} = usage_daily.{name} + excluded.{name}" for name in SUMS)}
        RETURNING 1
    ), spent AS (
        SELECT owner, scope.name AS scope, unit.name AS unit, to_char(day, 'YYYY-MM-DD') AS day,
               CAST(sum(unit.amount) AS bigint) AS amount
        FROM new,
             LATERAL (VALUES ('team:' || team_id), ('key:' || key_id)) AS scope (name),
             LATERAL (VALUES ('tokens', CAST(input_tokens AS bigint) + output_tokens),
                             ('nanousd', cost_nanousd)) AS unit (name, amount)
        WHERE status IN ({", ".join(f"'{status}'" for status in sorted(CHARGED))}) AND unit.amount > 0
        GROUP BY owner, scope.name, unit.name, day
    )
    SELECT (SELECT count(*) FROM summed) AS lines, (SELECT array_agg(CAST(request_id AS text)) FROM new) AS new,
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
    """The records that were new, and the beat of the owner that wrote them."""

    new: list[UsageRecord]
    beat: int | None = None


async def insert_records(
    connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date
) -> list[UsageRecord]:
    """Write records into the ledger as ``write_records`` does, and return those that were new."""
    return (await write_records(connection, records, today=today)).new


async def write_records(
    connection: AsyncConnection, records: Sequence[UsageRecord], *, today: date, flusher: str = ""
) -> Inserted:
    """Write records into the ledger, the daily sums and the leases that they have spent; tell those that were new.

    A record whose id is there already changes nothing. Rows for a day that is closed are booked on ``today``.
    ``flusher``: the owner whose beat counts this. Raises TooOld, and nothing may be committed, where a record is of a
    day that the ledger has forgotten.
    """
    if not records:
        return Inserted([])
    begun = (await connection.execute(BEGIN, {"names": list(coming_partitions(today))})).one()
    if begun.is_missing:
        await ensure_partitions(connection, today)
    by_id = {record.request_id: bounded(record) for record in records}
    rows = {"records": _to_json(list(by_id.values())), "today": today, "flusher": flusher}
    said = (await connection.execute(INSERT, rows)).one()
    new = [by_id[request_id] for request_id in said.new or ()]
    if len(new) < len(by_id):
        begins = await memory_begins(connection)
        if begins is not None and (too_old := [which for which in by_id if date_of(which) < begins]):
            raise TooOld(begins, too_old)
    await add_gpu_costs(connection, [_cost_row(record) for record in new if record.gpu_cost_nanousd])
    return Inserted(new, said.beat)


async def memory_begins(connection: AsyncConnection) -> date | None:
    """Return the first day whose rows were not dropped; None as long as none were."""
    return (await connection.execute(BEGINS)).scalar_one_or_none()


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


def _cost_row(record: UsageRecord) -> dict[str, object]:
    return {
        "day": date_of(record.request_id),
        "provider_endpoint": record.provider_endpoint,
        "gpu_cost_nanousd": record.gpu_cost_nanousd,
    }
