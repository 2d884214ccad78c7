# Canaries are watched in the ledger, where the calls of all gateways are: one that fails, answers or costs clearly
# worse than what its name means is withdrawn, for all gateways and for good, until its configuration changes.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import blake2s

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import least_id
from billing.core.store_errors import told_if_away
from billing.upkeep.turns import Turns
from gateway.core.clock import Clock
from gateway.storage.database import Database
from router.catalog.catalog import Canary, Catalog

LOOK_EVERY = 5.0  # seconds until every gateway knows what one has found
COMPARE_EVERY = 15.0  # seconds between comparisons of one canary, by whichever gateway's turn it is

log = structlog.get_logger(__name__)


class Seen(Struct, frozen=True, kw_only=True):
    """How the calls of a name went lately, by the model that they were sent to first."""

    calls: int = 0
    failed: int = 0  # whose first attempt failed,
    late: int = 0  # or was cancelled, its hedge being sooner
    first_token_ms: float | None = None  # the median
    cost_nanousd: float | None = None  # the mean


class Told(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gateways know of a canary together."""

    since: float  # unix seconds: when it was first looked at; calls before that are not its own
    reason: str | None = None  # why it is withdrawn
    base: Seen | None = None  # and what that rests on
    canary: Seen | None = None


class CanaryWatch:
    """Which canaries are withdrawn. What was last read goes on while Postgres is away."""

    def __init__(
        self, catalog: Catalog, database: Database, turns: Turns, clock: Clock, count: Callable[[str, str], None]
    ) -> None:
        self.withdrawn: frozenset[str] = frozenset()  # names whose canary is not asked
        self._catalog = catalog
        self._database = database
        self._clock = clock
        self._count = count  # is told the name and the reason of what is withdrawn
        self._turns = turns

    def follow(self, catalog: Catalog) -> None:
        """Go by another catalogue: a canary that has changed begins anew."""
        before, self._catalog = self._catalog, catalog
        same = {name for name, canary in catalog.canaries.items() if before.canaries.get(name) == canary}
        self.withdrawn = self.withdrawn & same

    async def run(self) -> None:
        """Look for ever, if there is anything to look at."""
        while True:
            with told_if_away(log, "canaries_not_compared"):
                await self.look()
            await asyncio.sleep(LOOK_EVERY)

    async def look(self) -> None:
        """Compare the canaries whose turn it is, and learn which are withdrawn."""
        withdrawn = set()
        for name, canary in self._catalog.canaries.items():
            turn = _turn_of(name, canary)
            is_ours = await self._turns.take(turn, COMPARE_EVERY)
            told = await self._told(turn)
            if is_ours and told.reason is None:
                told = await self._compare(name, canary, told)
                await self._turns.tell(turn, msgspec.json.encode(told).decode())
            if told.reason is not None:
                withdrawn.add(name)
        self.withdrawn = frozenset(withdrawn)

    async def _told(self, turn: str) -> Told:
        said = await self._turns.told(turn)
        return msgspec.json.decode(said, type=Told) if said else Told(since=self._clock.now())

    async def _compare(self, name: str, canary: Canary, told: Told) -> Told:
        async with self._database.begin() as connection:
            since = max(told.since, self._clock.now() - canary.window)
            base, tried = await calls_of(connection, name, since)
        if (reason := why_worse(canary, base, tried)) is None:
            return told
        seen = {"base": msgspec.to_builtins(base), "canary": msgspec.to_builtins(tried)}
        log.error("canary_withdrawn", name=name, model=canary.model, reason=reason, **seen)
        self._count(name, reason)
        return replace(told, reason=reason, base=base, canary=tried)


def why_worse(canary: Canary, base: Seen, tried: Seen) -> str | None:
    """Return what a canary does clearly worse: ``errors``, ``latency`` or ``cost``; ``None`` where nothing, or too few
    calls tell."""
    if tried.calls < canary.least or base.calls < canary.least:
        return None
    if tried.failed / tried.calls > base.failed / base.calls + canary.errors:
        return "errors"
    if tried.late / tried.calls > base.late / base.calls + canary.errors:
        return "latency"
    if (tried.first_token_ms or 0) > canary.slower * (base.first_token_ms or float("inf")):
        return "latency"
    if (tried.cost_nanousd or 0) > canary.dearer * (base.cost_nanousd or float("inf")):
        return "cost"
    return None


async def calls_of(connection: AsyncConnection, name: str, since: float) -> tuple[Seen, Seen]:
    """Return how the calls that asked for a name went since a moment (unix seconds): its own model's, and the
    canary's."""
    least = least_id(since)
    values = {"name": name, "since": least, "day": datetime.fromtimestamp(since, UTC).date()}
    rows = (await connection.execute(CALLS, values)).mappings()
    seen = {row["is_canary"]: row for row in rows}
    found = [
        Seen(**{key: seen[which][key] for key in Seen.__struct_fields__}) if which in seen else Seen()
        for which in (False, True)
    ]
    return found[0], found[1]


def _turn_of(name: str, canary: Canary) -> str:
    """Return under which name a canary is compared: another one once its configuration has changed."""
    return f"canary {name} {blake2s(msgspec.json.encode(canary), digest_size=8).hexdigest()}"


# What was sent first is the first attempt that is no hedge. One that its client left, that the cache answered, that a
# limit of its team kept from being made, or that went with a team's own key tells nothing of a model; nor does a row of
# a hedge itself. A first attempt whose hedge was sooner is late: with it a model that hangs is never seen to fail.
CALLS = text("""
    SELECT route_reason = 'canary' AS is_canary,
           count(*) AS calls,
           count(*) FILTER (WHERE first.outcome NOT IN ('ok', 'hedge_lost')) AS failed,
           count(*) FILTER (WHERE first.outcome = 'hedge_lost') AS late,
           CAST(percentile_cont(0.5) WITHIN GROUP (ORDER BY first_token_ms)
                FILTER (WHERE status = 'answered' AND first.outcome = 'ok') AS double precision) AS first_token_ms,
           CAST(avg(cost_nanousd) FILTER (WHERE status = 'answered' AND first.outcome = 'ok')
                AS double precision) AS cost_nanousd
    FROM usage_records, LATERAL (
        SELECT one ->> 'outcome' AS outcome, one ->> 'key' AS key
        FROM jsonb_array_elements(attempts) AS one WHERE NOT one ? 'hedge' LIMIT 1
    ) AS first
    WHERE day >= :day AND request_id >= :since AND model_asked = :name
      AND first.outcome NOT IN ('abandoned', 'cached', 'team_limit')
      AND (first.outcome <> 'hedge_lost' OR attempts -> -1 ? 'hedge')
      AND route_reason <> 'hedge'
      AND first.key IS NULL
    GROUP BY 1
""")
