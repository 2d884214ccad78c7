# The secrets that sign a team's callbacks: made for it, shown once, stored sealed. Two may be valid, so that one can
# replace the other without a receiver missing an event.

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

import structlog
from msgspec import Struct
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.teams import get_team
from gateway.core.errors import Conflict
from gateway.outbox.signing import shown_secret
from gateway.outbox.store import hasten
from gateway.storage.audit_log import Act, record_act
from gateway.storage.encryption import Sealer, Unsealable
from gateway.storage.tables import teams, webhook_secrets
from protocol.errors import NotFound, Unshown

PURPOSE = "webhook-secret"  # of the sealer
MOST_SECRETS = 2
SECRET_BYTES = 32

log = structlog.get_logger()


class SecretRecord(Struct, frozen=True):
    """A secret as admins see it after its creation."""

    id: str  # "whs_…"
    team_id: str
    created_at: datetime


class NewSecret(Unshown, Struct, frozen=True):
    """A secret at its creation, the only time it is shown."""

    record: SecretRecord
    secret: str  # "whsec_…"


async def create_secret(connection: AsyncConnection, sealer: Sealer, team_id: str, act: Act) -> NewSecret:
    """Make a secret for a team; what waited for one goes out now. Raises NotFound, Conflict for a third."""
    await get_team(connection, team_id)
    await connection.execute(select(teams.c.id).where(teams.c.id == team_id).with_for_update())
    there = await list_secrets(connection, team_id)
    if len(there) >= MOST_SECRETS:
        names = " and ".join(each.id for each in there)
        words = f"The team has {MOST_SECRETS} webhook secrets, {names}. Delete the one that no receiver uses any more."
        raise Conflict(words, code="too_many_webhook_secrets")
    secret_id, secret = f"whs_{secrets.token_hex(12)}", secrets.token_bytes(SECRET_BYTES)
    row = {"id": secret_id, "team_id": team_id, "secret": sealer.seal(secret, secret_id)}
    query = insert(webhook_secrets).values(**row).returning(webhook_secrets.c.created_at)
    created_at = (await connection.execute(query)).scalar_one()
    await hasten(connection, team_id)
    await record_act(connection, act, "webhook_secret.created", team_id=team_id, subject=secret_id)
    return NewSecret(SecretRecord(secret_id, team_id, created_at), shown_secret(secret))


async def list_secrets(connection: AsyncConnection, team_id: str) -> list[SecretRecord]:
    """Return what is known of a team's secrets, oldest first."""
    query = select(webhook_secrets.c.id, webhook_secrets.c.team_id, webhook_secrets.c.created_at)
    query = query.where(webhook_secrets.c.team_id == team_id).order_by(
        webhook_secrets.c.created_at, webhook_secrets.c.id
    )
    return [SecretRecord(*row) for row in await connection.execute(query)]


async def delete_secret(connection: AsyncConnection, team_id: str, secret_id: str, act: Act) -> None:
    """End a secret: no try from now on is signed with it. Raises NotFound."""
    await get_team(connection, team_id)
    mine = (webhook_secrets.c.team_id == team_id, webhook_secrets.c.id == secret_id)
    if (await connection.execute(delete(webhook_secrets).where(*mine))).rowcount == 0:
        raise NotFound(
            f"The team '{team_id}' has no webhook secret '{secret_id[:100]}'.",
            param="secret_id",
            code="webhook_secret_not_found",
        )
    await record_act(connection, act, "webhook_secret.deleted", team_id=team_id, subject=secret_id)


async def load_secrets(connection: AsyncConnection, sealer: Sealer, team_ids: Sequence[str]) -> dict[str, list[bytes]]:
    """Return the secrets of some teams, oldest first. One that does not open is logged and left out."""
    found: dict[str, list[bytes]] = defaultdict(list)
    query = select(webhook_secrets.c.id, webhook_secrets.c.team_id, webhook_secrets.c.secret)
    query = query.where(webhook_secrets.c.team_id.in_(set(team_ids))).order_by(webhook_secrets.c.created_at)
    for secret_id, team_id, sealed in await connection.execute(query):
        try:
            found[team_id].append(sealer.unseal(bytes(sealed), secret_id))
        except Unsealable as exc:
            log.error("webhook_secret_does_not_open", secret_id=secret_id, team_id=team_id, reason=str(exc))
    return found


async def reseal_secrets(connection: AsyncConnection, sealer: Sealer) -> int:
    """Seal what is under another pepper under the one in force, and return how many. What does not open stays."""
    secret, count = webhook_secrets.c, 0
    for secret_id, sealed in (await connection.execute(select(secret.id, secret.secret).with_for_update())).all():
        with suppress(Unsealable):
            anew = sealer.reseal(bytes(sealed), secret_id)
            if anew != sealed:
                await connection.execute(update(webhook_secrets).where(secret.id == secret_id).values(secret=anew))
                count += 1
    return count
