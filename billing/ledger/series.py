# The rollup of calls by the minute: what a flush adds for the rows that it inserts, how minutes are merged and become
# hours, and when hours go. Rows are added and never updated, so writers do not wait for each other here.
#
# A histogram is an array of bigints, one for a bucket: its number above 40 bits, how many calls it has below. Buckets
# grow by 10.5 %, and a percentile is told by the middle of its bucket: to 5 %. Histograms merge by concatenation.

from __future__ import annotations

import math
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import CACHED, COSTS, SAVINGS, TOKENS

KEY = ("team_id", "key_id", "model_used", "provider", "status", "tier", "route_reason", "code")
SUMS = ("calls", "cached", *TOKENS, *COSTS, *SAVINGS)
MINUTE, HOUR = 1, 60  # steps
MINUTES_KEPT = timedelta(hours=48)
SETTLED = timedelta(minutes=2)  # after which few parts of a minute are still to come
MERGED_WITHIN = timedelta(minutes=15)  # that each round of merging looks back: more than lies between two
BUCKETS_PER_E, LAST_BUCKET, COUNT_BITS = 10, 255, 40
MASK = 2**COUNT_BITS - 1
MOST = 50_000  # rows in one transaction of the chores


def middle_of(bucket: int) -> float:
    """Return the milliseconds that a bucket stands for."""
    return math.exp((bucket + 0.5) / BUCKETS_PER_E)


def _histogram(column: str) -> str:
    number = f"least(floor({BUCKETS_PER_E} * ln(greatest({column}, 1))), {LAST_BUCKET})"
    packed = f"(CAST({number} AS bigint) << {COUNT_BITS}) + 1"
    return f"array_agg({packed}) FILTER (WHERE {column} IS NOT NULL)"


# How a column is made of rows of the ledger.
MADE = {
    "at": "to_timestamp(CAST(CAST('x' || left(replace(CAST(request_id AS text), '-', ''), 12) AS bit(48)) AS bigint)"
    " / 60000 * 60)",
    "step": str(MINUTE),
    **{name: name for name in KEY if name != "code"},
    "calls": "count(*)",
    "cached": f"count(*) FILTER (WHERE attempts -> -1 ->> 'outcome' = '{CACHED}')",
    **{name: f"sum({name})" for name in SUMS[2:]},
    "first_token": _histogram("first_token_ms"),
    "total": _histogram("total_ms"),
}
# A part of the statement that inserts rows (ledger.py); ``new``: the rows that were.
ADD_NEW = f"""
    INSERT INTO usage_series ({", ".join(MADE)})
    SELECT {", ".join(MADE.values())} FROM new GROUP BY 1, {", ".join(name for name in KEY if name != "code")}
    RETURNING 1
"""  # noqa: S608  (columns are ours)

# Takes rows away and adds one for each key and ``unit`` of time; ``gone`` says which.
MERGE = """
    WITH gone AS ({gone}),
    placed AS (
        SELECT *, dense_rank() OVER (ORDER BY date_trunc('{unit}', at, 'UTC'), {key}) AS place FROM gone
    ), packed AS (
        SELECT place, kind, ((each >> {bits}) << {bits}) + CAST(sum(each & {mask}) AS bigint) AS each
        FROM placed, LATERAL (
            SELECT 1 AS kind, unnest(first_token) AS each UNION ALL SELECT 2, unnest(total)
        ) AS histogram
        GROUP BY place, kind, each >> {bits}
    ), histograms AS (
        SELECT place, array_agg(each) FILTER (WHERE kind = 1) AS first_token,
               array_agg(each) FILTER (WHERE kind = 2) AS total
        FROM packed GROUP BY place
    ), merged AS (
        SELECT place, date_trunc('{unit}', min(at), 'UTC') AS at, {keys}, {sums} FROM placed GROUP BY place
    ), added AS (
        INSERT INTO usage_series (at, step, {key}, {names}, first_token, total)
        SELECT at, {step}, {key}, {names}, first_token, total FROM merged LEFT JOIN histograms USING (place)
    )
    SELECT count(*) FROM gone
"""
ALIKE = f"""
    DELETE FROM usage_series WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM (
            SELECT ctid, count(*) OVER (PARTITION BY at, {", ".join(KEY)}) AS parts FROM usage_series
            WHERE step = {MINUTE} AND at >= :since AND at < :until
        ) AS each WHERE parts > 1
    )) RETURNING *
"""  # noqa: S608  (columns are ours)
# Minutes of the oldest hour there is; those of one team together, so that most make one row for each key.
OLDEST = f"""
    DELETE FROM usage_series WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM usage_series WHERE step = {MINUTE} AND at < :until AND at < (
            SELECT date_trunc('hour', min(at), 'UTC') + interval '1 hour' FROM usage_series WHERE step = {MINUTE}
        ) ORDER BY team_id, key_id, model_used LIMIT {MOST}
    )) RETURNING *
"""  # noqa: S608  (columns are ours)


def _merge(gone: str, unit: str, step: int) -> str:
    return MERGE.format(
        gone=gone,
        unit=unit,
        step=step,
        bits=COUNT_BITS,
        mask=MASK,
        key=", ".join(KEY),
        keys=", ".join(f"min({name}) AS {name}" for name in KEY),
        names=", ".join(SUMS),
        sums=", ".join(f"CAST(sum({name}) AS bigint) AS {name}" for name in SUMS),
    )


MERGE_PARTS = text(_merge(ALIKE, "minute", MINUTE))
MAKE_HOURS = text(_merge(OLDEST, "hour", HOUR))
FORGET = text(f"""
    DELETE FROM usage_series WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM usage_series WHERE step = {HOUR} AND at < :before LIMIT {MOST}
    ))
""")  # noqa: S608  (columns are ours)


async def merge_parts(connection: AsyncConnection, now: datetime) -> int:
    """Make one row of the parts that several flushes added to a minute; return how many parts there were.

    A minute that is merged may get parts again, which the next rounds merge; readers add up whatever there is.
    """
    until = now - SETTLED
    spans = {"since": until - MERGED_WITHIN, "until": until}
    return int((await connection.execute(MERGE_PARTS, spans)).scalar_one())


async def make_hours(connection: AsyncConnection, now: datetime) -> int:
    """Make hours of minutes that are past their time, of one hour at the most; return how many rows went."""
    until = (now - MINUTES_KEPT).replace(minute=0, second=0, microsecond=0)
    return int((await connection.execute(MAKE_HOURS, {"until": until})).scalar_one())


async def forget_hours(connection: AsyncConnection, before: datetime) -> int:
    """Delete some of the hours before ``before``; return how many rows went."""
    return (await connection.execute(FORGET, {"before": before})).rowcount
