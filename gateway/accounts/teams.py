# Teams: made, shown, changed and suspended by admins. Each change tells every gateway and the audit log in the
# transaction that makes it. Keys have their own file, team_keys.py.

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from ipaddress import ip_network
from typing import Any

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace
from sqlalchemy import (
    ARRAY,
    LargeBinary,
    Select,
    any_,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits, NamedLimits
from gateway.accounts.schemas import (
    NewTeam,
    TeamPatch,
    apply_limits,
    apply_model_limits,
    apply_safety,
    apply_tag_limits,
    apply_user_limits,
    check_id,
    check_models,
    check_name,
    check_webhook_url,
    check_weight,
    is_id,
)
from gateway.core.errors import Conflict
from gateway.core.principals import ACCESS_CHANNEL, Caller, Team, TeamContents
from gateway.core.settings import TeamSafety
from gateway.egress.urls import read_url
from gateway.outbox.store import follow_url
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import from_row
from gateway.storage.tables import api_keys, call_contents, teams
from protocol.errors import NotFound, Unshown

NAMED = 10  # teams that an error names
ERASED_AT_ONCE = 10_000  # contents of calls: all of a large team's would take longer than a statement may


class TeamRecord(Unshown, Struct, frozen=True, kw_only=True):
    """A team as admins see it."""

    team: Team
    created_at: datetime
    updated_at: datetime
    suspended_at: datetime | None = None
    deleted_at: datetime | None = None  # its books are still there
    webhook_url: str | None = None  # where the team's events go
    cost_centre: str | None = None  # to which its cost goes


async def create_team(
    connection: AsyncConnection,
    new: NewTeam,
    act: Act,
    models: Collection[str] | None = None,
    limitable: Collection[str] | None = None,
) -> TeamRecord:
    """Create a team. ``models``: the names it may be allowed, and ``limitable`` the models that it may have limits for,
    when they are known. Raises BadRequest, Conflict."""
    named = new if new.name is not None else replace(new, name=new.id)
    team = Team(id=check_id(new.id), name="", hash_key=secrets.token_hex(16))
    values = {"id": team.id, "hash_key": team.hash_key, **_checked(named, models, limitable, team)}
    query = insert(teams).values(**values).on_conflict_do_nothing().returning(teams)
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        words = "There is a team '{}' already. Change that one, or choose another id."
        if (await find_team(connection, new.id)).deleted_at is not None:
            words = "There was a team '{}', and its books stay under that id. Choose another one."
        raise Conflict(words.format(new.id), param="id", code="team_exists")
    details = {name: value for name, value in values.items() if name not in ("id", "hash_key")}
    await _tell(connection, act, "team.created", new.id, details, {})
    return _record(row)


async def get_team(connection: AsyncConnection, team_id: str) -> TeamRecord:
    """Return a team. Raises NotFound, also for a deleted one."""
    return _record(await _find(connection, team_id, select(teams)))


async def find_team(connection: AsyncConnection, team_id: str) -> TeamRecord:
    """Return a team, or what is left of a deleted one. Raises NotFound."""
    return _record(await _find(connection, team_id, select(teams), also_deleted=True))


async def check_team(connection: AsyncConnection, team_id: str | None) -> None:
    """Raise NotFound where a team is named that never was; else its lists would be empty without a word."""
    if team_id is not None:
        await find_team(connection, team_id)


async def list_teams(
    connection: AsyncConnection, *, after: str | None = None, limit: int = 1000, search: str | None = None
) -> list[TeamRecord]:
    """Return teams in the order of their ids; ``after`` is the last one already seen, ``search`` a part of the id or
    the name."""
    query = select(teams).where(IS_THERE).order_by(teams.c.id).limit(limit)
    if search is not None:
        held = (column.icontains(search, autoescape=True) for column in (teams.c.id, teams.c.name))
        query = query.where(or_(*held))
    if after is not None:
        query = query.where(teams.c.id > after)
    return [_record(row) for row in (await connection.execute(query)).mappings()]


async def update_team(
    connection: AsyncConnection,
    team_id: str,
    patch: TeamPatch,
    act: Act,
    models: Collection[str] | None = None,
    limitable: Collection[str] | None = None,
) -> TeamRecord:
    """Change the fields that ``patch`` names, and leave the rest. Raises BadRequest, NotFound."""
    if patch.model_limits:  # before the team's row: writers of rows take these two in this order
        await connection.execute(_HOLD_LEDGER)
    # The lock leaves room for rows that refer to the team: their writers may have to wait for the ledger after them.
    before = await _find(connection, team_id, select(teams).with_for_update(key_share=True))
    changes = _changes(patch, before, models, limitable)
    if not changes:
        return _record(before)
    change = update(teams).where(teams.c.id == team_id).values(**changes, updated_at=func.now()).returning(teams)
    row = (await connection.execute(change)).mappings().one()
    if "limits" in changes:
        await follow_limits(connection, f"team:{team_id}")
    if "model_limits" in changes:
        named = [name for name in changes["model_limits"] if name not in before["model_limits"]]
        if named:
            await connection.execute(_BEGIN_MODEL_LIMITS, {"team_id": team_id, "models": named})
        for name in changes["model_limits"]:
            await follow_limits(connection, f"model:{team_id}/{name}")
    if "user_limits" in changes or "tag_limits" in changes:
        await connection.execute(_FOLLOW_VALUE_LIMITS, {"team_id": team_id})
    if "contents" in changes:
        await _erase_contents(connection, team_id, before["contents"], changes["contents"])
    if "webhook_url" in changes and before["webhook_url"] is not None:
        await follow_url(connection, team_id, before["webhook_url"], changes["webhook_url"])
    details = {name: value for name, value in changes.items() if name != "suspended_at"}
    old = {name: before[name] for name in details}
    if "suspended_at" in changes:
        details["suspended"], old["suspended"] = patch.suspended, not patch.suspended
    await _tell(connection, act, "team.updated", team_id, details, old)
    return _record(row)


async def _erase_contents(connection: AsyncConnection, team_id: str, before: object, after: object) -> None:
    """Erase what is kept of a team that wants nothing kept any more. Nothing of it is read from then on; what is too
    much for a moment the purge erases, and until then the team can have nothing kept again. Raises Conflict."""
    if before is not None and after is not None:
        return
    some = select(call_contents.c.request_id).where(call_contents.c.team_id == team_id).limit(ERASED_AT_ONCE)
    erased = await connection.execute(delete(call_contents).where(call_contents.c.request_id.in_(some)))
    if after is not None and erased.rowcount == ERASED_AT_ONCE:
        raise Conflict("What was kept of the team's calls before is still being erased. Try again in a minute.")


async def find_callers(connection: AsyncConnection, digests: Sequence[bytes]) -> dict[bytes, Caller]:
    """Return the callers of keys with these digests; the query text never varies. The reader checks expiry."""
    given = any_(bindparam("digests", type_=ARRAY(LargeBinary)))
    query = _FIND_CALLER.where(or_(api_keys.c.digest == given, api_keys.c.previous_digest == given))
    found: dict[bytes, Caller] = {}
    for row in (await connection.execute(query, {"digests": digests})).mappings():
        found[row["digest"]] = caller = _caller(row)
        if row["previous_digest"] is not None:  # a secret that was replaced ends before its key does
            until = row["previous_until"].timestamp()
            ends = until if caller.expires_at is None else min(until, caller.expires_at)
            found[row["previous_digest"]] = replace(caller, expires_at=ends)
    return found


async def find_caller_of_key(connection: AsyncConnection, key_id: str, *, also_revoked: bool = False) -> Caller | None:
    """Return the caller of the key with this id, or ``None`` for a revoked one, unless it is ``also_revoked``."""
    query = (_FIND_ANY_CALLER if also_revoked else _FIND_CALLER).where(api_keys.c.id == bindparam("key_id"))
    row = (await connection.execute(query, {"key_id": key_id})).mappings().one_or_none()
    return None if row is None else _caller(row)


def _caller(row: Mapping[Any, Any]) -> Caller:
    expires_at = None if row["expires_at"] is None else row["expires_at"].timestamp()
    models, ranges, endpoints = row["key_models"], row["key_addresses"], row["key_endpoints"]
    return from_row(
        Caller,
        row,
        secret=None,
        team=_team(row),
        key_limits=read_limits(row["key_limits"]),
        key_models=None if models is None else frozenset(models),
        key_endpoints=None if endpoints is None else frozenset(endpoints),
        addresses=None if ranges is None else tuple(map(ip_network, ranges)),
        expires_at=expires_at,
    )


async def announce(connection: AsyncConnection, team_id: str) -> None:
    """Tell every gateway, when this transaction commits, to forget what it remembers of a team."""
    await connection.execute(_NOTIFY, {"channel": ACCESS_CHANNEL, "payload": team_id})


async def follow_limits(connection: AsyncConnection, scope: str) -> None:
    """Let the open balances of a scope have the caps that its row has now."""
    await connection.execute(_FOLLOW_LIMITS, {"scope": scope})


async def some_teams(connection: AsyncConnection) -> Sequence[str]:
    """Return the ids of the first teams: one more than an error names."""
    some = await connection.execute(select(teams.c.id).where(IS_THERE).order_by(teams.c.id).limit(NAMED + 1))
    return some.scalars().all()


def named(found: Sequence[str]) -> str:
    """Return teams as an error names them."""
    return ", ".join(found[:NAMED]) + (", …" if len(found) > NAMED else "")


def read_limits(stored: Any) -> Limits:
    """Return limits from their column."""
    return msgspec.convert(stored, Limits)


async def _find(
    connection: AsyncConnection, team_id: str, query: Select[Any], *, also_deleted: bool = False
) -> Mapping[Any, Any]:
    if is_id(team_id):
        row = (await connection.execute(query.where(teams.c.id == team_id))).mappings().one_or_none()
        if row is not None and (also_deleted or row["deleted_at"] is None):
            return row
    found = await some_teams(connection)
    words = f"There is no team '{team_id[:100]}'" + (f"; there are {named(found)}." if found else ", and no other yet.")
    raise NotFound(words, param="team_id", code="team_not_found")


async def _tell(
    connection: AsyncConnection, act: Act, action: str, team_id: str, values: dict[str, Any], old: dict[str, Any]
) -> None:
    """Tell every gateway, and the audit log what of ``values`` differs from the ``old`` ones, with those ``before``."""
    await announce(connection, team_id)
    new = msgspec.to_builtins(values)
    details = _unnamed(_differing(new, old))
    if before := _unnamed(_differing(old, new)):
        details["before"] = before
    if details:
        await record_act(connection, act, action, team_id=team_id, subject=team_id, details=details)


def _differing(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``values`` has and ``others`` have not, at any depth."""
    differ = {name: value for name, value in values.items() if value != others.get(name)}
    parts = {
        name: _differing(value, others.get(name) or {}) if isinstance(value, dict) else value
        for name, value in differ.items()
    }
    return {name: part for name, part in parts.items() if part != {}}


def _unnamed(details: dict[str, Any]) -> dict[str, Any]:
    """Return details without what the audit log may not hold."""
    if details.get("webhook_url") is not None:  # paths and queries of webhooks are often secret
        details["webhook_url"] = read_url(details["webhook_url"]).shown
    for limits in (details.get("user_limits", {}), *details.get("tag_limits", {}).values()):
        for which, one in limits.items():  # who they are is the team's to know
            limits[which] = one.get("limits", {})
    return details


def _changes(
    patch: TeamPatch, before: Mapping[Any, Any], models: Collection[str] | None, limitable: Collection[str] | None
) -> dict[str, Any]:
    changes = _checked(patch, models, limitable, _team(before))
    if "webhook_url" in changes and changes["webhook_url"] == before["webhook_url"]:
        del changes["webhook_url"]
    if patch.suspended is not UNSET and patch.suspended != (before["suspended_at"] is not None):
        changes["suspended_at"] = func.now() if patch.suspended else None
    return changes


def _checked(
    wanted: NewTeam | TeamPatch,
    models: Collection[str] | None,
    limitable: Collection[str] | None,
    before: Team = Team(id="", name=""),  # noqa: B008  (frozen)
) -> dict[str, Any]:
    """Return the columns that ``wanted`` names; a policy and limits are changes of those before. Raises BadRequest."""
    checks: dict[str, Callable[[Any], Any]] = {
        "name": check_name,
        "weight": check_weight,
        "allowed_models": lambda said: check_models(said, models),
        "allow_smaller": bool,
        "safety": lambda said: apply_safety(said, before.safety),
        "limits": lambda said: apply_limits(said, before.limits),
        "model_limits": lambda said: apply_model_limits(said, before.model_limits, limitable),
        "user_limits": lambda said: apply_user_limits(said, before),
        "tag_limits": lambda said: apply_tag_limits(said, before),
        "calls_without_user": str,
        "webhook_url": check_webhook_url,
        "cost_centre": lambda said: check_name(said or "", "cost_centre") or None,
        "company_keys": str,
        "own_key_cost": str,
        "contents": lambda said: said,
    }
    said = {name: getattr(wanted, name) for name in checks}
    return {name: checks[name](value) for name, value in said.items() if value is not UNSET}


def _record(row: Mapping[Any, Any]) -> TeamRecord:
    return from_row(TeamRecord, row, team=_team(row))


def _team(row: Mapping[Any, Any]) -> Team:
    allowed = row["allowed_models"]
    return from_row(
        Team,
        row,
        allowed_models=None if allowed is None else frozenset(allowed),
        safety=_safety(row["safety"]),
        limits=read_limits(row["limits"]),
        model_limits={name: read_limits(one) for name, one in row["model_limits"].items()},
        user_limits=_named(row["user_limits"]),
        tag_limits={key: _named(of) for key, of in row["tag_limits"].items()},
        provider_keys=read_provider_keys(row.get("provider_keys")),
        contents=None if row["contents"] is None else msgspec.convert(row["contents"], TeamContents),
        is_suspended=row["suspended_at"] is not None,
    )


def read_provider_keys(stored: Any) -> dict[str, tuple[tuple[str, bytes], ...]]:
    """Return a team's own keys by provider, as ``PROVIDER_KEYS`` finds them."""
    found: dict[str, tuple[tuple[str, bytes], ...]] = {}
    for provider, ident, sealed in stored or ():
        found[provider] = (*found.get(provider, ()), (ident, bytes.fromhex(sealed)))
    return found


def _named(stored: Any) -> dict[str, NamedLimits]:
    return msgspec.convert(stored, dict[str, NamedLimits])


def _safety(stored: Any) -> TeamSafety | None:
    return None if stored is None else msgspec.convert(stored, TeamSafety)


IS_THERE = teams.c.deleted_at.is_(None)
_FOLLOW_LIMITS = text("SELECT follow_limits(:scope)")  # the caps of its open balances
_FOLLOW_VALUE_LIMITS = text("SELECT follow_value_limits(:team_id)")
_HOLD_LEDGER = text("SELECT hold_ledger()")
_BEGIN_MODEL_LIMITS = text("SELECT begin_model_limits(:team_id, CAST(:models AS text[]))")
_NOTIFY = text("SELECT pg_notify(:channel, :payload)")
# The own keys of providers of the team beside it, in their order; null: none.
PROVIDER_KEYS = """
    (SELECT jsonb_agg(jsonb_build_array(own.provider, own.id, encode(own.secret, 'hex'))
                      ORDER BY own.created_at, own.id)
     FROM provider_keys AS own WHERE own.team_id = {team}.{id})
"""
_FIND_ANY_CALLER = select(
    teams,
    literal_column(PROVIDER_KEYS.format(team="teams", id="id"), JSONB).label("provider_keys"),
    api_keys.c.id.label("key_id"),
    api_keys.c.name.label("key_name"),
    api_keys.c.limits.label("key_limits"),
    api_keys.c.allowed_models.label("key_models"),
    api_keys.c.allowed_addresses.label("key_addresses"),
    api_keys.c.allowed_endpoints.label("key_endpoints"),
    api_keys.c.cache,
    api_keys.c.expires_at,
    api_keys.c.digest,
    api_keys.c.previous_digest,
    api_keys.c.previous_until,
).join_from(api_keys, teams)
_FIND_CALLER = _FIND_ANY_CALLER.where(api_keys.c.revoked_at.is_(None), IS_THERE)
