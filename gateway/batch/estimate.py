# When a batch will be done: the requests queued before it, at the recent rate of answers. And which of
# the waiting batches must go first, to be done within their windows.

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.fair_schedule import SHARES, RunnableBatch
from gateway.core.clock import Clock

UNKNOWN_RATE = 1.0  # requests a second, while no batch has shown one
SAFE = 0.7  # of the time that is left, which a batch may be expected to need before it is hurried
LEAST_SEEN = 20  # requests that a rate must rest on

# The deployment's rate: what all open batches have done since they began; without any, that of the last ended ones.
# Waiting requests count by the share of their priority: so many of another priority run for each of this one.
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
    waiting, rate = await read_backlog(connection)
    return clock.moment() + timedelta(seconds=requests_before(requests, priority, waiting) / (rate or UNKNOWN_RATE))


async def read_backlog(connection: AsyncConnection) -> tuple[dict[str, int], float | None]:
    """Return how many requests of each priority wait, and how many end in a second; None where nothing tells."""
    state = (await connection.execute(STATE, {"least": LEAST_SEEN})).mappings().one()
    rate = state["present_rate"] or state["past_rate"]
    return {name: int(state[name] or 0) for name in SHARES}, float(rate) if rate else None


def with_raised_priorities(waiting: Sequence[RunnableBatch], rate: float | None, now: float) -> list[RunnableBatch]:
    """Return batches with those raised to high priority that would end late, or hardly in time, at their own.

    ``rate``: requests that end in a second; ``now``: unix seconds. Before a batch come those of its priority whose
    windows end earlier, and of the others what their shares allow.
    """
    counts = dict.fromkeys(SHARES, 0)
    for each in waiting:
        counts[each.priority] += each.left
    before = dict.fromkeys(SHARES, 0)
    found = []
    for each in sorted(waiting, key=lambda one: one.expires_at):
        before[each.priority] += each.left
        needed = requests_before(0, each.priority, counts | {each.priority: before[each.priority]})
        is_late = rate is not None and needed / rate > SAFE * (each.expires_at - now)
        found.append(replace(each, priority="high") if is_late else each)
    return found


def requests_before(requests: int, priority: str, waiting: dict[str, int]) -> float:
    """Return how many requests will have run when ``requests`` more of ``priority`` have.

    Those of the same priority that wait come first; of another at most as many as its share allows meanwhile.
    """
    ours = requests + waiting[priority]
    others = (min(count, ours * SHARES[name] / SHARES[priority]) for name, count in waiting.items() if name != priority)
    return ours + sum(others)
