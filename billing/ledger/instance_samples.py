# Looks at engine replicas: what each says of itself, and the time that passed for it, booked once however many look.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

SECOND = 1_000_000  # microseconds
DAY = 86_400 * SECOND
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Look(Struct, frozen=True, kw_only=True):
    """One look at a replica: its own counters since it started, in microseconds, and what else it says of itself.

    ``instance_id`` is another one after every start. ``gpu_hour_nanousd`` is what an hour of one of its GPUs costs at
    this moment; None: not known, and its time is not booked.
    """

    instance_id: str
    provider: str
    endpoint: str  # region and base URL, as in usage_records.provider_endpoint
    model: str | None  # its name in the catalogue
    gpus: int
    gpu_hour_nanousd: int | None
    alive_us: int
    busy_us: int
    seen_at: float  # unix seconds
    load: Mapping[str, Any]  # the engine's own report, as it came


class Instance(Struct, frozen=True, kw_only=True):
    """A replica as it was last seen."""

    instance_id: str
    provider: str
    endpoint: str
    model: str | None
    gpus: int
    alive_us: int
    busy_us: int
    first_seen: datetime
    last_seen: datetime
    load: dict[str, Any]


async def book_look(connection: AsyncConnection, look: Look) -> bool:
    """Book the time that passed for a replica since the last look by any process; return whether this look was news.

    The replica's own counters say how much that is, so a look that is booked twice, or by two watchers, counts once,
    and time in which no process looked is caught up with. Time is split at UTC midnight.
    """
    row = {
        **{name: getattr(look, name) for name in LOOKED},
        "load": msgspec.json.encode(look.load).decode(),
        "seen_at": EPOCH + timedelta(seconds=look.seen_at),
        "seen_us": round(look.seen_at * SECOND),
    }
    return bool((await connection.execute(BOOK, row)).scalar_one())


async def last_looks(connection: AsyncConnection, since: float) -> list[Instance]:
    """Return the replicas that were seen since then (unix seconds), by endpoint, the one seen last first."""
    rows = await connection.execute(SEEN, {"since": EPOCH + timedelta(seconds=since)})
    return [Instance(**row) for row in rows.mappings()]


LOOKED = ("instance_id", "provider", "endpoint", "model", "gpus", "gpu_hour_nanousd", "alive_us", "busy_us")
SEEN = text("SELECT * FROM instances WHERE last_seen >= :since ORDER BY endpoint, last_seen DESC, instance_id")
# Compare and set: the look is written only over the one whose counters it was compared with, and the days grow only if
# it was. Of two watchers with the same look one finds nothing to do. The busy part of a day is in proportion.
BOOK = text(f"""
    WITH known AS (
        SELECT alive_us, busy_us FROM instances WHERE instance_id = :instance_id
    ), won AS (
        INSERT INTO instances
            (instance_id, provider, endpoint, model, gpus, alive_us, busy_us, first_seen, last_seen, load)
        VALUES (:instance_id, :provider, :endpoint, :model, :gpus, :alive_us, :busy_us,
                CAST(:seen_at AS timestamptz), CAST(:seen_at AS timestamptz), CAST(:load AS jsonb))
        ON CONFLICT (instance_id) DO UPDATE
        SET provider = excluded.provider, endpoint = excluded.endpoint, model = excluded.model, gpus = excluded.gpus,
            alive_us = excluded.alive_us, busy_us = greatest(instances.busy_us, excluded.busy_us),
            last_seen = greatest(instances.last_seen, excluded.last_seen), load = excluded.load
        WHERE instances.alive_us = (SELECT alive_us FROM known) AND instances.alive_us <= excluded.alive_us
        RETURNING instance_id, provider, endpoint, model, gpus
    ), span AS (
        SELECT won.*, ends - alive AS begins, ends, alive, busy
        FROM won LEFT JOIN known ON true, LATERAL (
            SELECT CAST(:seen_us AS bigint) AS ends, CAST(:alive_us AS bigint) - coalesce(known.alive_us, 0) AS alive,
                   CAST(greatest(0, CAST(:busy_us AS bigint) - coalesce(known.busy_us, 0)) AS numeric) AS busy
        ) AS passed
    ), booked AS (
        INSERT INTO instance_days
            (instance_id, day, gpu_hour_nanousd, provider, endpoint, model, gpus, alive_us, busy_us)
        SELECT instance_id, DATE '1970-01-01' + CAST(day AS integer), CAST(:gpu_hour_nanousd AS bigint), provider,
               endpoint, model, gpus, until - since,
               div(busy * (until - begins), alive) - div(busy * (since - begins), alive)
        FROM span, generate_series(begins / {DAY}, (ends - 1) / {DAY}) AS day,
             LATERAL (SELECT greatest(begins, day * {DAY}) AS since, least(ends, (day + 1) * {DAY}) AS until) AS part
        WHERE alive > 0 AND CAST(:gpu_hour_nanousd AS bigint) IS NOT NULL
        ON CONFLICT (instance_id, day, gpu_hour_nanousd) DO UPDATE
        SET alive_us = instance_days.alive_us + excluded.alive_us, busy_us = instance_days.busy_us + excluded.busy_us
    )
    SELECT count(*) FROM won
""")  # noqa: S608  (a constant of this file)
