# Calls at two versions of a pool's replicas, as the ledger has them: how many failed, and how soon the others' first
# tokens came, by slices of time and by how much of the prompt had to be computed.

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.ids import least_id
from billing.core.records import CACHED

SLICE = 15  # seconds
# Outcomes of attempts that tell nothing of who was asked: the client's doing, the request's, or how much is to do.
SAYS_NOTHING = (
    *(CACHED, "abandoned", "deadline", "refused", "filtered", "unsayable", "unsupported", "too_long", "too_large"),
    *("rate_limited", "full", "overloaded", "team_limit"),
)


class CallsCell(Struct, frozen=True):
    """Calls of one slice of time, of prompts of one size, at one version. ``total`` and ``squares`` are sums of
    logarithms of first-token times, and of their squares, of the ``timed`` among them."""

    slice: int  # of SLICE seconds, since the epoch
    size: int  # prompts within a factor of four, by what no cache had of them
    is_new: bool
    calls: int
    failed: int
    timed: int
    total: float
    squares: float


async def read_calls(connection: AsyncConnection, pool: str, places: Collection[str], since: float) -> list[CallsCell]:
    """Return the attempts at a pool since then (unix seconds). ``places``: how targets of the new version begin.

    A call that failed at both versions is left out: it says more of itself.
    """
    values = {
        "since": least_id(since),
        "day": datetime.fromtimestamp(since, UTC).date(),
        "pool": f"{pool}/",
        "places": list(places),
        "nothing": list(SAYS_NOTHING),
    }
    return [CallsCell(*row) for row in await connection.execute(CALLS, values)]


CALLS = text(f"""
    WITH tries AS (
        SELECT created_at, outcome, ln(greatest(ms, 0.1)) AS ln_ms, is_new,
               outcome = 'ok' AND tier = 'interactive' AND first_token_ms IS NOT NULL AS is_timed,
               ln(greatest(1, input_tokens - cached_input_tokens)) / ln(4.0) AS size,
               jsonb_array_length(attempts) > 1
                   AND bool_or(outcome <> 'ok' AND is_new) OVER call
                   AND bool_or(outcome <> 'ok' AND NOT is_new) OVER call AS failed_at_both
        FROM usage_records
        CROSS JOIN LATERAL jsonb_to_recordset(attempts) AS one (target text, outcome text, ms double precision)
        CROSS JOIN LATERAL (
            SELECT EXISTS (SELECT FROM unnest(CAST(:places AS text[])) AS place WHERE starts_with(target, place))
        ) AS which (is_new)
        WHERE day >= :day AND request_id >= :since AND starts_with(target, :pool)
          AND outcome <> ALL (CAST(:nothing AS text[]))
        WINDOW call AS (PARTITION BY request_id)
    )
    SELECT CAST(floor(extract(epoch FROM created_at) / {SLICE}) AS bigint) AS slice,
           CAST(floor(size) AS integer) AS size,
           is_new,
           count(*) AS calls,
           count(*) FILTER (WHERE outcome <> 'ok') AS failed,
           count(*) FILTER (WHERE is_timed) AS timed,
           coalesce(sum(ln_ms) FILTER (WHERE is_timed), 0) AS total,
           coalesce(sum(ln_ms * ln_ms) FILTER (WHERE is_timed), 0) AS squares
    FROM tries
    WHERE NOT failed_at_both
    GROUP BY 1, 2, 3
""")  # noqa: S608  (constants of ours)
