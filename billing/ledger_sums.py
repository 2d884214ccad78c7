# What the statements say of every team and key, as the counters begin with it: the sums of today and yesterday, of this
# month and the last, and the calls of the last minute.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.corrections import sums_of
from billing.holds import Scope, Sums
from billing.ids import EPOCH, date_of, day_number, least_id
from billing.quota_verbs import month_of
from billing.records import CHARGED

WINDOW = 60  # seconds of calls that count against limits per minute

TeamSums = tuple[list[Any], list[Any], list[Any]]  # days, months and seconds of one team, as quotas.lua loads them


@dataclass
class LedgerSums:
    """The sums of all teams at one moment."""

    read_at: float  # unix seconds, by Postgres's clock
    teams: list[str]
    _days: dict[tuple[str, str, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    _months: dict[tuple[str, str, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0]))
    _seconds: dict[tuple[str, str, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def by_team(self) -> Iterator[tuple[str, TeamSums]]:
        """Yield each team's sums."""
        found: dict[str, TeamSums] = {team_id: ([], [], []) for team_id in self.teams}
        for place, sums in enumerate((self._days, self._months, self._seconds)):
            for (team_id, scope, when), amounts in sums.items():
                if any(amounts) and team_id in found:
                    found[team_id][place].append((scope, when, *amounts))
        yield from found.items()

    def add(self, team_id: str, key_id: str | None, day: int, tokens: int, cost: int, *, since: int) -> None:
        """Add to a day, if it is ``since`` or later, and to its month."""
        for scope in ("team",) if key_id is None else ("team", f"key:{key_id}"):
            if day >= since:
                _add(self._days[team_id, scope, day], tokens, cost)
            _add(self._months[team_id, scope, month_of(day)], cost)

    def add_second(self, team_id: str, key_id: str, second: int, requests: int, tokens: int) -> None:
        """Add calls that began in a second."""
        for scope in ("team", f"key:{key_id}"):
            _add(self._seconds[team_id, scope, second], requests, tokens)


async def read_ledger_sums(connection: AsyncConnection, now: float, put_back: Sequence[str]) -> LedgerSums:
    """Read the sums of all teams in one snapshot, without the calls that were put back.

    An owner puts back what its journal has not seen flushed; a flush whose answer was lost may have come through.
    """
    await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    today = EPOCH + timedelta(days=int(now // 86_400))
    since = day_number(today) - 1
    first = (today.replace(day=1) - timedelta(days=1)).replace(day=1)
    query: dict[str, Any] = {"first": first, "charged": list(CHARGED)}
    teams = (await connection.execute(text("SELECT id FROM teams"))).all()
    read_at = (await connection.execute(text("SELECT extract(epoch FROM now())"))).scalar_one()
    sums = LedgerSums(float(read_at), [row.id for row in teams])
    for row in (await connection.execute(DAYS, query)).all():
        sums.add(row.team_id, row.key_id, day_number(row.day), int(row.tokens), int(row.cost), since=since)
    for one in await sums_of(connection, first, today + timedelta(days=1)):
        sums.add(one.team_id, one.key_id, day_number(one.day), one.tokens, one.cost_nanousd, since=since)
    recent = query | {
        "from": least_id(now - WINDOW),
        "days": [today - timedelta(days=1), today, today + timedelta(days=1)],
    }
    for row in (await connection.execute(SECONDS, recent)).all():
        sums.add_second(row.team_id, row.key_id, int(row.second), row.calls, int(row.tokens))
    for row in await _find(connection, put_back):
        day, tokens = day_number(row.day), row.input_tokens + row.output_tokens
        sums.add(row.team_id, row.key_id, day, -tokens, -row.cost_nanousd, since=since)
        second = (row.request_id.int >> 80) // 1000
        if second >= int(now - WINDOW):
            sums.add_second(row.team_id, row.key_id, second, -1, -tokens)
    return sums


async def read_scope_sums(connection: AsyncConnection, scope: Scope, team_id: str, day: int) -> Sums:
    """Return what the statements say that one team or key has used in a day and its month."""
    moment = EPOCH + timedelta(days=day)
    query = {
        "team": team_id,
        "key": None if scope.kind == "team" else scope.id,
        "day": moment,
        "first": moment.replace(day=1),
        "charged": list(CHARGED),
    }
    row = (await connection.execute(SCOPE, query)).one()
    return Sums(int(row.day_tokens), int(row.day_cost), int(row.month_cost))


async def _find(connection: AsyncConnection, request_ids: Sequence[str]) -> Iterable[Any]:
    """Return the charged rows of calls that were put back and are in the ledger all the same."""
    if not request_ids:
        return []
    days = sorted(set(map(date_of, request_ids)))
    ids = [UUID(request_id) for request_id in request_ids]
    charged = list(CHARGED)
    return (await connection.execute(FIND, {"days": days, "ids": ids, "charged": charged})).all()


def _add(sums: list[int], *amounts: int) -> None:
    for place, amount in enumerate(amounts):
        sums[place] += amount


DAYS = text("""
    SELECT team_id, key_id, day, sum(input_tokens + output_tokens) AS tokens, sum(cost_nanousd) AS cost
    FROM usage_daily
    WHERE day >= :first AND status = ANY(CAST(:charged AS text[]))
    GROUP BY team_id, key_id, day
""")

SECONDS = text("""
    SELECT team_id, key_id, count(*) AS calls, sum(input_tokens + output_tokens) AS tokens,
           (('x' || left(replace(request_id::text, '-', ''), 12))::bit(48)::bigint / 1000) AS second
    FROM usage_records
    WHERE day = ANY(CAST(:days AS date[])) AND request_id >= :from AND status = ANY(CAST(:charged AS text[]))
    GROUP BY team_id, key_id, second
""")

FIND = text("""
    SELECT request_id, day, team_id, key_id, input_tokens, output_tokens, cost_nanousd
    FROM usage_records
    WHERE day = ANY(CAST(:days AS date[])) AND request_id = ANY(CAST(:ids AS uuid[]))
      AND status = ANY(CAST(:charged AS text[]))
""")

SCOPE = text("""
    WITH spent AS (
        SELECT day, input_tokens + output_tokens AS tokens, cost_nanousd
        FROM usage_daily
        WHERE team_id = :team AND (CAST(:key AS text) IS NULL OR key_id = :key)
          AND status = ANY(CAST(:charged AS text[]))
          AND day >= :first AND day < CAST(:first AS date) + interval '1 month'
        UNION ALL
        SELECT day, input_tokens + output_tokens, cost_nanousd
        FROM corrections
        WHERE team_id = :team AND (CAST(:key AS text) IS NULL OR key_id = :key)
          AND day >= :first AND day < CAST(:first AS date) + interval '1 month'
    )
    SELECT coalesce(sum(tokens) FILTER (WHERE day = :day), 0) AS day_tokens,
           coalesce(sum(cost_nanousd) FILTER (WHERE day = :day), 0) AS day_cost,
           coalesce(sum(cost_nanousd), 0) AS month_cost
    FROM spent
""")
