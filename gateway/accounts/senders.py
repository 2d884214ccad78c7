# The caller of a batch, as it is while the batch runs: once its key is revoked or its team suspended, it sends no more.

from __future__ import annotations

from gateway.accounts.teams import find_caller_of_key
from gateway.core.clock import Clock
from gateway.core.errors import TeamSuspended
from gateway.core.principals import Caller
from gateway.storage.database import Database
from protocol.errors import InvalidKey

BELIEVED = 2.0  # seconds for which what was read of a caller holds


class Senders:
    """Callers of batches, by key."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._known: dict[str, tuple[float, Caller | None]] = {}  # by key, and when they were read

    async def find(self, key_id: str) -> Caller:
        """Return the caller of a key. Raises InvalidKey or TeamSuspended where it may send nothing any more."""
        caller = await self._look_up(key_id)
        if caller is None or (caller.expires_at is not None and caller.expires_at <= self._clock.now()):
            raise InvalidKey("The key that sent this batch is revoked or expired.")
        if caller.team.is_suspended:
            raise TeamSuspended(f"The team '{caller.team.id}' is suspended. Ask an admin of this gateway.")
        return caller

    async def _look_up(self, key_id: str) -> Caller | None:
        now = self._clock.monotonic()
        read_at, caller = self._known.get(key_id, (float("-inf"), None))
        if now - read_at > BELIEVED:
            async with self._database.begin() as connection:
                caller = await find_caller_of_key(connection, key_id)
            self._known[key_id] = (now, caller)
        return caller
