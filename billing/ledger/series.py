# The rollup of calls by the minute: what a flush adds for the rows that it inserts, how minutes are merged and make
# hours, hours of all teams days, and when they go. Rows are added and never updated, so writers do not wait for each
# other here.
#
# A histogram is an array of bigints, one for a bucket: its number above 40 bits, how many calls it has below. Buckets
# grow by 10.5 %, and a percentile is told by the middle of its bucket: to 5 %. Histograms merge by concatenation.

from __future__ import annotations

import math
from datetime import datetime, timedelta

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import CACHED, COSTS, SAVINGS, TOKENS
from billing.ledger.tables import IS_CALL

KEY = ("team_id", "key_id", "model_used", "provider", "status", "tier", "route_reason", "code")
SUMS = ("calls", "cached", *TOKENS, *COSTS, *SAVINGS)
# Steps: a minute that no hour has yet; one that its hour has; an hour; an hour of all teams and keys together, and such
# a one that its day has; a day of all teams and keys.
MINUTE, SEALED_MINUTE, HOUR, HOUR_OF_ALL, SEALED_OF_ALL, DAY_OF_ALL = 1, 2, 60, 61, 62, 63
HOURS_OF_ALL = (MINUTE, HOUR_OF_ALL, SEALED_OF_ALL)  # what tells hours of all teams together,
DAYS_OF_ALL = (MINUTE, HOUR_OF_ALL, DAY_OF_ALL)  # and days
MINUTES_KEPT = timedelta(hours=48)
SETTLED = timedelta(minutes=2)  # after which few parts of a minute are still to come
MERGED_WITHIN = timedelta(minutes=15)  # that each round of merging looks back: more than lies between two
BUCKETS_PER_E, LAST_BUCKET, COUNT_BITS = 10, 255, 40
MASK = 2**COUNT_BITS - 1
MOST = 20_000  # rows in one transaction of the chores


def middle_of(bucket: int) -> float:
    """Return the milliseconds that a bucket stands for."""
    return math.exp((bucket + 0.5) / BUCKETS_PER_E)


def _histogram(column: str) -> str:
    number = f"least(floor({BUCKETS_PER_E} * ln(greatest({column}, 1))), {LAST_BUCKET})"
    packed = f"(CAST({number} AS bigint) << {COUNT_BITS}) + 1"
    return f"array_agg({packed}) FILTER (WHERE {column} IS NOT NULL AND {IS_CALL})"


