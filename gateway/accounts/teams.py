# Teams: made, shown, changed and suspended by admins. Each change tells every gateway and the audit log in the
# transaction that makes it. Keys have their own file, team_keys.py.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from sqlalchemy import ARRAY, LargeBinary, Select, any_, bindparam, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits
from gateway.accounts.schemas import (
    NewTeam,
    TeamPatch,
    apply_limits,
    apply_safety,
    check_id,
    check_models,
    check_name,
    check_webhook_url,
    check_weight,
    is_id,
)
from gateway.core.errors import Conflict
from gateway.core.principals import ACCESS_CHANNEL, Caller, Team
from gateway.core.settings import TeamSafety
from gateway.egress.urls import read_url
from gateway.outbox.store import follow_url
from gateway.storage.audit_log import Act, record_act
from gateway.storage.tables import api_keys, teams
from protocol.errors import NotFound


class TeamRecord(Struct, frozen=True, kw_only=True):
    """A team as admins see it."""

    team: Team
    created_at: datetime
    updated_at: datetime
    suspended_at: datetime | None = None
    webhook_url: str | None = None  # where the team's events go


async def create_team(
    connection: AsyncConnection, new: NewTeam, act: Act, models: Collection[str] | None = None
) -> TeamRecord:
    """Create a team. ``models``: the names it may be allowed, when they are known. Raises BadRequest, Conflict."""
    values: dict[str, Any] = {
        "id": check_id(new.id),
        "name": check_name(new.name if new.name is not None else new.id),
        "weight": check_weight(new.weight),
        "allowed_models": check_models(new.allowed_models, models),
        "allow_smaller": new.allow_smaller,
        "safety": apply_safety(new.safety),
        "limits": apply_limits(new.limits),
        "webhook_url": check_webhook_url(new.webhook_url),
    }
    query = insert(teams).values(**values).on_conflict_do_nothing().returning(teams)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        words = f"There is a team '{new.id}' already. Change that one, or choose another id."
        raise Conflict(words, param="id", code="team_exists")
    await _tell(connection, act, "team.created", new.id, {name: values[name] for name in values if name != "id"})
    return _record(row)


async def get_team(connection: AsyncConnection, team_id: str) -> TeamRecord:
    """Return a team. Raises NotFound."""
    return _record(await _find(connection, team_id, select(teams)))


async def list_teams(connection: AsyncConnection, *, after: str | None = None, limit: int = 1000) -> list[TeamRecord]:
    """Return teams in the order of their ids; ``after`` is the last one already seen."""
    query = select(teams).order_by(teams.c.id).limit(limit)
    if after is not None:
        query = query.where(teams.c.id > after)
    return [_record(row) for row in (await connection.execute(query)).mappings()]


async def update_team(
    connection: AsyncConnection, team_id: str, patch: TeamPatch, act: Act, models: Collection[str] | None = None
) -> TeamRecord:
    """Change the fields that ``patch`` names, and leave the rest. Raises BadRequest, NotFound."""
    before = await _find(connection, team_id, select(teams).with_for_update())
    changes = _changes(patch, before, models)
    if not changes:
        return _record(before)
    change = update(teams).where(teams.c.id == team_id).values(**changes, updated_at=func.now()).returning(teams)
    row = (await connection.execute(change)).mappings().one()
    if "limits" in changes:
        await connection.execute(_FOLLOW_LIMITS, {"scope": f"team:{team_id}"})
    if "webhook_url" in changes and before["webhook_url"] is not None:
        await follow_url(connection, team_id, before["webhook_url"], changes["webhook_url"])
    details = {name: value for name, value in changes.items() if name != "suspended_at"}
    if "suspended_at" in changes:
        details["suspended"] = patch.suspended
    await _tell(connection, act, "team.updated", team_id, details)
    return _record(row)


async def find_callers(connection: AsyncConnection, digests: Sequence[bytes]) -> dict[bytes, Caller]:
    """Return the callers of keys with these digests; the query text never varies. The reader checks expiry."""
    query = _FIND_CALLER.where(api_keys.c.digest == any_(bindparam("digests", type_=ARRAY(LargeBinary))))
    rows = (await connection.execute(query, {"digests": digests})).mappings()
    return {row["digest"]: _caller(row) for row in rows}


