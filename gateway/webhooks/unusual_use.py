# Keys that are used as they never were: what a key has spent, asked and from where today, beside its own past. Looked
# at every five minutes by one worker; each signal is told once a day, by the team's webhook, in the log and the audit
# log, and pauses the key where the deployment wants that. A key with little past is left alone.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

import structlog
from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.money import NANO
from billing.core.store_errors import told_if_away
from billing.quotas.rate_wire import REDIS_AWAY
from gateway.accounts.serializers import dollars
from gateway.core.clock import Clock
from gateway.outbox.signing import Event
from gateway.outbox.store import enqueue
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import Database, from_row
from gateway.storage.tables import unusual_uses
from protocol.errors import Unshown

# What may be unusual: dollars, calls, an address that is new to a key which had one or two, and many at once.
Signal = Literal["spend", "velocity", "new_address", "shared"]

EVENT = "key.unusual_use"
EVERY = 300.0  # seconds between looks, each at 28 days of all keys
PAST = 28  # days
LEAST_DAYS = 7  # of these, on which the key was used: before, nothing is unusual
TIMES = 4  # as much as on its dearest or busiest day
LEAST_SPEND = 1 * NANO  # nano-dollars
LEAST_CALLS = 500
FEW_ADDRESSES = 2  # a key of one or two machines
LEAST_ADDRESSES = 8  # that a key which is passed around is used from

log = structlog.get_logger()

Pause = Callable[[str, str], Awaitable[None]]  # of a key of a team


class KeyDay(Unshown, Struct, frozen=True, kw_only=True):
    """How a key was used today, and in its past. Money is nano-dollars."""

    team_id: str
    key_id: str
    webhook_url: str | None = None
    nanousd: int = 0
    calls: int = 0
    networks: int = 0
    new_networks: int = 0  # of these, that its past does not know
    past_days: int = 0  # on which it was used
    most_nanousd: int = 0  # of a day
    most_calls: int = 0
    most_networks: int = 0
    past_networks: int = 0  # in all
    network_days: int = 0  # on which it is known from where it was used


def signals_of(day: KeyDay) -> list[Signal]:
    """Return what is unusual about a day."""
    if day.past_days < LEAST_DAYS:
        return []
    found: list[Signal] = []
    if day.nanousd >= max(LEAST_SPEND, TIMES * day.most_nanousd):
        found.append("spend")
    if day.calls >= max(LEAST_CALLS, TIMES * day.most_calls):
        found.append("velocity")
    if day.network_days < LEAST_DAYS:
        return found
    if day.networks >= max(LEAST_ADDRESSES, TIMES * day.most_networks):
        found.append("shared")
    elif day.new_networks and day.past_networks <= FEW_ADDRESSES:
        found.append("new_address")
    return found


def event_data(day: KeyDay, signal: Signal, on: date) -> dict[str, Any]:
    """Return what a receiver is told. Dollars are exact decimals."""
    beside: dict[Signal, dict[str, Any]] = {
        "spend": {"used_usd": dollars(day.nanousd), "most_usd": dollars(day.most_nanousd)},
        "velocity": {"calls": day.calls, "most_calls": day.most_calls},
        "shared": {"addresses": day.networks, "most_addresses": day.most_networks},
        "new_address": {"new_addresses": day.new_networks, "known_addresses": day.past_networks},
    }
    return {"team_id": day.team_id, "key_id": day.key_id, "signal": signal, "day": f"{on}", **beside[signal]}


