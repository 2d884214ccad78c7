# Budget alerts: what teams and keys have used of their days' and months' limits, looked at every few seconds, and an
# event by the team's webhook when 80 or 100 % is reached. Each threshold tells once a period, whichever worker looks.

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import structlog
from msgspec import Struct
from sqlalchemy import ColumnElement, delete, func, select, text, tuple_, update
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import LimitName, Limits
from billing.core.records import CHARGED
from billing.core.store_errors import told_if_away
from gateway.accounts.serializers import dollars
from gateway.accounts.teams import read_limits
from gateway.core.clock import Clock
from gateway.outbox.signing import Event
from gateway.outbox.store import enqueue
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import Database, from_row
from gateway.storage.tables import budget_alerts
from protocol.errors import Unshown

EVENT = "budget.threshold_reached"
THRESHOLDS = (80, 100)  # percent of the cap
EVERY = 3.0  # seconds between looks
SHARE = 0.05  # of one connection's time that looking may take: where it is slow, it is done less often
LATE = 30.0  # seconds after midnight for which yesterday is still looked at: its last rows come a little later
KEEP_FOR = timedelta(days=62)
MOST_TOLD = 20  # budgets at once

log = structlog.get_logger()


Place = tuple[str, str, str, str, int]  # the key of a row of budget_alerts


class Spending(Unshown, Struct, frozen=True, kw_only=True):
    """What one scope may use and has used, as the statements have it. Money is nano-dollars."""

    team_id: str
    key_id: str = ""  # "" for the team itself
    limits: Limits
    webhook_url: str | None
    day_tokens: int
    day_nanousd: int
    month_nanousd: int


class Reached(Struct, frozen=True, kw_only=True):
    """A threshold that a scope has reached in a period."""

    team_id: str
    key_id: str
    limit: LimitName
    period: str  # "2026-11-21" or "2026-11"
    threshold: int  # percent
    used: int  # nano-dollars or tokens
    cap: int

    @property
    def place(self) -> Place:
        """Return what makes it one: the key of its row."""
        return (self.team_id, self.key_id, self.limit.value, self.period, self.threshold)


