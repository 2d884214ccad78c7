# Keys of teams: created (and shown that once), listed, changed, rotated with an overlap, revoked. What is stored is a
# digest; see keys.py. Each change tells every gateway and the audit log in the transaction that makes it.

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import UNSET, Struct
from sqlalchemy import Select, func, insert, literal, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits
from gateway.accounts.schemas import (
    LEAST_OWN_OVERLAP,
    NO_LIMITS,
    KeyPatch,
    NewKey,
    OwnRotation,
    Rotation,
    apply_limits,
    check_addresses,
    check_models,
    check_moment,
    check_name,
    check_overlap,
)
from gateway.accounts.teams import IS_THERE, announce, follow_limits, get_team, read_limits
from gateway.core.errors import Conflict
from gateway.core.keys import NO_SECRET, StoredKey, key_digest, new_key, pepper_name, shown_prefix
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import from_row
from gateway.storage.tables import api_keys, teams
from protocol.errors import NotFound, Unshown

_ID = re.compile("key_[0-9a-f]{24}")
_EDITABLE = KeyPatch.__struct_fields__  # and what a rotated key has of the old one


class KeyRecord(StoredKey, frozen=True, kw_only=True):
    """A key as admins see it; the key itself is not stored."""

    key_id: str
    team_id: str
    name: str
    prefix: str
    limits: Limits
    allowed_models: list[str] | None
    allowed_addresses: list[str] | None
    allowed_endpoints: list[str] | None
    cache: str | None
    previous_until: datetime | None = None  # how long the secret works that its team has replaced
    replaced_by: str | None = None  # the key that an admin's rotation made in its place
    pepper: str | None = None  # the name of the one that it is stored under; none: it was made before that was noted


class NewlyMade(Unshown, Struct, frozen=True, kw_only=True):
    """A key at its creation, the only time it is shown whole."""

    key: str
    record: KeyRecord
    replaces: KeyRecord | None = None  # the key that this one was rotated from, as it is now


async def create_key(
    connection: AsyncConnection, pepper: str, new: NewKey, act: Act, now: float, models: Collection[str] | None = None
) -> NewlyMade:
    """Create a key of a team. ``now`` is unix seconds, ``models`` the names that it may be allowed, when they are
    known. Raises BadRequest, NotFound."""
    values = _checked(new, _moment(now), models)
    await get_team(connection, new.team_id)
    made = await _insert(connection, pepper, new.team_id, values)
    await _tell(connection, act, "key.created", made.record, values)
    return made


async def update_key(
    connection: AsyncConnection,
    key_id: str,
    patch: KeyPatch,
    act: Act,
    now: float,
    models: Collection[str] | None = None,
) -> KeyRecord:
    """Change the fields that ``patch`` names, and leave the rest. Raises BadRequest, NotFound, and Conflict for a key
    that has ended: that it works again would surprise."""
    moment = _moment(now)
    old = await _lock_key(connection, key_id)
    if (status := old.status(moment)) != "active":
        raise Conflict(f"The key '{key_id}' is {status}. Create a new one instead.", code=f"key_{status}")
    wanted = _checked(patch, moment, models, old.limits)
    changes = {name: value for name, value in wanted.items() if value != getattr(old, name)}
    if not changes:
        return old
    query = update(api_keys).where(api_keys.c.id == key_id).values(**changes).returning(api_keys)
    record = _record((await connection.execute(query)).mappings().one())
    if "limits" in changes:
        await follow_limits(connection, f"key:{key_id}")
    await _tell(connection, act, "key.updated", record, changes)
    return record


