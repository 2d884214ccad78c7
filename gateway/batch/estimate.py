# When a batch will be done: what is waiting before it, at the rate at which batches were answered lately.

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.store import moment_at
from gateway.batch.turns import SHARES
from gateway.clock import Clock

UNKNOWN_RATE = 1.0  # requests a second, while no batch has shown one
LEAST_SEEN = 20  # requests that a rate must rest on

# What all open batches have done since they began is the house's rate; without any, that of the last ones that ended.
# What waits counts by the share of its priority: of others' requests, so many run for each of ours.
STATE = text("""
    SELECT sum(greatest(total - completed - failed, 0)) FILTER (WHERE status = 'in_progress' AND priority = 'high')
               AS high,
           sum(greatest(total - completed - failed, 0)) FILTER (WHERE status = 'in_progress' AND priority = 'normal')
               AS normal,
           sum(greatest(total - completed - failed, 0)) FILTER (WHERE status = 'in_progress' AND priority = 'low')
               AS low,
           sum((completed + failed) / greatest(extract(epoch FROM clock_timestamp() - in_progress_at), 1))
               FILTER (WHERE status = 'in_progress' AND completed + failed >= :least) AS present_rate,
           avg(total / greatest(extract(epoch FROM completed_at - in_progress_at), 1))
               FILTER (WHERE status = 'completed' AND total >= :least) AS past_rate
    FROM batches
    WHERE status = 'in_progress' OR (status = 'completed' AND completed_at > clock_timestamp() - interval '1 day')
""")


async def estimated_completion(connection: AsyncConnection, clock: Clock, requests: int, priority: str) -> datetime:
    """Return when ``requests`` more of this priority will be answered, if all goes on as it does."""
    state = (await connection.execute(STATE, {"least": LEAST_SEEN})).mappings().one()
    waiting = {name: int(state[name] or 0) for name in SHARES}
    rate = float(state["present_rate"] or state["past_rate"] or UNKNOWN_RATE)
    return moment_at(clock) + timedelta(seconds=requests_before(requests, priority, waiting) / rate)


def requests_before(requests: int, priority: str, waiting: dict[str, int]) -> float:
    """Return how many requests will have run when ``requests`` more of ``priority`` have.

    Those of the same priority that wait come first; of another at most as many as its share allows meanwhile.
    """
    ours = requests + waiting[priority]
    others = (min(count, ours * SHARES[name] / SHARES[priority]) for name, count in waiting.items() if name != priority)
    return ours + sum(others)
