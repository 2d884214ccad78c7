# What the rollup of calls says of the demand on a pool of replicas: calls and tokens of its hours, and what was refused
# because no replica was there.

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.records import REQUESTS
from billing.ledger.series import HOURS_OF_ALL, MINUTE, SEALED_MINUTE

HOUR = 3600  # seconds
_ANSWERED = ", ".join(f"'{status}'" for status in sorted(REQUESTS))
# An hour stands there by its minutes, or by one row of all teams.
HOURS = text(f"""
    SELECT provider, CAST(floor(extract(epoch FROM at) / {HOUR}) AS bigint) AS hour,
           CAST(sum(calls - cached) AS bigint) AS calls,
           CAST(sum(input_tokens - cached_input_tokens) AS bigint) AS prompt,
           CAST(sum(output_tokens) AS bigint) AS reply
    FROM usage_series
    WHERE step IN ({", ".join(map(str, HOURS_OF_ALL))}) AND at >= :since AND provider = ANY(CAST(:pools AS text[]))
          AND status IN ({_ANSWERED})
    GROUP BY 1, 2
""")  # noqa: S608  (constants of ours)
REFUSED = text(f"""
    SELECT model_used, CAST(sum(calls) AS bigint) AS calls FROM usage_series
    WHERE step IN ({MINUTE}, {SEALED_MINUTE}) AND at >= :since AND status = 'refused' AND code = 'overloaded'
    GROUP BY 1
""")  # noqa: S608  (constants of ours)


class PoolHours(Struct, frozen=True):
    """What a pool was asked, by hours since the epoch: calls, and tokens that no cache had."""

    calls: Mapping[int, int] = {}
    prompt: Mapping[int, int] = {}
    reply: Mapping[int, int] = {}

    def lengths(self, now: float, enough: float) -> tuple[float, float] | None:
        """Return the mean tokens of prompt and reply of the last two hours, or of all where these had fewer calls than
        ``enough``; None where there was none."""
        last = int(now // HOUR)
        for hours in ([last - 1, last], list(self.calls)):
            calls = sum(self.calls.get(hour, 0) for hour in hours)
            if calls >= (enough if len(hours) < len(self.calls) else 1):
                prompt, reply = (sum(each.get(hour, 0) for hour in hours) for each in (self.prompt, self.reply))
                return max(1.0, prompt / calls), max(1.0, reply / calls)
        return None


async def read_hours(connection: AsyncConnection, pools: Collection[str], since: float) -> dict[str, PoolHours]:
    """Return the hours of each pool (a provider's name) since then (unix seconds)."""
    rows = await connection.execute(HOURS, {"since": datetime.fromtimestamp(since, UTC), "pools": sorted(pools)})
    found: dict[str, tuple[dict[int, int], dict[int, int], dict[int, int]]] = {}
    for provider, hour, *counts in rows:
        for each, count in zip(found.setdefault(provider, ({}, {}, {})), counts, strict=True):
            each[hour] = count
    return {provider: PoolHours(*each) for provider, each in found.items()}


async def read_refused(connection: AsyncConnection, since: float) -> dict[str, int]:
    """Return how many calls were refused as ``overloaded`` since the minute of a moment, by the name that was asked."""
    since = since // 60 * 60
    rows = await connection.execute(REFUSED, {"since": datetime.fromtimestamp(since, UTC)})
    return {row.model_used: row.calls for row in rows}
