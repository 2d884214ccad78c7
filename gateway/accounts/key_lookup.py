# Asks Postgres for the owners of keys, teams' or admins': all keys that wait go into one query, and one query runs at a
# time. So unknown keys cost Postgres one connection and little else, however many come, and a right key that was never
# seen before waits for one or two queries behind any flood of wrong ones. Keys that are stored under another pepper
# move after the answer, one by one: a row that is locked or a standby that takes no writes holds up no look-up.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import structlog
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.core.keys import key_digest
from gateway.storage.database import Database
from protocol.errors import Unshown
from protocol.serving.deadlines import running_timeout

KEYS_AT_ONCE = 1000
LOOKUP_WITHIN = 2.0  # seconds

Which = tuple[bytes, int]  # a key's digest, and the generation of what was known when it was asked for
T = TypeVar("T")  # whom a key belongs to

# Returns those of some digests that are known.
Find = Callable[[AsyncConnection, Sequence[bytes]], Awaitable[dict[bytes, T]]]
# Stores what has one of some digests under another one, which a pepper gives.
Move = Callable[[AsyncConnection, Sequence[bytes], bytes, str], Awaitable[None]]

log = structlog.get_logger(__name__)


class KeyLookup(Unshown, Struct, Generic[T], eq=False):
    """Finds out whose keys are. ``tell`` is called with every answer, also when its request has been cancelled."""

    _database: Database
    _pepper: str
    _other_peppers: Sequence[str]
    _find: Find[T]
    _move: Move
    _tell: Callable[[bytes, int, T | None], None]
    _asked: dict[Which, asyncio.Future[T | None]] = {}
    _waiting: dict[Which, list[bytes]] = {}  # of these, with the digests under other peppers
    _asking: asyncio.Task[None] | None = None
    _to_move: dict[bytes, list[bytes]] = {}  # digests of keys that were found under other peppers
    _moving: asyncio.Task[None] | None = None

    async def find(self, digest: bytes, key: str, generation: int, others: Sequence[bytes] = ()) -> T | None:
        """Return whose this key is, as Postgres knows it from now on. ``others``: its digests under other peppers,
        where the key itself is not. Raises one of POSTGRES_AWAY."""
        which = (digest, generation)
        asked = self._asked.get(which)
        if asked is None:
            asked = self._asked[which] = asyncio.get_running_loop().create_future()
            self._waiting[which] = [*others] or [key_digest(pepper, key) for pepper in self._other_peppers]
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask_for_all())
        await asyncio.wait((asked,))  # a cancelled request does not take the answer from the others
        return asked.result()

    async def _ask_for_all(self) -> None:
        try:
            while self._waiting:
                turn = list(self._waiting)[:KEYS_AT_ONCE]
                keys = {which: self._waiting.pop(which) for which in turn}
                try:
                    found = await self._ask(keys)
                except Exception as exc:
                    for asked in map(self._asked.pop, turn):
                        asked.set_exception(exc)
                        asked.exception()  # retrieved, even if no request waits any more
                    continue
                for which in turn:
                    self._tell(*which, found.get(which))
                    self._asked.pop(which).set_result(found.get(which))
        finally:
            self._asking = None
            for asked in self._asked.values():  # the gateway closes
                asked.cancel()

    async def _ask(self, keys: dict[Which, list[bytes]]) -> dict[Which, T]:
        digests = [digest for (own, _), others in keys.items() for digest in (own, *others)]
        found: dict[Which, T] = {}
        async with running_timeout(LOOKUP_WITHIN), self._database.begin() as connection:
            known = await self._find(connection, digests)
            for which, others in keys.items():
                if which[0] in known:
                    found[which] = known[which[0]]
                elif owner := next((known[other] for other in others if other in known), None):
                    found[which] = owner
                    self._to_move[which[0]] = others
        if self._to_move and self._moving is None:
            self._moving = asyncio.create_task(self._move_all())
        return found

    async def _move_all(self) -> None:
        """Store keys under our own pepper. One that fails is tried again when it is next looked up."""
        try:
            while self._to_move:
                digest, others = self._to_move.popitem()
                try:
                    async with running_timeout(LOOKUP_WITHIN), self._database.begin() as connection:
                        await self._move(connection, others, digest, self._pepper)
                except Exception as exc:
                    log.warning("key_not_moved", error=type(getattr(exc, "orig", None) or exc).__name__)
        finally:
            self._moving = None
