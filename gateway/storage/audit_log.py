# The audit log: what admins did and what the safety checks found, written in the transaction that it speaks of.
# Never prompts, never secrets.

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import asdict
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.upkeep.auditor import Healed
from gateway.storage.tables import audit_log


class Act(Struct, frozen=True):
    """Who acts: an admin key's fingerprint, ``cli:<user>`` or ``system``; in which request, from where, and why."""

    actor: str
    request_id: str | None = None
    address: str | None = None
    reason: str | None = None


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One line of the log."""

    id: int
    created_at: datetime
    actor: str
    action: str
    team_id: str | None
    subject: str | None
    request_id: str | None
    address: str | None
    reason: str | None
    details: Any


async def record_act(
    connection: AsyncConnection,
    act: Act,
    action: str,
    *,
    team_id: str | None = None,
    subject: str | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Write down that ``act.actor`` did ``action``, such as ``key.revoked``, to ``subject``."""
    await connection.execute(
        insert(audit_log).values(**asdict(act), action=action, team_id=team_id, subject=subject, details=details)
    )


async def record_healing(connection: AsyncConnection, healed: Healed) -> None:
    """Write down that a balance was made anew, from what to what."""
    kind, _, name = healed.scope.partition(":")
    team_id = name if kind == "team" else None
    details = to_builtins(healed)
    await record_act(
        connection, Act("system"), "balance.healed", team_id=team_id, subject=healed.scope, details=details
    )


async def list_acts(
    connection: AsyncConnection,
    *,
    team_id: str | None = None,
    action: str | None = None,
    before: int | None = None,
    after: int | None = None,
    limit: int = 100,
) -> list[AuditEntry]:
    """Return the newest entries first; ``before`` is the id of the last entry already seen.

    With ``after``, an id already seen, the entries that came next, the oldest first. No entry comes later with an id
    among those: transactions that are adding one are waited for.
    """
    order = audit_log.c.id.desc() if after is None else audit_log.c.id.asc()
    query = select(audit_log).order_by(order).limit(limit)
    if after is not None:
        await connection.execute(WAIT)
        query = query.where(audit_log.c.id > after)
    if team_id is not None:
        query = query.where(audit_log.c.team_id == team_id)
    if action is not None:
        query = query.where(audit_log.c.action == action)
    if before is not None:
        query = query.where(audit_log.c.id < before)
    return [AuditEntry(**row) for row in (await connection.execute(query)).mappings()]


async def purge_outcomes(connection: AsyncConnection, keep: float) -> int:
    """Delete what the safety checks found more than ``keep`` seconds ago; return how many. What admins did stays."""
    return int((await connection.execute(PURGE, {"keep": timedelta(seconds=keep)})).scalar_one())


WAIT = text("SELECT pg_advisory_xact_lock(hashtext('audit_log'))")
PURGE = text("SELECT delete_safety_outcomes(CAST(:keep AS interval), 5000)")