async def find_caller_of_key(connection: AsyncConnection, key_id: str) -> Caller | None:
    """Return the caller of the key with this id, or ``None`` for a revoked one."""
    query = _FIND_CALLER.where(api_keys.c.id == bindparam("key_id"))
    row = (await connection.execute(query, {"key_id": key_id})).mappings().one_or_none()
    return None if row is None else _caller(row)


def _caller(row: Mapping[Any, Any]) -> Caller:
    expires_at = row["expires_at"]
    return Caller(
        team=_team(row),
        key_id=row["key_id"],
        key_name=row["key_name"],
        key_limits=read_limits(row["key_limits"]),
        expires_at=None if expires_at is None else expires_at.timestamp(),
    )


async def announce(connection: AsyncConnection, team_id: str) -> None:
    """Tell every gateway, when this transaction commits, to forget what it remembers of a team."""
    await connection.execute(_NOTIFY, {"channel": ACCESS_CHANNEL, "payload": team_id})


def unknown_team(team_id: str) -> NotFound:
    """Return the error for a team that does not exist."""
    return NotFound(f"There is no team '{team_id[:100]}'.", param="team_id", code="team_not_found")


def read_limits(stored: Any) -> Limits:
    """Return limits from their column."""
    return msgspec.convert(stored, Limits)


async def _find(connection: AsyncConnection, team_id: str, query: Select[Any]) -> Mapping[Any, Any]:
    if is_id(team_id):
        row = (await connection.execute(query.where(teams.c.id == team_id))).mappings().one_or_none()
        if row is not None:
            return row
    raise unknown_team(team_id)


async def _tell(connection: AsyncConnection, act: Act, action: str, team_id: str, details: dict[str, Any]) -> None:
    await announce(connection, team_id)
    if details.get("webhook_url") is not None:  # paths and queries of webhooks are often secret
        details = {**details, "webhook_url": read_url(details["webhook_url"]).shown}
    await record_act(connection, act, action, team_id=team_id, subject=team_id, details=details)


def _changes(patch: TeamPatch, before: Mapping[Any, Any], models: Collection[str] | None) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if patch.name is not UNSET:
        changes["name"] = check_name(patch.name)
    if patch.weight is not UNSET:
        changes["weight"] = check_weight(patch.weight)
    if patch.allowed_models is not UNSET:
        changes["allowed_models"] = check_models(patch.allowed_models, models)
    if patch.allow_smaller is not UNSET:
        changes["allow_smaller"] = patch.allow_smaller
    if patch.safety is not UNSET:
        changes["safety"] = apply_safety(patch.safety, _safety(before["safety"]))
    if patch.limits is not UNSET:
        changes["limits"] = apply_limits(patch.limits, read_limits(before["limits"]))
    if patch.webhook_url is not UNSET:
        url = check_webhook_url(patch.webhook_url)
        if url != before["webhook_url"]:
            changes["webhook_url"] = url
    if patch.suspended is not UNSET and patch.suspended != (before["suspended_at"] is not None):
        changes["suspended_at"] = func.now() if patch.suspended else None
    return changes


def _record(row: Mapping[Any, Any]) -> TeamRecord:
    return TeamRecord(
        team=_team(row),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        suspended_at=row["suspended_at"],
        webhook_url=row["webhook_url"],
    )


def _team(row: Mapping[Any, Any]) -> Team:
    allowed = row["allowed_models"]
    return Team(
        id=row["id"],
        name=row["name"],
        weight=row["weight"],
        allowed_models=None if allowed is None else frozenset(allowed),
        allow_smaller=row["allow_smaller"],
        safety=_safety(row["safety"]),
        limits=read_limits(row["limits"]),
        is_suspended=row["suspended_at"] is not None,
    )


def _safety(stored: Any) -> TeamSafety | None:
    return None if stored is None else msgspec.convert(stored, TeamSafety)


_FOLLOW_LIMITS = text("SELECT follow_limits(:scope)")  # the caps of its open balances
_NOTIFY = text("SELECT pg_notify(:channel, :payload)")
_FIND_CALLER = (
    select(
        teams,
        api_keys.c.id.label("key_id"),
        api_keys.c.name.label("key_name"),
        api_keys.c.limits.label("key_limits"),
        api_keys.c.expires_at,
        api_keys.c.digest,
    )
    .join_from(api_keys, teams)
    .where(api_keys.c.revoked_at.is_(None))
)