class BudgetAlerts:
    """Looks at the budgets until it is cancelled. Any number may look; they take turns."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.used: dict[tuple[str, str], float] = {}  # (team, limit): the share of it, by the last look

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            began = time.monotonic()
            with told_if_away(log, "budgets_unreachable"):
                await self.look()
            await asyncio.sleep(max(EVERY, (time.monotonic() - began) / SHARE))

    async def look(self) -> list[Reached]:
        """Tell of every threshold that was reached since the last look, and return them."""
        day = datetime.fromtimestamp(self._clock.now() - LATE, UTC).date()
        async with self._database.begin() as connection:
            if not (await connection.execute(TAKE_TURN)).scalar_one():
                return []
            spendings = await read_spendings(connection, day)
            self.used = {
                (spending.team_id, limit.value): used / cap
                for spending in spendings
                if not spending.key_id
                for limit, cap, used, _ in budgets_of(spending, day)
            }
            urls = {spending.team_id: spending.webhook_url for spending in spendings}
            reached = [each for spending in spendings for each in thresholds_reached(spending, day)]
            known = await _known(connection, day)
            await _forget(connection, known.keys() - {each.place for each in reached}, day)
            told = [each for each in news(reached, known) if await self._tell(connection, each, urls[each.team_id])]
            await _remember(connection, [each for each in reached if known.get(each.place) != each.cap])
        return told

    async def _tell(self, connection: AsyncConnection, reached: Reached, url: str | None) -> bool:
        if not await _remember(connection, [reached]):
            return False
        data = event_data(reached)
        callback_id = None
        if url is not None:
            callback_id = await enqueue(
                connection, Event.now(self._clock, EVENT, data), team_id=reached.team_id, url=url
            )
            row = tuple_(*PLACE) == reached.place
            await connection.execute(update(budget_alerts).where(row).values(callback_id=callback_id))
        subject = reached.key_id or reached.team_id
        details = {**data, "callback_id": callback_id}
        await record_act(connection, Act("system"), EVENT, team_id=reached.team_id, subject=subject, details=details)
        shown = {name: str(value) if isinstance(value, Decimal) else value for name, value in data.items()}
        log.warning("budget_threshold_reached", **shown, callback_id=callback_id)
        return True


def budgets_of(spending: Spending, day: date) -> list[tuple[LimitName, int, int, str]]:
    """Return the limit, the cap, what is used of it, and the period of every budget. A cap of nothing is none."""
    limits = spending.limits
    budgets = (
        (LimitName.USD_PER_DAY, limits.nanousd_per_day, spending.day_nanousd, f"{day}"),
        (LimitName.USD_PER_MONTH, limits.nanousd_per_month, spending.month_nanousd, f"{day:%Y-%m}"),
        (LimitName.TOKENS_PER_DAY, limits.tokens_per_day, spending.day_tokens, f"{day}"),
    )
    return [(limit, cap, used, period) for limit, cap, used, period in budgets if cap]


def thresholds_reached(spending: Spending, day: date) -> list[Reached]:
    """Return the thresholds that are reached on ``day``, lower ones first."""
    return [
        Reached(
            team_id=spending.team_id,
            key_id=spending.key_id,
            limit=limit,
            period=period,
            threshold=threshold,
            used=used,
            cap=cap,
        )
        for limit, cap, used, period in budgets_of(spending, day)
        for threshold in THRESHOLDS
        if used * 100 >= cap * threshold
    ]


def news(reached: Sequence[Reached], known: Collection[Place]) -> list[Reached]:
    """Return what is to be told: of each budget the highest threshold, if neither it nor a higher one is known."""
    highest: dict[tuple[Any, ...], Reached] = {}
    for each in reached:
        budget = each.place[:-1]
        if budget not in highest or each.threshold > highest[budget].threshold:
            highest[budget] = each
    most_known: dict[tuple[Any, ...], int] = defaultdict(int)
    for place in known:
        most_known[place[:-1]] = max(most_known[place[:-1]], place[-1])
    return [each for budget, each in highest.items() if each.threshold > most_known[budget]]


def event_data(reached: Reached) -> dict[str, Any]:
    """Return what a receiver is told. Dollars are exact decimals."""
    is_money = reached.limit is not LimitName.TOKENS_PER_DAY
    unit = "used_usd" if is_money else "used_tokens"
    return {
        "team_id": reached.team_id,
        **({"key_id": reached.key_id} if reached.key_id else {}),
        "limit": reached.limit.value,
        "threshold": reached.threshold,
        unit: dollars(reached.used) if is_money else reached.used,
        "cap": dollars(reached.cap) if is_money else reached.cap,
        "period": reached.period,
    }


async def read_spendings(connection: AsyncConnection, day: date) -> list[Spending]:
    """Return what every team and live key with a budget has used on ``day`` and in its month, corrections included."""
    values = {
        "day": day,
        "month": day.replace(day=1),
        "next_month": (day.replace(day=1) + timedelta(days=32)).replace(day=1),
        "charged": list(CHARGED),
        "budgets": ["nanousd_per_day", "nanousd_per_month", "tokens_per_day"],
    }
    rows = (await connection.execute(SPENDINGS, values)).mappings()
    return [
        from_row(Spending, row, limits=read_limits(row["limits"]), **{name: int(row[name]) for name in SUMS})
        for row in rows
    ]


async def reached_budgets(connection: AsyncConnection, day: date, team_id: str | None) -> list[dict[str, Any]]:
    """Return the budgets of that team, or of all, whose thresholds were reached on ``day`` or in its month, as their
    events tell them: each once, the fullest first, at most as many as people read."""
    budget, row = PLACE[:-1], budget_alerts.c
    last = select(*PLACE, row.used, row.cap).ext(distinct_on(*budget)).where(_is_of(day))  # a cap may be lowered
    if team_id is not None:
        last = last.where(row.team_id == team_id)
    found = last.order_by(*budget, row.threshold.desc()).subquery().c
    query = select(*found).order_by(found.threshold.desc(), *(found[name] for name in NAMES[:-1])).limit(MOST_TOLD)
    rows = (await connection.execute(query)).mappings()
    return [event_data(from_row(Reached, row, limit=LimitName(row["limit_name"]))) for row in rows]


async def _known(connection: AsyncConnection, day: date) -> dict[Place, int]:
    """Return the thresholds that are written down, each with the cap that it was reached of."""
    rows = await connection.execute(select(*PLACE, budget_alerts.c.cap).where(_is_of(day)))
    return {(row[0], row[1], row[2], row[3], row[4]): row.cap for row in rows}


def _is_of(day: date) -> ColumnElement[bool]:
    return budget_alerts.c.period.in_((f"{day}", f"{day:%Y-%m}"))


async def _remember(connection: AsyncConnection, reached: Sequence[Reached]) -> bool:
    """Write thresholds down, or what is used now of another cap; return whether there were any."""
    if not reached:
        return False
    rows = [dict(zip(NAMES, each.place, strict=True)) | {"cap": each.cap, "used": each.used} for each in reached]
    query = insert(budget_alerts).values(rows)
    now = {name: query.excluded[name] for name in ("cap", "used")}
    changed = query.on_conflict_do_update(index_elements=PLACE, set_=now, where=budget_alerts.c.cap != now["cap"])
    return bool((await connection.execute(changed.returning(budget_alerts.c.team_id))).all())


async def _forget(connection: AsyncConnection, places: Collection[Place], day: date) -> None:
    """Drop what is no longer reached, because its cap was raised or money given back; it may be reached again."""
    if places:
        await connection.execute(delete(budget_alerts).where(tuple_(*PLACE).in_(list(places))))
    if day.day == 1:
        await connection.execute(delete(budget_alerts).where(budget_alerts.c.created_at < func.now() - KEEP_FOR))


SUMS = ("day_tokens", "day_nanousd", "month_nanousd")
NAMES = ("team_id", "key_id", "limit_name", "period", "threshold")
PLACE = [budget_alerts.c[name] for name in NAMES]
TAKE_TURN = text("SELECT pg_try_advisory_xact_lock(hashtext('budget_alerts'))")
SPENDINGS = text("""
    SELECT scope.*, used.*
    FROM (
        SELECT id AS team_id, '' AS key_id, limits, webhook_url FROM teams
        WHERE jsonb_exists_any(limits, CAST(:budgets AS text[])) AND deleted_at IS NULL
        UNION ALL
        SELECT team_id, api_keys.id, api_keys.limits, webhook_url FROM api_keys JOIN teams ON teams.id = team_id
        WHERE jsonb_exists_any(api_keys.limits, CAST(:budgets AS text[])) AND revoked_at IS NULL
    ) AS scope,
    LATERAL (
        SELECT coalesce(sum(tokens) FILTER (WHERE day = :day), 0) AS day_tokens,
               coalesce(sum(cost_nanousd) FILTER (WHERE day = :day), 0) AS day_nanousd,
               coalesce(sum(cost_nanousd), 0) AS month_nanousd
        FROM (
            SELECT day, input_tokens + output_tokens AS tokens, cost_nanousd FROM usage_daily
            WHERE team_id = scope.team_id AND (scope.key_id = '' OR key_id = scope.key_id)
              AND day >= :month AND day < :next_month AND status = ANY(CAST(:charged AS text[]))
            UNION ALL
            SELECT day, input_tokens + output_tokens, cost_nanousd FROM corrections
            WHERE team_id = scope.team_id AND (scope.key_id = '' OR key_id = scope.key_id)
              AND day >= :month AND day < :next_month
        ) AS entries
    ) AS used
    ORDER BY scope.team_id, scope.key_id
""")