async def rotate_key(
    connection: AsyncConnection, pepper: str, key_id: str, rotation: Rotation, act: Act, now: float
) -> NewlyMade:
    """Make a key like ``key_id``; the old one works for the overlap and no longer. Raises NotFound, Conflict."""
    moment = _moment(now)
    overlap = check_overlap(rotation.overlap)
    old = await _lock_key(connection, key_id)
    if (status := old.status(moment)) != "active":
        raise Conflict(f"The key '{key_id}' is {status}. Create a new one instead.", code=f"key_{status}")
    _check_secret(old)
    if old.replaced_by is not None and old.expires_at is not None:  # its end is no longer its own
        until = f"{old.expires_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        words = f"The key '{key_id}' was replaced by '{old.replaced_by}' and ends at {until}. Rotate that one instead."
        raise Conflict(words, code="key_rotated")
    values = {name: getattr(old, name) for name in _EDITABLE}
    if rotation.expires_at is not UNSET:
        values["expires_at"] = check_moment(rotation.expires_at, moment)
    made = await _insert(connection, pepper, old.team_id, values)
    ends = moment + timedelta(seconds=overlap)
    changes: dict[str, Any] = {"expires_at": ends if old.expires_at is None else min(ends, old.expires_at)}
    if overlap == 0:
        changes = {"revoked_at": moment}
    changes["replaced_by"] = made.record.key_id
    query = update(api_keys).where(api_keys.c.id == key_id).values(**changes).returning(api_keys)
    ended = _record((await connection.execute(query)).mappings().one())
    details = {"replaced_by": made.record.key_id, "ends_at": ended.revoked_at or ended.expires_at}
    await _tell(connection, act, "key.rotated", ended, details)
    return NewlyMade(key=made.key, record=made.record, replaces=ended)


async def replace_secret(
    connection: AsyncConnection, pepper: str, key_id: str, rotation: OwnRotation, act: Act, now: float
) -> NewlyMade:
    """Give a key another secret, at its team's own wish; the one before works for the overlap. The key stays: its id,
    bounds, expiry and what is spent of its budgets, so that no team has more by it. Raises NotFound, and Conflict
    while the secret before this one still works: the holder of that one gets no other."""
    moment = _moment(now)
    overlap = check_overlap(rotation.overlap, LEAST_OWN_OVERLAP)
    old = await _lock_key(connection, key_id)
    if (status := old.status(moment)) != "active":
        raise Conflict(f"The key '{key_id}' is {status}.", code=f"key_{status}")
    _check_secret(old)
    if old.previous_until is not None and old.previous_until > moment:
        until = f"{old.previous_until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        raise Conflict(f"This key was rotated: the secret before still works until {until}.", code="key_rotated")
    key = new_key()
    values = {
        "previous_digest": api_keys.c.digest,
        "previous_until": moment + timedelta(seconds=overlap),
        "digest": key_digest(pepper, key),
        "pepper": pepper_name(pepper),
        "prefix": shown_prefix(key),
    }
    query = update(api_keys).where(api_keys.c.id == key_id).values(**values).returning(api_keys)
    record = _record((await connection.execute(query)).mappings().one())
    details = {"replaced": old.prefix, "ends_at": record.previous_until}
    await _tell(connection, act, "key.secret_replaced", record, details)
    return NewlyMade(key=key, record=record)


async def list_keys(
    connection: AsyncConnection, *, team_id: str | None = None, after: str | None = None, limit: int = 1000
) -> list[KeyRecord]:
    """Return keys, of one team or of all that are not deleted, oldest first within a team; ``after`` is the last one
    already seen."""
    query = select(api_keys).order_by(api_keys.c.team_id, api_keys.c.created_at, api_keys.c.id).limit(limit)
    if team_id is not None:
        query = query.where(api_keys.c.team_id == team_id)
    else:
        query = query.join(teams, teams.c.id == api_keys.c.team_id).where(IS_THERE)
    if after is not None:
        seen = await get_key(connection, after)
        place = tuple_(api_keys.c.team_id, api_keys.c.created_at, api_keys.c.id)
        query = query.where(place > tuple_(literal(seen.team_id), literal(seen.created_at), literal(seen.key_id)))
    return [_record(row) for row in (await connection.execute(query)).mappings()]


async def get_key(connection: AsyncConnection, key_id: str) -> KeyRecord:
    """Return a key. Raises NotFound."""
    return await _find(connection, key_id, select(api_keys))


