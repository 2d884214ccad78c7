# Keys of people and programs that administer the gateway, each with a role: created (and shown that once), listed,
# revoked. They are stored as teams' keys are; the keys of the configuration file stand beside them, with every right.
# A session of a person who has signed in is a key, too: of a few hours, and for a cookie alone.

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import to_builtins
from sqlalchemy import ARRAY, LargeBinary, any_, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.schemas import NewAdminKey, check_moment, check_name
from gateway.accounts.teams import announce, get_team
from gateway.core.keys import (
    SESSION_PREFIX,
    StoredKey,
    key_digest,
    new_admin_key,
    new_session_token,
    pepper_name,
    shown_admin_prefix,
)
from gateway.core.principals import Admin, Person, Role
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import from_row
from gateway.storage.tables import admin_keys
from protocol.errors import NotFound, invalid_value

SESSIONS_KEPT = timedelta(days=30)  # after their end, for those who look

_ID = re.compile("adm_[0-9a-f]{24}")


class AdminKeyRecord(StoredKey, frozen=True, kw_only=True):
    """An admin key as it is listed; the key itself is not stored."""

    key_id: str
    role: Role
    team_id: str | None
    name: str
    prefix: str
    created_by: str
    person: str | None  # of a session: who has signed in


async def create_admin_key(
    connection: AsyncConnection, pepper: str, new: NewAdminKey, act: Act, now: float
) -> tuple[str, AdminKeyRecord]:
    """Create an admin key; return it, this once, and its record. ``now``: unix seconds. Raises BadRequest, NotFound."""
    if (new.role is Role.TEAM_ADMIN) != (new.team_id is not None):
        is_missing = new.team_id is None
        why = "is missing: a team's admin is of one team" if is_missing else "goes with the role team-admin alone"
        raise invalid_value("team_id", why)
    expires_at = check_moment(new.expires_at, datetime.fromtimestamp(now, UTC))
    name = check_name(new.name)
    if new.team_id is not None:
        await get_team(connection, new.team_id)
    key = new_admin_key()
    values = {
        "id": f"adm_{secrets.token_hex(12)}",
        "role": new.role.value,
        "team_id": new.team_id,
        "name": name,
        "digest": key_digest(pepper, key),
        "pepper": pepper_name(pepper),
        "prefix": shown_admin_prefix(key),
        "created_by": act.actor,
        "expires_at": expires_at,
    }
    row = (await connection.execute(insert(admin_keys).values(**values).returning(admin_keys))).mappings().one()
    record = _record(row)
    details = {"name": name, "role": new.role.value, "expires_at": expires_at}
    await _tell(connection, act, "admin_key.created", record, details)
    return key, record


async def begin_session(connection: AsyncConnection, pepper: str, person: Person, act: Act, ends_at: float) -> str:
    """Let a person in until ``ends_at`` (unix seconds); return what their cookie holds. Raises NotFound for a team that
    does not exist."""
    if person.team_id is not None:
        await get_team(connection, person.team_id)
    ended = admin_keys.c.expires_at < func.now() - SESSIONS_KEPT
    await connection.execute(delete(admin_keys).where(admin_keys.c.person.is_not(None), ended))
    token = new_session_token()
    session_id, moment = f"adm_{secrets.token_hex(12)}", datetime.fromtimestamp(ends_at, UTC)
    values = {
        "id": session_id,
        "role": person.role.value,
        "team_id": person.team_id,
        "name": person.email or person.subject,
        "digest": key_digest(pepper, token),
        "pepper": pepper_name(pepper),
        "prefix": SESSION_PREFIX,
        "created_by": act.actor,
        "person": person.name,
        "expires_at": moment,
    }
    await connection.execute(insert(admin_keys).values(**values))
    details = to_builtins({"role": person.role.value, "expires_at": moment})
    await record_act(connection, act, "session.began", team_id=person.team_id, subject=session_id, details=details)
    return token


async def list_admin_keys(
    connection: AsyncConnection, *, after: str | None = None, limit: int = 1000
) -> list[AdminKeyRecord]:
    """Return admin keys, oldest first; ``after`` is the last one already seen. Raises NotFound."""
    query = select(admin_keys).order_by(admin_keys.c.created_at, admin_keys.c.id).limit(limit)
    if after is not None:
        seen = await _find(connection, after)
        is_later = admin_keys.c.created_at > seen.created_at
        query = query.where(is_later | ((admin_keys.c.created_at == seen.created_at) & (admin_keys.c.id > seen.key_id)))
    return [_record(row) for row in (await connection.execute(query)).mappings()]


async def revoke_admin_key(connection: AsyncConnection, key_id: str, act: Act) -> AdminKeyRecord:
    """End an admin key at once, for ever; a revoked one stays as it was. Raises NotFound."""
    old = await _find(connection, key_id)
    if old.revoked_at is not None:
        return old
    query = update(admin_keys).where(admin_keys.c.id == key_id).values(revoked_at=func.now()).returning(admin_keys)
    ended = _record((await connection.execute(query)).mappings().one())
    action = "admin_key.revoked" if ended.person is None else "session.ended"
    await _tell(connection, act, action, ended, {"name": ended.name, "role": ended.role.value})
    return ended


async def find_admins(connection: AsyncConnection, digests: Sequence[bytes]) -> dict[bytes, Admin]:
    """Return the admins whose keys have these digests; the query text never varies. The reader checks expiry."""
    given = any_(bindparam("digests", type_=ARRAY(LargeBinary)))
    query = select(admin_keys).where(admin_keys.c.digest == given, admin_keys.c.revoked_at.is_(None))
    return {row["digest"]: _admin(row) for row in (await connection.execute(query, {"digests": digests})).mappings()}


async def move_admin_key(connection: AsyncConnection, others: Sequence[bytes], digest: bytes, pepper: str) -> None:
    """Store a key that is stored under another pepper under ``pepper``, where its digest is ``digest``."""
    values = {"digest": digest, "pepper": pepper_name(pepper)}
    await connection.execute(update(admin_keys).where(admin_keys.c.digest.in_(others)).values(**values))


def _admin(row: Mapping[Any, Any]) -> Admin:
    expires_at = row["expires_at"]
    return Admin(
        fingerprint=row["id"],
        role=Role(row["role"]),
        team_id=row["team_id"],
        name=row["name"],
        person=row["person"],
        expires_at=None if expires_at is None else expires_at.timestamp(),
    )


async def _find(connection: AsyncConnection, key_id: str) -> AdminKeyRecord:
    if _ID.fullmatch(key_id):
        query = select(admin_keys).where(admin_keys.c.id == key_id).with_for_update()
        row = (await connection.execute(query)).mappings().one_or_none()
        if row is not None:
            return _record(row)
    raise NotFound(f"There is no admin key '{key_id[:100]}'.", param="key_id", code="key_not_found")


async def _tell(
    connection: AsyncConnection, act: Act, action: str, record: AdminKeyRecord, details: dict[str, Any]
) -> None:
    await announce(connection, record.team_id or "")
    told = {"prefix": record.prefix, **details}
    await record_act(connection, act, action, team_id=record.team_id, subject=record.key_id, details=told)


def _record(row: Mapping[Any, Any]) -> AdminKeyRecord:
    return from_row(AdminKeyRecord, row, key_id=row["id"], role=Role(row["role"]))
