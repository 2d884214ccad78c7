# Shadow calls in Postgres: noted within a team's daily budget, asked as batches, compared, and then only counted.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from uuid import UUID

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.shapes import Item
from gateway.batch.store import add_items, begin_batch, make_batch
from gateway.core.clock import Clock
from gateway.dialects.chat import ENDPOINT as CHAT
from gateway.storage.database import from_row
from router.catalog.catalog import AutoRoute
from router.recalibration import Comparison

PURPOSE = {"purpose": "held_back"}  # in the metadata of the batches
AT_ONCE = 500  # calls in one transaction
TEXTS_LAST = timedelta(days=3)  # the longest that what was said is kept for a comparison that never came
MOST_COMPARISONS = 2_000  # that a curve rests on, the newest


class ShadowCall(Struct, frozen=True, kw_only=True):
    """A call that a small model answered, to be asked of a large one; if it is explored, the other way round."""

    request_id: str
    team_id: str
    key_id: str
    route: str
    score: float
    scored_by: str  # version of the complexity model
    form: bytes | None  # the numbers of form that it read, where a team's own scores are learned
    is_explored: bool
    small_model: str | None  # the one that answered; None until it has
    large_model: str | None
    body: bytes  # what is to be asked
    answer: bytes  # what the caller got
    small_nanousd: int  # what its answer cost
    large_nanousd: int
    reserved_nanousd: int  # the most that asking and judging can cost


class Asked(Struct, frozen=True, kw_only=True):
    """A shadow call whose question has ended, one way or the other."""

    request_id: UUID
    route: str
    status: str  # "asked" or "judging"
    body: bytes
    answer: bytes
    is_explored: bool
    asked_nanousd: int  # what asking the other model has cost so far
    reserved_nanousd: int
    item_status: str | None  # None: the item is gone
    response: bytes | None


class Found(Struct, frozen=True, kw_only=True):
    """What became of it: ``status`` "to_judge", "compared" or "dropped"."""

    request_id: UUID
    status: str
    reason: str | None = None
    body: bytes | None = None  # what the judge is asked
    model: str | None = None  # that was asked beside the one that had answered
    suffices: bool | None = None
    asked_nanousd: int = 0  # what that cost
    judge_nanousd: int = 0


async def note_call(connection: AsyncConnection, clock: Clock, call: ShadowCall, budget_nanousd: int) -> bool:
    """Note a call if the team's budget of the day (UTC) still has what it can cost at most; tell whether it had."""
    await connection.execute(LOCK, {"team_id": call.team_id})
    values = {name: getattr(call, name) for name in call.__struct_fields__} | {"now": clock.moment()}
    return bool((await connection.execute(NOTE, values | {"budget": budget_nanousd})).rowcount)


async def ask_waiting(connection: AsyncConnection, clock: Clock) -> int:
    """Make batches of what is to be asked, one for each key and kind of question; return how many calls."""
    rows = (await connection.execute(WAITING, {"limit": AT_ONCE})).all()
    for (team_id, key_id, status), group in groupby(rows, key=lambda row: (row.team_id, row.key_id, row.status)):
        calls = list(group)
        items = [Item(str(call.request_id), bytes(call.body)) for call in calls]
        batch = await make_batch(
            connection,
            clock,
            team_id=team_id,
            key_id=key_id,
            endpoint=CHAT.path,
            priority="low",
            metadata=PURPOSE,
            input_bytes=sum(len(item.body) for item in items),
            is_internal=True,
        )
        await add_items(connection, batch.id, 0, items)
        await begin_batch(connection, clock, batch.id, len(items), None, None)
        ids = [call.request_id for call in calls]
        next_status = "asked" if status == "waiting" else "judging"
        await connection.execute(SENT, {"ids": ids, "batch_id": batch.id, "status": next_status})
    return len(rows)


async def ended_calls(connection: AsyncConnection) -> list[Asked]:
    """Return calls whose question has ended, locked until the end of the transaction."""
    rows = (await connection.execute(ENDED, {"limit": AT_ONCE})).mappings()
    return [from_row(Asked, row) for row in rows]


async def keep_found(connection: AsyncConnection, clock: Clock, found: Sequence[Found]) -> None:
    """Store what became of calls. Of those that have ended, what was said is forgotten, and the budget has the rest."""
    for one in found:
        values = {name: getattr(one, name) for name in one.__struct_fields__} | {"now": clock.moment()}
        await connection.execute(KEEP, values | {"is_over": one.status in ("compared", "dropped")})


async def comparisons_of(
    connection: AsyncConnection, team_id: str, name: str, route: AutoRoute, scored_by: str
) -> list[Comparison]:
    """Return what was found of a team's calls on a route, the newest first.

    Others hold no more: those of models that the route has no longer, or scored by another complexity model.
    """
    values = {"team_id": team_id, "route": name, "small": list(route.small), "large": list(route.large)}
    rows = await connection.execute(COMPARISONS, values | {"scored_by": scored_by, "limit": MOST_COMPARISONS})
    return [Comparison(**row) for row in rows.mappings()]


