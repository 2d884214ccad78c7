# When each key was last used and from where, written behind the calls: of a key in use, one row is updated about once a
# minute by all processes together. It is for people who clean up, and for what tells of unusual use; no decision of a
# call rests on it, and a crash may lose a minute.

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from hashlib import blake2b

import structlog
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert

from billing.core.store_errors import POSTGRES_AWAY
from gateway.core.client_addresses import network_of
from gateway.core.clock import Clock
from gateway.storage.database import Database
from gateway.storage.tables import key_networks

EVERY = 60.0  # seconds between writes; what is newer than the row by less is not written
MOST = 50_000  # keys that wait while Postgres is away
MOST_NETWORKS = 100  # of one key, between two writes: more are told by no signal

log = structlog.get_logger(__name__)


class KeyUses:
    """The keys that were used here and are not written yet."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._used: dict[str, float] = {}  # unix seconds
        self._networks: dict[str, set[str]] = {}  # from where, by the key's id

    def note(self, key_id: str, address: str | None = None) -> None:
        """Note that a key is used now, and from where."""
        if len(self._used) < MOST or key_id in self._used:
            self._used[key_id] = self._clock.now()
            if address and len(networks := self._networks.setdefault(key_id, set())) < MOST_NETWORKS:
                networks.add(network_of(address))

    async def run(self) -> None:
        """Write what was used, for ever."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.flush()
            except POSTGRES_AWAY as exc:
                log.warning("key_uses_wait", waiting=len(self._used), error=repr(exc))

    async def flush(self) -> None:
        """Write what was used. Raises one of POSTGRES_AWAY; it waits on."""
        used, self._used = self._used, {}
        networks, self._networks = self._networks, {}
        if not used:
            return
        day = self._clock.today()
        seen = [  # in one order at all processes: two that write the same rows must not wait for each other
            {"key_id": key_id, "day": day, "network": network}
            for key_id, theirs in sorted(networks.items())
            for network in sorted(network_hash(key_id, each) for each in theirs)
        ]
        moments = [datetime.fromtimestamp(moment, UTC) for moment in used.values()]
        try:
            values = {"ids": list(used), "moments": moments, "every": EVERY}
            async with self._database.at_once() as connection:
                for query in WRITE:
                    await connection.execute(query, values)
                if seen:
                    await connection.execute(insert(key_networks).on_conflict_do_nothing(), seen)
        except POSTGRES_AWAY:
            self._used = {**used, **self._used}
            self._networks = {**networks, **self._networks}
            raise


def network_hash(key_id: str, network: str) -> bytes:
    """Return what tells the networks of one key apart; it says nothing of them, nor of those of another key."""
    return blake2b(network.encode(), key=key_id.encode()[:64], digest_size=8).digest()


# A row that another process writes at this moment is passed by.
WRITE = [
    text(f"""
        UPDATE {table} SET last_used_at = used.at
        FROM (
            SELECT id, used.at FROM {table}
            JOIN unnest(CAST(:ids AS text[]), CAST(:moments AS timestamptz[])) AS used (id, at) USING (id)
            WHERE coalesce(last_used_at, '-infinity') < used.at - make_interval(secs => :every)
            FOR NO KEY UPDATE OF {table} SKIP LOCKED
        ) AS used
        WHERE {table}.id = used.id
    """)  # noqa: S608  (the names are ours)
    for table in ("api_keys", "admin_keys")
]