# How a column is made of rows of the ledger.
MADE = {
    "at": "to_timestamp(CAST(CAST('x' || left(replace(CAST(request_id AS text), '-', ''), 12) AS bit(48)) AS bigint)"
    " / 60000 * 60)",
    "step": str(MINUTE),
    **{name: name for name in KEY if name != "code"},
    "calls": f"count(*) FILTER (WHERE {IS_CALL})",
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

# Adds one row for each key and ``unit`` of time of those that are ``gone``.
MERGED = """
    {name}_placed AS (
        SELECT *, dense_rank() OVER (ORDER BY date_trunc('{unit}', at, 'UTC'), {key}) AS place FROM gone
    ), {name}_packed AS (
        SELECT place, kind, ((each >> {bits}) << {bits}) + CAST(sum(each & {mask}) AS bigint) AS each
        FROM {name}_placed, LATERAL (
            SELECT 1 AS kind, unnest(first_token) AS each UNION ALL SELECT 2, unnest(total)
        ) AS histogram
        GROUP BY place, kind, each >> {bits}
    ), {name}_histograms AS (
        SELECT place, array_agg(each) FILTER (WHERE kind = 1) AS first_token,
               array_agg(each) FILTER (WHERE kind = 2) AS total
        FROM {name}_packed GROUP BY place
    ), {name}_merged AS (
        SELECT place, date_trunc('{unit}', min(at), 'UTC') AS at, {keys}, {sums} FROM {name}_placed GROUP BY place
    ), {name} AS (
        INSERT INTO usage_series (at, step, {names}, first_token, total)
        SELECT at, {step}, {names}, first_token, total FROM {name}_merged LEFT JOIN {name}_histograms USING (place)
    )
"""
ALIKE = f"""
    DELETE FROM usage_series WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM (
            SELECT ctid, count(*) OVER (PARTITION BY at, {", ".join(KEY)}) AS parts FROM usage_series
            WHERE step = {MINUTE} AND at >= :since AND at < :until
        ) AS each WHERE parts > 1 LIMIT {MOST}
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

# Hours of all teams of the oldest day there is that no day has. Not while processes of two versions live: the older may
# know no days, and would show none that are over.
OLDEST_DAY = f"""
    DELETE FROM usage_series WHERE step = {HOUR_OF_ALL} AND at < :until AND at < (
        SELECT date_trunc('day', min(at), 'UTC') + interval '1 day' FROM usage_series WHERE step = {HOUR_OF_ALL}
    ) AND 1 >= (
        SELECT count(DISTINCT version) FROM owners
        WHERE version <> '' AND ended_at IS NULL AND seen_at > clock_timestamp() - interval '1 minute'
    ) RETURNING *
"""  # noqa: S608  (columns are ours)


def _merged(name: str, unit: str, step: int, key: tuple[str, ...] = KEY) -> str:
    keys = [f"min({each}) AS {each}" if each in key else f"'' AS {each}" for each in KEY]
    return MERGED.format(
        name=name,
        unit=unit,
        step=step,
        bits=COUNT_BITS,
        mask=MASK,
        key=", ".join(key),
        keys=", ".join(keys),
        names=", ".join((*KEY, *SUMS)),
        sums=", ".join(f"CAST(sum({each}) AS bigint) AS {each}" for each in SUMS),
    )


def hours_of_all(hours: str) -> TextClause:
    """Return the statement that adds up hours, which ``hours`` selects, over all teams and keys."""
    return _move(hours, _merged("of_all", "hour", HOUR_OF_ALL, KEY[2:]))


def _move(gone: str, *added: str) -> TextClause:
    return text(f"WITH gone AS ({gone}), {', '.join(added)} SELECT count(*) FROM gone")  # noqa: S608


MERGE_PARTS = _move(ALIKE, _merged("minutes", "minute", MINUTE))
SEAL = _move(
    OLDEST,
    _merged("minutes", "minute", SEALED_MINUTE),
    _merged("hours", "hour", HOUR),
    _merged("of_all", "hour", HOUR_OF_ALL, KEY[2:]),
)
SEAL_DAY = _move(
    OLDEST_DAY, _merged("hours", "hour", SEALED_OF_ALL, KEY[2:]), _merged("days", "day", DAY_OF_ALL, KEY[2:])
)
FORGET = text(f"""
    DELETE FROM usage_series WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM usage_series
        WHERE step = {SEALED_MINUTE} AND at < :minutes OR step >= {HOUR} AND at < :hours LIMIT {MOST}
    ))
""")  # noqa: S608  (columns are ours)


# How many rows are gone Postgres learns only after it has planned their joins: for the few that it expects it would
# compare each with each.
NOT_EACH_WITH_EACH = text("SET LOCAL enable_nestloop = off")


async def merge_parts(connection: AsyncConnection, now: datetime) -> int:
    """Make one row of the parts that several flushes added to a minute; return how many parts there were.

    A minute that is merged may get parts again, which the next rounds merge; readers add up whatever there is.
    """
    until = now - SETTLED
    await connection.execute(NOT_EACH_WITH_EACH)
    spans = {"since": until - MERGED_WITHIN, "until": until}
    return int((await connection.execute(MERGE_PARTS, spans)).scalar_one())


async def seal_hours(connection: AsyncConnection, now: datetime) -> int:
    """Make hours of minutes whose hour is over, those of one hour at the most; return how many rows there were.

    Each row passes here once, a late one too: what is sealed and what is not yet is everything, at every moment.
    """
    await connection.execute(NOT_EACH_WITH_EACH)
    until = (now - SETTLED).replace(minute=0, second=0, microsecond=0)
    return int((await connection.execute(SEAL, {"until": until})).scalar_one())


async def seal_days(connection: AsyncConnection, now: datetime) -> int:
    """Make a day of the hours of all teams of a day that is over; return how many rows there were. Likewise, each row
    passes once: of what comes late another row is added to its day."""
    await connection.execute(NOT_EACH_WITH_EACH)
    until = (now - SETTLED).replace(hour=0, minute=0, second=0, microsecond=0)
    return int((await connection.execute(SEAL_DAY, {"until": until})).scalar_one())


async def forget_series(connection: AsyncConnection, now: datetime, keep: timedelta) -> int:
    """Delete some of the minutes that are past their time and of the hours older than ``keep``; return how many."""
    return (await connection.execute(FORGET, {"minutes": now - MINUTES_KEPT, "hours": now - keep})).rowcount