async def revoke_key(connection: AsyncConnection, key_id: str, act: Act) -> KeyRecord:
    """End a key at once, for ever; a revoked key stays as it was, and the key in its place goes on. Raises NotFound."""
    old = await _lock_key(connection, key_id)
    if old.revoked_at is not None:
        return old
    query = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=func.now()).returning(api_keys)
    ended = _record((await connection.execute(query)).mappings().one())
    await _tell(connection, act, "key.revoked", ended, {"name": ended.name})
    return ended


async def move_key(connection: AsyncConnection, others: Sequence[bytes], digest: bytes, pepper: str) -> None:
    """Store a key that is stored under another pepper under ``pepper``, where its digest is ``digest``."""
    values = {"digest": digest, "pepper": pepper_name(pepper)}
    await connection.execute(update(api_keys).where(api_keys.c.digest.in_(others)).values(**values))
    replaced = update(api_keys).where(api_keys.c.previous_digest.in_(others))
    await connection.execute(replaced.values(previous_digest=digest))


async def _insert(connection: AsyncConnection, pepper: str, team_id: str, editable: Mapping[str, Any]) -> NewlyMade:
    key = new_key()
    values = {
        "id": f"key_{secrets.token_hex(12)}",
        "team_id": team_id,
        "digest": key_digest(pepper, key),
        "pepper": pepper_name(pepper),
        "prefix": shown_prefix(key),
        **editable,
    }
    row = (await connection.execute(insert(api_keys).values(**values).returning(api_keys))).mappings().one()
    return NewlyMade(key=key, record=_record(row))


def _checked(
    wanted: NewKey | KeyPatch, now: datetime, models: Collection[str] | None, limits: Limits = NO_LIMITS
) -> dict[str, Any]:
    """Return the columns that ``wanted`` names; limits are changes of those before. Raises BadRequest."""
    checks: dict[str, Callable[[Any], Any]] = {
        "name": check_name,
        "expires_at": lambda said: check_moment(said, now),
        "limits": lambda said: apply_limits(said, limits),
        "allowed_models": lambda names: check_models(names, models),
        "allowed_addresses": check_addresses,
        "allowed_endpoints": lambda names: None if names is None else list(dict.fromkeys(names)),
        "cache": lambda use: use,
    }
    said = {name: getattr(wanted, name) for name in _EDITABLE}
    return {name: checks[name](value) for name, value in said.items() if value is not UNSET}


def _check_secret(record: KeyRecord) -> None:
    """Raise Conflict for a key without a secret: its team would get one that outlives every token."""
    if record.prefix == NO_SECRET:
        raise Conflict(
            f"The key '{record.key_id}' has no secret: tokens of an identity provider stand for it.",
            code="key_has_no_secret",
        )


def _moment(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)


async def _lock_key(connection: AsyncConnection, key_id: str) -> KeyRecord:
    return await _find(connection, key_id, select(api_keys).with_for_update())


async def _find(connection: AsyncConnection, key_id: str, query: Select[Any]) -> KeyRecord:
    if _ID.fullmatch(key_id):
        row = (await connection.execute(query.where(api_keys.c.id == key_id))).mappings().one_or_none()
        if row is not None:
            return _record(row)
    raise no_key(key_id)


def no_key(key_id: str) -> NotFound:
    """Return the error that tells that there is no such key."""
    return NotFound(f"There is no key '{key_id[:100]}'.", param="key_id", code="key_not_found")


async def _tell(connection: AsyncConnection, act: Act, action: str, record: KeyRecord, details: dict[str, Any]) -> None:
    await announce(connection, record.team_id)
    subject = record.key_id
    await record_act(
        connection, act, action, team_id=record.team_id, subject=subject, details={"prefix": record.prefix, **details}
    )


def _record(row: Mapping[Any, Any]) -> KeyRecord:
    return from_row(KeyRecord, row, key_id=row["id"], limits=read_limits(row["limits"]))
