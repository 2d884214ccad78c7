# Keys that tokens of identity providers stand for: made when the first token comes, without a secret. What is stored in
# its place is a name that no request can carry: so they are looked up, bounded, revoked and booked as all keys are.

from __future__ import annotations

import asyncio
import math
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import urlsplit

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import POSTGRES_AWAY
from gateway.accounts.schemas import LONGEST_NAME
from gateway.accounts.teams import announce, get_team
from gateway.core.clock import Clock
from gateway.core.keys import NO_SECRET, key_digest, pepper_name
from gateway.core.principals import TokenKey
from gateway.storage.audit_log import Act, record_act
from gateway.storage.database import Database
from gateway.storage.tables import api_keys
from protocol.errors import NotFound, Overloaded
from protocol.serving.deadlines import running_timeout

AT_ONCE = 2  # so that tokens for teams that are not there take few connections
WITHIN = 2.0  # seconds
AGAIN_AFTER = 10.0  # seconds
REMEMBERED = 10_000  # tries


class TokenKeys:
    """Makes keys that tokens stand for."""

    def __init__(self, database: Database, clock: Clock, pepper: str, other_peppers: Sequence[str]) -> None:
        self._database = database
        self._clock = clock
        self._peppers = (pepper, *other_peppers)
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._refused: OrderedDict[TokenKey, float] = OrderedDict()  # monotonic seconds

    async def make(self, key: TokenKey) -> bool:
        """Make a key; return whether it is there now. It is not where it was revoked, nor for an unknown team. Raises
        Overloaded."""
        if self._clock.monotonic() - self._refused.get(key, -math.inf) < AGAIN_AFTER:
            return False
        digests = [key_digest(pepper, key.secret) for pepper in self._peppers]
        try:
            async with running_timeout(WITHIN), self._at_once, self._database.begin() as connection:
                if await create_token_key(connection, self._peppers[0], key, digests):
                    return True
        except NotFound:
            pass
        except POSTGRES_AWAY as exc:
            raise Overloaded("The token cannot be checked right now: the database does not answer.") from exc
        self._refused[key] = self._clock.monotonic()
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)
        return False


async def create_token_key(connection: AsyncConnection, pepper: str, key: TokenKey, digests: Sequence[bytes]) -> bool:
    """Create the key that tokens stand for, unless it is there; return whether it works: one that is revoked never does
    again. ``digests``: of it under each pepper, the deployment's first. Raises NotFound for an unknown team."""
    await get_team(connection, key.team_id)
    known = select(api_keys.c.revoked_at).where(api_keys.c.digest.in_(digests))
    if (row := (await connection.execute(known)).first()) is not None:  # made by another call, or revoked
        return row.revoked_at is None
    key_id = f"key_{secrets.token_hex(12)}"
    said = f"tokens of {urlsplit(key.issuer).hostname}: {key.value}"[:LONGEST_NAME]
    name = said if said.isprintable() else NO_SECRET
    stored = {"digest": digests[0], "pepper": pepper_name(pepper), "prefix": NO_SECRET}
    values = {"id": key_id, "team_id": key.team_id, "name": name, **stored}
    query = insert(api_keys).values(**values).on_conflict_do_nothing().returning(api_keys.c.id)
    if (await connection.execute(query)).first() is not None:  # else another gateway has made it at this moment
        await announce(connection, key.team_id)
        details = {"name": name, "issuer": key.issuer}
        await record_act(connection, Act("system"), "key.created", team_id=key.team_id, subject=key_id, details=details)
    return True
