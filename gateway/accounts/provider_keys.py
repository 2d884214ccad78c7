# Keys of providers that teams bring: stored sealed, listed by their fingerprint, replaced and revoked. Which calls go
# with them gateway/upstreams/team_keys.py says. Each change tells every gateway and the audit log in the transaction
# that makes it; the key itself is in no answer, no log and no entry.

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.schemas import NewProviderKey, ProviderKeyRotation, check_name, check_provider_key
from gateway.accounts.teams import announce, get_team
from gateway.core.errors import Conflict
from gateway.core.keys import label_of_provider_key, provider_fingerprint
from gateway.storage.audit_log import Act, record_act
from gateway.storage.encryption import Sealer, Unsealable
from gateway.storage.tables import provider_keys, teams
from protocol.errors import NotFound

MOST_KEYS = 5  # of one team at one provider


class ProviderKeyRecord(Struct, frozen=True, kw_only=True):
    """A team's key of a provider as admins see it."""

    id: str  # "pvk_…"
    team_id: str
    provider: str
    name: str
    fingerprint: str  # the first 8 digits of the key's SHA-256
    created_at: datetime
    rotated_at: datetime | None


async def create_provider_key(
    connection: AsyncConnection, sealer: Sealer, team_id: str, new: NewProviderKey, act: Act
) -> ProviderKeyRecord:
    """Store a team's key of a provider. Raises BadRequest, NotFound, and Conflict for one it has, or too many."""
    key, name = check_provider_key(new.key), check_name(new.name)
    await get_team(connection, team_id)
    await connection.execute(select(teams.c.id).where(teams.c.id == team_id).with_for_update(key_share=True))
    there = [each for each in await list_provider_keys(connection, team_id) if each.provider == new.provider]
    _refuse_known(there, key)
    if len(there) >= MOST_KEYS:
        words = f"The team has {MOST_KEYS} keys for {new.provider}, the most there may be. Revoke one, or rotate it."
        raise Conflict(words, code="too_many_provider_keys")
    ident = f"pvk_{secrets.token_hex(12)}"
    values = {
        "id": ident,
        "team_id": team_id,
        "provider": new.provider,
        "name": name,
        **_sealed(sealer, team_id, ident, key),
    }
    row = (await connection.execute(insert(provider_keys).values(**values).returning(*_SHOWN))).mappings().one()
    return await _tell(connection, act, "provider_key.created", ProviderKeyRecord(**row))


async def list_provider_keys(connection: AsyncConnection, team_id: str) -> list[ProviderKeyRecord]:
    """Return what is known of a team's keys, in the order in which they are used."""
    query = select(*_SHOWN).where(provider_keys.c.team_id == team_id)
    query = query.order_by(provider_keys.c.provider, provider_keys.c.created_at, provider_keys.c.id)
    return [ProviderKeyRecord(**row) for row in (await connection.execute(query)).mappings()]


async def rotate_provider_key(
    connection: AsyncConnection, sealer: Sealer, team_id: str, ident: str, rotation: ProviderKeyRotation, act: Act
) -> ProviderKeyRecord:
    """Put another key in the place of one. Calls that run end with the one before. Raises BadRequest, NotFound,
    Conflict."""
    key = check_provider_key(rotation.key)
    await get_team(connection, team_id)
    await connection.execute(select(teams.c.id).where(teams.c.id == team_id).with_for_update(key_share=True))
    there = await list_provider_keys(connection, team_id)
    old = next((each for each in there if each.id == ident), None)
    if old is None:
        raise _unknown(team_id, ident)
    _refuse_known([each for each in there if each.provider == old.provider], key)
    change = update(provider_keys).where(provider_keys.c.id == ident).returning(*_SHOWN)
    change = change.values(**_sealed(sealer, team_id, ident, key), rotated_at=func.now())
    row = (await connection.execute(change)).mappings().one()
    details = {"replaced": old.fingerprint}
    return await _tell(connection, act, "provider_key.rotated", ProviderKeyRecord(**row), details)


async def revoke_provider_key(connection: AsyncConnection, team_id: str, ident: str, act: Act) -> ProviderKeyRecord:
    """Erase a key. Raises NotFound."""
    await get_team(connection, team_id)
    mine = provider_keys.c.team_id == team_id, provider_keys.c.id == ident
    row = (await connection.execute(delete(provider_keys).where(*mine).returning(*_SHOWN))).mappings().one_or_none()
    if row is None:
        raise _unknown(team_id, ident)
    return await _tell(connection, act, "provider_key.revoked", ProviderKeyRecord(**row))


async def reseal_provider_keys(connection: AsyncConnection, sealer: Sealer) -> int:
    """Seal what is under another pepper under the one in force, and return how many. What does not open stays."""
    column, count = provider_keys.c, 0
    query = select(column.id, column.team_id, column.secret).with_for_update()
    for ident, team_id, sealed in (await connection.execute(query)).all():
        with suppress(Unsealable):
            anew = sealer.reseal(bytes(sealed), label_of_provider_key(team_id, ident))
            if anew != sealed:
                await connection.execute(update(provider_keys).where(column.id == ident).values(secret=anew))
                await announce(connection, team_id)
                count += 1
    return count


def _sealed(sealer: Sealer, team_id: str, ident: str, key: str) -> dict[str, Any]:
    sealed = sealer.seal(key.encode(), label_of_provider_key(team_id, ident))
    return {"secret": sealed, "fingerprint": provider_fingerprint(key)}


def _refuse_known(there: list[ProviderKeyRecord], key: str) -> None:
    mark = provider_fingerprint(key)
    if (same := next((each for each in there if each.fingerprint == mark), None)) is not None:
        words = f"The team has this key for {same.provider} already, as '{same.id}'."
        raise Conflict(words, param="key", code="provider_key_exists")


async def _tell(
    connection: AsyncConnection, act: Act, action: str, record: ProviderKeyRecord, more: Mapping[str, Any] | None = None
) -> ProviderKeyRecord:
    await announce(connection, record.team_id)
    details = {"provider": record.provider, "name": record.name, "fingerprint": record.fingerprint, **(more or {})}
    await record_act(connection, act, action, team_id=record.team_id, subject=record.id, details=details)
    return record


def _unknown(team_id: str, ident: str) -> NotFound:
    words = f"The team '{team_id}' has no provider key '{ident[:100]}'."
    return NotFound(words, param="key_id", code="provider_key_not_found")


_SHOWN = [provider_keys.c[name] for name in ProviderKeyRecord.__struct_fields__]