async def counts_of(connection: AsyncConnection, team_id: str, route: str, clock: Clock) -> tuple[dict[str, int], int]:
    """Return how many of a team's calls are open, compared and dropped, and what the day's have cost or may cost."""
    rows = (await connection.execute(COUNTS, {"team_id": team_id, "route": route, "now": clock.moment()})).all()
    counts = {"open": 0, "compared": 0, "dropped": 0} | {row.kind: int(row.calls) for row in rows}
    return counts, sum(int(row.today) for row in rows)


async def purge_shadow_calls(connection: AsyncConnection, clock: Clock, keep: float) -> None:
    """Drop what was not compared for days, and rows that are older than usage records are kept (``keep`` seconds)."""
    now = clock.moment()
    await connection.execute(GIVE_UP, {"before": now - TEXTS_LAST, "now": now})
    await connection.execute(PURGE, {"before": now - timedelta(seconds=keep)})


LOCK = text("SELECT pg_advisory_xact_lock(hashtext('held_back ' || CAST(:team_id AS text)))")
NOTE = text("""
    INSERT INTO held_back (request_id, team_id, key_id, route, score, scored_by, form, is_explored, small_model,
                           large_model, status, body, answer, small_nanousd, large_nanousd, reserved_nanousd,
                           created_at)
    SELECT CAST(:request_id AS uuid), :team_id, :key_id, :route, :score, :scored_by, :form, :is_explored,
           :small_model, :large_model, 'waiting', :body, :answer, :small_nanousd, :large_nanousd,
           CAST(:reserved_nanousd AS bigint), :now
    WHERE CAST(:reserved_nanousd AS bigint) + (
        SELECT coalesce(sum(reserved_nanousd), 0) FROM held_back
        WHERE team_id = :team_id AND route = :route AND created_at >= date_trunc('day', CAST(:now AS timestamptz))
    ) <= :budget
    ON CONFLICT DO NOTHING
""")
WAITING = text("""
    SELECT request_id, team_id, key_id, status, body FROM held_back WHERE request_id IN (
        SELECT request_id FROM held_back WHERE status IN ('waiting', 'to_judge')
        ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED
    )
    ORDER BY team_id, key_id, status, created_at
""")
SENT = text("""
    UPDATE held_back SET status = sent.status, batch_id = :batch_id, position = sent.place - 1
    FROM (SELECT CAST(:status AS text) AS status, id, place
          FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS each (id, place)) AS sent
    WHERE request_id = sent.id
""")
ENDED = text("""
    SELECT held_back.request_id, route, held_back.status, held_back.body, answer, is_explored,
           CASE WHEN is_explored THEN small_nanousd ELSE large_nanousd END AS asked_nanousd,
           reserved_nanousd, item.status AS item_status, item.response
    FROM held_back
    LEFT JOIN batch_items AS item ON item.batch_id = held_back.batch_id AND item.position = held_back.position
    WHERE held_back.status IN ('asked', 'judging') AND coalesce(item.status, '') NOT IN ('queued', 'running')
    ORDER BY created_at LIMIT :limit FOR UPDATE OF held_back SKIP LOCKED
""")
KEEP = text("""
    UPDATE held_back
    SET status = :status, reason = :reason, suffices = :suffices, batch_id = NULL, position = NULL,
        body = CAST(:body AS bytea), answer = CASE WHEN :is_over THEN NULL ELSE answer END,
        small_model = CASE WHEN is_explored THEN coalesce(:model, small_model) ELSE small_model END,
        large_model = CASE WHEN is_explored THEN large_model ELSE coalesce(:model, large_model) END,
        small_nanousd = small_nanousd + CASE WHEN is_explored THEN :asked_nanousd ELSE 0 END,
        large_nanousd = large_nanousd + CASE WHEN is_explored THEN 0 ELSE :asked_nanousd END,
        judge_nanousd = judge_nanousd + :judge_nanousd,
        reserved_nanousd = CASE WHEN :is_over
                                THEN CASE WHEN is_explored THEN small_nanousd ELSE large_nanousd END + :asked_nanousd
                                     + judge_nanousd + :judge_nanousd
                                ELSE reserved_nanousd END,
        ended_at = CASE WHEN :is_over THEN CAST(:now AS timestamptz) END
    WHERE request_id = :request_id
""")
COMPARISONS = text("""
    SELECT score, suffices, small_nanousd, large_nanousd, is_explored, form FROM held_back
    WHERE team_id = :team_id AND route = :route AND status = 'compared' AND scored_by = :scored_by
        AND small_model = ANY(:small) AND large_model = ANY(:large)
    ORDER BY created_at DESC LIMIT :limit
""")
COUNTS = text("""
    SELECT CASE WHEN status IN ('compared', 'dropped') THEN status ELSE 'open' END AS kind, count(*) AS calls,
           coalesce(sum(reserved_nanousd) FILTER (
               WHERE created_at >= date_trunc('day', CAST(:now AS timestamptz))), 0) AS today
    FROM held_back WHERE team_id = :team_id AND route = :route GROUP BY 1
""")
GIVE_UP = text("""
    UPDATE held_back SET status = 'dropped', reason = 'too_late', body = NULL, answer = NULL, ended_at = :now
    WHERE status NOT IN ('compared', 'dropped') AND created_at < :before
""")
PURGE = text("""
    DELETE FROM held_back WHERE request_id IN (SELECT request_id FROM held_back WHERE created_at < :before LIMIT 5000)
""")
