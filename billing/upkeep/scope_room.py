# What of a budget is used, what running calls hold of it, and what is left for others, as the database knows it. What
# processes have drawn ahead and hold no call in is left: near a cap they give it back when another wants it.

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits
from billing.ledger.tables import IS_OF_VALUE
from billing.quotas.lease_store import ALIVE


class Budget(Struct, frozen=True):
    """One budget of a scope in its period. Tokens or nano-dollars."""

    used: int  # by rows of the ledger, corrections included
    held: int  # by calls that run; all that was drawn by processes that do not tell, or do not answer
    cap: int | None

    @property
    def left(self) -> int | None:
        """What a call could still use; None without a cap, below zero where a correction or a lower cap came late."""
        return None if self.cap is None else self.cap - self.used - self.held


class ScopeRoom(Struct, frozen=True, kw_only=True):
    """The budgets of a scope."""

    tokens_today: Budget
    nanousd_today: Budget
    nanousd_this_month: Budget


async def scope_rooms(connection: AsyncConnection, limits: Mapping[str, Limits]) -> dict[str, ScopeRoom]:
    """Return the budgets of each scope ("team:ID", "key:ID") with these limits."""
    rows = (await connection.execute(LEASED, {"scopes": list(limits), "alive": ALIVE})).mappings()
    leased = {(row["scope"], row["unit"], row["is_month"]): (int(row["used"]), int(row["held"])) for row in rows}

    def budget(scope: str, unit: str, is_month: bool, cap: int | None) -> Budget:
        return Budget(*leased.get((scope, unit, is_month), (0, 0)), cap)

    return {
        scope: ScopeRoom(
            tokens_today=budget(scope, "tokens", False, of.tokens_per_day),
            nanousd_today=budget(scope, "nanousd", False, of.nanousd_per_day),
            nanousd_this_month=budget(scope, "nanousd", True, of.nanousd_per_month),
        )
        for scope, of in limits.items()
    }


async def scopes_used(connection: AsyncConnection, prefix: str, *, after: str, limit: int) -> list[str]:
    """Return the scopes of end users ("user:TEAM/") or tags ("tag:TEAM/KEY=") that were held this month, in order."""
    values = {"prefix": prefix, "after": prefix + after, "limit": limit}
    return list((await connection.execute(USED, values)).scalars())


USED = text(f"""
    SELECT scope FROM balances
    WHERE unit = 'nanousd' AND {IS_OF_VALUE}
      AND period = to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM')
      AND scope > :after AND starts_with(scope, :prefix) AND scope < :prefix || 'g'
    ORDER BY scope LIMIT :limit
""")  # noqa: S608  (the words are ours; a hash goes on with 0 to f)

# By Postgres's clock. Two lines for each scope and unit: of the month, and of the day. An owner tells once a second
# what of a lease is used and held; what of it rows have spent meanwhile is held no more. Of past days owners keep
# nothing ahead, and what they tell is not read for each: it may be long.
LEASED = text("""
    WITH at AS (SELECT CAST(clock_timestamp() AT TIME ZONE 'UTC' AS date) AS today),
    parts AS (
        SELECT scope, unit, day = today AS of_day, true AS of_month, spent AS used, CASE
                   WHEN day < today OR holds IS NULL OR seen_at < clock_timestamp() - make_interval(secs => :alive)
                   THEN granted - returned - spent
                   ELSE greatest(0, least(granted - returned, coalesce(CAST(
                       holds ->> concat_ws(' ', scope, unit, to_char(day, 'YYYY-MM-DD')) AS bigint), 0)) - spent)
               END AS held
        FROM at, leases LEFT JOIN owners ON owners.id = leases.owner
        WHERE scope = ANY (:scopes) AND day >= date_trunc('month', today)
          AND day < date_trunc('month', today) + interval '1 month'
        UNION ALL
        SELECT scope, unit, period = to_char(today, 'YYYY-MM-DD'), period = to_char(today, 'YYYY-MM'), corrected, 0
        FROM balances, at
        WHERE scope = ANY (:scopes) AND corrected <> 0
    )
    SELECT scope, unit, true AS is_month, sum(used) AS used, greatest(sum(held), 0) AS held
    FROM parts WHERE of_month GROUP BY scope, unit
    UNION ALL
    SELECT scope, unit, false, sum(used), greatest(sum(held), 0) FROM parts WHERE of_day GROUP BY scope, unit
""")