class UnusualUse:
    """Looks at keys until it is cancelled. Any number may look; they take turns."""

    def __init__(self, database: Database, clock: Clock, pause: Pause) -> None:
        self._database = database
        self._clock = clock
        self._pause = pause

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            with told_if_away(log, "unusual_use_unreachable"):
                await self.look()

    async def look(self) -> list[dict[str, Any]]:
        """Tell of everything that has become unusual since the last look, and return it."""
        day = datetime.fromtimestamp(self._clock.now(), UTC).date()
        told: list[dict[str, Any]] = []
        async with self._database.begin() as connection:
            if not (await connection.execute(TAKE_TURN)).scalar_one():
                return []
            values = {"day": day, "since": day - timedelta(days=PAST)}
            for row in (await connection.execute(DAYS, values)).mappings():
                one = from_row(KeyDay, row)
                told += [
                    data
                    for signal in signals_of(one)
                    if await self._tell(connection, one, signal, data := event_data(one, signal, day))
                ]
            for query in FORGET:
                await connection.execute(query, values)
        for key_id, team_id in {(data["key_id"], data["team_id"]) for data in told}:
            with told_if_away(log, "key_not_paused", errors=REDIS_AWAY, key_id=key_id):
                await self._pause(key_id, team_id)
        return told

    async def _tell(self, connection: AsyncConnection, day: KeyDay, signal: Signal, data: dict[str, Any]) -> bool:
        shown = {name: float(value) if name.endswith("_usd") else value for name, value in data.items()}
        place = {"key_id": day.key_id, "day": date.fromisoformat(data["day"]), "signal": signal}
        query = insert(unusual_uses).on_conflict_do_nothing().returning(unusual_uses.c.key_id)
        row = {**place, "team_id": day.team_id, "details": shown}
        if not (await connection.execute(query.values(row))).all():
            return False
        callback_id = None
        if day.webhook_url is not None:
            event = Event.now(self._clock, EVENT, data)
            callback_id = await enqueue(connection, event, team_id=day.team_id, url=day.webhook_url)
        details = {**data, "callback_id": callback_id}
        await record_act(connection, Act("system"), EVENT, team_id=day.team_id, subject=day.key_id, details=details)
        log.warning("key_used_unusually", **shown)
        return True


TAKE_TURN = text("SELECT pg_try_advisory_xact_lock(hashtext('unusual_use'))")
FORGET = [text(f"DELETE FROM {table} WHERE day < :since") for table in ("key_networks", "unusual_uses")]  # noqa: S608
DAYS = text("""
    WITH used AS (
        SELECT key_id, day, sum(calls) AS calls, sum(cost_nanousd) AS nanousd FROM usage_daily
        WHERE day >= :since AND day <= :day GROUP BY key_id, day
    ), days AS (
        SELECT key_id, coalesce(max(calls) FILTER (WHERE day = :day), 0)::bigint AS calls,
               coalesce(max(nanousd) FILTER (WHERE day = :day), 0)::bigint AS nanousd,
               count(*) FILTER (WHERE day < :day) AS past_days,
               coalesce(max(calls) FILTER (WHERE day < :day), 0)::bigint AS most_calls,
               coalesce(max(nanousd) FILTER (WHERE day < :day), 0)::bigint AS most_nanousd
        FROM used GROUP BY key_id HAVING count(*) FILTER (WHERE day < :day) > 0
    ), places AS (
        SELECT key_id, count(*) FILTER (WHERE last = :day) AS networks,
               count(*) FILTER (WHERE first = :day) AS new_networks,
               count(*) FILTER (WHERE first < :day) AS past_networks
        FROM (
            SELECT key_id, network, min(day) AS first, max(day) AS last FROM key_networks
            WHERE day >= :since AND day <= :day GROUP BY key_id, network
        ) AS each GROUP BY key_id
    ), most AS (
        SELECT key_id, max(networks) AS most_networks, count(*) AS network_days FROM (
            SELECT key_id, day, count(*) AS networks FROM key_networks
            WHERE day >= :since AND day < :day GROUP BY key_id, day
        ) AS each GROUP BY key_id
    )
    SELECT keys.team_id, keys.id AS key_id, teams.webhook_url, days.calls, days.nanousd, days.past_days,
           days.most_calls, days.most_nanousd, coalesce(places.networks, 0) AS networks,
           coalesce(places.new_networks, 0) AS new_networks, coalesce(places.past_networks, 0) AS past_networks,
           coalesce(most.most_networks, 0) AS most_networks,
           coalesce(most.network_days, 0) AS network_days
    FROM days JOIN api_keys AS keys ON keys.id = days.key_id JOIN teams ON teams.id = keys.team_id
    LEFT JOIN places USING (key_id) LEFT JOIN most USING (key_id)
    WHERE keys.revoked_at IS NULL
    ORDER BY keys.team_id, keys.id
""")
