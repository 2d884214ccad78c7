# The end of a team. Its row stays, for the books speak of it, so its id is never another team's. In one transaction its
# keys die, its open batches are cancelled and its secrets go; what it kept here is erased after that, a part a minute,
# what calls that still run leave behind included.

from __future__ import annotations

import structlog
from msgspec import Struct
from msgspec.structs import asdict
from sqlalchemy import TextClause, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.money import to_text
from billing.core.store_errors import told_if_away
from billing.upkeep.scope_room import scope_rooms
from gateway.accounts.teams import TeamRecord, announce, find_team, get_team
from gateway.core.errors import Conflict
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import Database
from gateway.storage.tables import teams

log = structlog.get_logger()


class Ended(Struct, frozen=True):
    """What of a team ends with it."""

    keys: int
    open_batches: int
    held_usd: str  # by calls that run, and by those that have ended and have no row yet


async def delete_team(connection: AsyncConnection, team_id: str, act: Act, confirm: str | None) -> TeamRecord:
    """Delete a team for ever; ``confirm`` is its id once more. Calls that run come to their end, and are booked. Raises
    NotFound, Conflict."""
    await connection.execute(select(teams.c.id).where(teams.c.id == team_id).with_for_update(key_share=True))
    record = await get_team(connection, team_id)
    room = (await scope_rooms(connection, {f"team:{team_id}": record.team.limits}))[f"team:{team_id}"]
    held = to_text(room.nanousd_this_month.held)
    counted = (await connection.execute(COUNTED, {"team_id": team_id})).mappings().one()
    ended = Ended(**counted, held_usd=held)
    if confirm != team_id:
        raise Conflict(
            f"A team is deleted for ever, and all that it keeps here. Of '{team_id}' would end: {ended.keys} of its "
            f"keys, {ended.open_batches} of its batches; calls that run or have just ended hold {held} USD. Confirm it "
            f"with confirm={team_id}, or `tollgate teams delete {team_id} --yes`.",
            param="confirm",
            code="confirmation_needed",
        )
    for statement in END:
        await connection.execute(statement, {"team_id": team_id})
    await announce(connection, team_id)
    details = {"name": record.team.name, **asdict(ended)}
    await record_act(connection, act, "team.deleted", team_id=team_id, subject=team_id, details=details)
    return await find_team(connection, team_id)


async def purge_deleted_teams(database: Database) -> list[str]:
    """Erase what deleted teams kept here and their calls have left since, but what still runs; return these teams. What
    cannot be erased now holds up nothing else."""
    async with database.begin() as connection:
        gone = list((await connection.execute(DELETED)).scalars())
    for table, statement, at_once in ERASE if gone else ():
        with told_if_away(log, "not_purged", what=f"{table} of deleted teams"):
            await database.purge(statement, at_once, teams=gone)
    return gone


COUNTED = text("""
    SELECT (SELECT count(*) FROM api_keys WHERE team_id = :team_id AND revoked_at IS NULL) AS keys,
           (SELECT count(*) FROM batches
            WHERE team_id = :team_id AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
           ) AS open_batches
""")
# Keys in whose accounts no batch lies at their provider that is still to be ended there.
UNNEEDED = """NOT EXISTS (
    SELECT FROM batches JOIN provider_batches AS sent ON sent.batch_id = batches.id
    WHERE batches.team_id = provider_keys.team_id AND sent.provider = provider_keys.provider AND sent.status <> 'ended'
      AND jsonb_exists(sent.target, 'own')
)"""
# Nothing of a cancelling batch starts; workers end it when what runs has come to its end.
END = (
    text("UPDATE api_keys SET revoked_at = now() WHERE team_id = :team_id AND revoked_at IS NULL"),
    text("UPDATE admin_keys SET revoked_at = now() WHERE team_id = :team_id AND revoked_at IS NULL"),
    text("""
        UPDATE batches SET status = 'cancelling', cancelling_at = now(), callback_url = NULL
        WHERE team_id = :team_id AND status IN ('validating', 'in_progress')
    """),
    text(f"DELETE FROM provider_keys WHERE team_id = :team_id AND {UNNEEDED}"),  # noqa: S608  (all of it is ours)
    text("DELETE FROM webhook_secrets WHERE team_id = :team_id"),
    text("""
        UPDATE teams
        SET deleted_at = now(), suspended_at = coalesce(suspended_at, now()), webhook_url = NULL, contents = NULL
        WHERE id = :team_id
    """),
)
DELETED = text("SELECT id FROM teams WHERE deleted_at IS NOT NULL")


def _of(
    table: str, rows: str | None = None, condition: str = "true", at_once: int = 500
) -> tuple[str, TextClause, int]:
    """Return what erases rows of deleted teams from a table, so many in one transaction."""
    where = f"team_id = ANY(CAST(:teams AS text[])) AND {condition}"
    found = f"SELECT {table}.ctid FROM {rows or table} WHERE {where} LIMIT :limit"  # noqa: S608  (all of it is ours)
    return table, text(f"DELETE FROM {table} WHERE ctid = ANY(ARRAY({found}))"), at_once  # noqa: S608


ENDED = """
    batches.status NOT IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    AND NOT EXISTS (SELECT FROM provider_batches AS sent WHERE sent.batch_id = batches.id AND sent.status <> 'ended')
"""
# By its batch: of all items together Postgres reads the table.
ITEMS = "SELECT items.ctid FROM batch_items AS items WHERE batch_id = batches.id LIMIT :limit"
# Claims of calls that run stay, and responses that run in the background, if for no longer than a day.
ERASE = (
    _of("file_chunks", "files JOIN file_chunks ON file_chunks.file_id = files.id", at_once=100),  # 50 MB
    _of("files", None, "NOT EXISTS (SELECT FROM file_chunks WHERE file_id = files.id)"),
    _of("batch_items", f"batches, LATERAL ({ITEMS}) AS batch_items", ENDED),
    _of("batches", None, f"{ENDED} AND NOT EXISTS (SELECT FROM batch_items WHERE batch_id = batches.id)"),
    _of("callbacks"),
    _of("provider_keys", None, UNNEEDED),
    _of("webhook_secrets"),
    _of("idempotency", None, "(lease_until IS NULL OR lease_until < clock_timestamp())"),
    _of("stored_responses", None, "(NOT is_open OR created_at < clock_timestamp() - interval '1 day')"),
    _of("conversations"),
    _of("call_contents"),
    _of("held_back"),
    _of("recalibrations"),
    _of("budget_alerts"),
    _of("unusual_uses"),
    _of("key_networks", "api_keys JOIN key_networks ON key_networks.key_id = api_keys.id"),
)
