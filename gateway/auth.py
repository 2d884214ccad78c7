# API key -> Caller or Admin, and the guards on routes. Keys are looked up whole, by their digest; what is known is
# remembered until Postgres announces a change, so a revoked key is refused within a second.

from __future__ import annotations

import asyncio
import hmac
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import asyncpg
import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from billing.errors import RateLimited
from billing.store_errors import POSTGRES_AWAY
from gateway.access import ACCESS_CHANNEL, Admin, Caller
from gateway.clock import Clock
from gateway.database import DRIVER_ERRORS, Database
from gateway.errors import Forbidden, InvalidKey, Overloaded, TeamSuspended
from gateway.keys import ADMIN_KEY_PREFIX, KEY_PREFIX, fingerprint, key_digest
from gateway.team_keys import move_key
from gateway.teams import find_caller

log = structlog.get_logger()

REMEMBERED = 50_000  # keys, known and unknown together
LONGEST_MEMORY = 86_400.0  # seconds after Postgres was last heard of that a key is still trusted
UNKNOWN_FOR = 10.0  # seconds that a key stays unknown without asking again
LOOKUP_WITHIN = 2.0  # seconds
QUICK_LOOKUP = 0.5  # seconds, for a key that was known a moment ago
AWAY_FOR = 1.0  # seconds between tries while Postgres does not answer
FAILURES_PER_ADDRESS = 20  # lookups that may fail in a row from one address …
MOST_FAILURES = 50.0  # that are remembered, so that an address is heard again within seconds
FORGIVEN_PER_SECOND = 5.0  # … and how fast they are forgotten
CHECK_LISTENER_EVERY = 1.0  # seconds

_KEY_SHAPE = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")


@dataclass(slots=True)
class _Known:
    caller: Caller | None
    loaded: float  # monotonic seconds
    generation: int


class Authenticator:
    """Knows callers by their keys. ``run`` keeps what it remembers true."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        pepper: str,
        admin_keys: Sequence[str],
        other_peppers: Sequence[str] = (),
        metrics_keys: Sequence[str] = (),
    ) -> None:
        self._database = database
        self._clock = clock
        self._pepper = pepper
        self._other_peppers = other_peppers
        self._admins = [(key_digest(pepper, key), Admin(fingerprint(key))) for key in admin_keys]
        self._scrapers = [key_digest(pepper, key) for key in metrics_keys]
        # A key of an admin's own making may be one that people think of.
        self._is_guessable = not all(key.startswith(ADMIN_KEY_PREFIX) for key in admin_keys)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: failures, as of when
        self._generation = 0  # what was loaded in an older one must be looked up again
        self._asking: dict[tuple[bytes, int], asyncio.Future[Caller | None]] = {}  # lookups that run, and of when
        self._heard = clock.monotonic()  # when Postgres last answered
        self._away_until = 0.0  # monotonic seconds: whom we know is not asked for while Postgres is away
        self.is_listening = asyncio.Event()  # set while changes are heard of

    async def identify(self, key: str | None, address: str) -> Caller | Admin:
        """Return whose key this is.

        Raises InvalidKey for none, an unknown, a revoked or an expired one; RateLimited for an address that keeps
        guessing; Overloaded when Postgres is needed to tell and does not answer.
        """
        if not key:
            raise InvalidKey("No API key was given. Send it as 'Authorization: Bearer tg-…'.")
        if _KEY_SHAPE.fullmatch(key) is None:
            return self._admin(key, address)
        caller = await self._caller(key, address)
        if caller is None or (caller.expires_at is not None and caller.expires_at <= self._clock.now()):
            raise InvalidKey("Incorrect API key provided: it is unknown, revoked or expired.")
        return caller

    def may_scrape(self, key: str) -> bool:
        """Return whether this is a key for the metrics alone."""
        digest = key_digest(self._pepper, key)
        return any(hmac.compare_digest(known, digest) for known in self._scrapers)

    async def run(self) -> None:
        """Listen for changes to teams and keys, for ever; while nobody listens, trust nothing without asking."""
        while True:
            try:
                await self._listen()
            except (OSError, TimeoutError, *DRIVER_ERRORS) as exc:
                log.warning("access_listener_lost", error=repr(exc))
            self.is_listening.clear()
            self.forget()
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        connection = await asyncpg.connect(self._database.url, timeout=LOOKUP_WITHIN)
        try:
            await connection.add_listener(ACCESS_CHANNEL, lambda *_: self.forget())
            self.forget()
            self.is_listening.set()
            while True:
                await asyncio.sleep(CHECK_LISTENER_EVERY)
                await connection.execute("SELECT 1", timeout=LOOKUP_WITHIN)
                self._heard = self._clock.monotonic()
        finally:
            with suppress(OSError, TimeoutError, *DRIVER_ERRORS):
                connection.terminate()

    def forget(self) -> None:
        """Ask anew for every key from now on: teams or keys have changed."""
        self._generation += 1

    def _admin(self, key: str, address: str) -> Admin:
        is_ours = key.startswith(ADMIN_KEY_PREFIX)
        if not is_ours and self._is_guessable:
            self._throttle(address)  # before the right one is looked for: guessing would find it all the same
        digest = key_digest(self._pepper, key)
        matches = [admin for known, admin in self._admins if hmac.compare_digest(known, digest)]
        if matches:
            return matches[0]
        if is_ours:
            self._throttle(address)
        if is_ours or self._is_guessable:
            self._count_failure(address)
        if not is_ours:
            raise InvalidKey("Incorrect API key provided: a team's key is 'tg-' and 43 characters.")
        raise InvalidKey("Incorrect API key provided: no admin has it.")

    async def _caller(self, key: str, address: str) -> Caller | None:
        digest = key_digest(self._pepper, key)
        known = self._known.get(digest)
        now = self._clock.monotonic()
        is_fresh = known is not None and known.generation == self._generation
        if known is not None and is_fresh and (known.caller is not None or now - known.loaded < UNKNOWN_FOR):
            return known.caller
        remembered = known.caller if known is not None and now - self._heard < LONGEST_MEMORY else None
        if remembered is None:
            self._throttle(address)
        elif now < self._away_until:
            return remembered
        patience = LOOKUP_WITHIN if remembered is None else QUICK_LOOKUP
        try:
            async with asyncio.timeout(patience):
                caller = await self._look_up(digest, key)
        except POSTGRES_AWAY as exc:
            self._away_until = self._clock.monotonic() + AWAY_FOR
            if remembered is not None:
                return remembered
            raise Overloaded("The key cannot be checked right now: the database does not answer.") from exc
        if caller is None:
            self._count_failure(address)
        return caller

    async def _look_up(self, digest: bytes, key: str) -> Caller | None:
        """Ask the database, or wait for whoever asks the same: a burst under one key takes one connection."""
        which = (digest, self._generation)
        asking = self._asking.get(which)
        if asking is None:
            asking = self._asking[which] = asyncio.ensure_future(self._ask(*which, key))
            asking.add_done_callback(lambda done: self._asked(which, done))
        await asyncio.wait((asking,))  # who leaves does not take the lookup from the others
        return asking.result()

    async def _ask(self, digest: bytes, generation: int, key: str) -> Caller | None:
        now = self._clock.monotonic()
        others = [key_digest(pepper, key) for pepper in self._other_peppers]
        async with asyncio.timeout(LOOKUP_WITHIN), self._database.begin() as connection:
            caller = await find_caller(connection, digest, *others)
            if caller is not None and others:
                await move_key(connection, others, digest, self._pepper)
        self._heard = now
        self._remember(digest, _Known(caller, now, generation))
        return caller

    def _asked(self, which: tuple[bytes, int], done: asyncio.Future[Caller | None]) -> None:
        self._asking.pop(which, None)
        if not done.cancelled():
            done.exception()  # seen, even if nobody waits any more

    def _remember(self, digest: bytes, known: _Known) -> None:
        self._known[digest] = known
        self._known.move_to_end(digest)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _throttle(self, address: str) -> None:
        if self._failures_of(address) >= FAILURES_PER_ADDRESS:
            raise RateLimited(
                "Too many wrong API keys came from this address. Try again in a second.", headers={"retry-after": "1"}
            )

    def _count_failure(self, address: str) -> None:
        count = min(self._failures_of(address) + 1, MOST_FAILURES)
        self._failures[address] = (count, self._clock.monotonic())
        self._failures.move_to_end(address)
        if len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def _failures_of(self, address: str) -> float:
        count, since = self._failures.get(address, (0.0, 0.0))
        return max(0.0, count - FORGIVEN_PER_SECOND * (self._clock.monotonic() - since))


Connection = ASGIConnection


async def team_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Let teams in, by a key of theirs."""
    caller = await _identify(connection)
    if isinstance(caller, Admin):
        raise Forbidden("This is a team's route: call it with a team's key, not an admin's.")
    if caller.team.is_suspended:
        raise TeamSuspended(f"The team '{caller.team.id}' is suspended. Ask an admin of this gateway.")
    claimed = connection.headers.get("x-team-id")
    if claimed is not None and claimed != caller.team.id:
        raise Forbidden("The x-team-id header names another team than the key's own.", param="x-team-id")


async def admin_guard(connection: Connection, _: BaseRouteHandler) -> None:
    """Let admins in."""
    if isinstance(await _identify(connection), Caller):
        raise Forbidden("This route needs an admin key.")


async def metrics_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Let admins in, and keys that open nothing else."""
    auth: Authenticator = connection.app.state.services.auth
    key = read_key(connection)
    if key is None or not auth.may_scrape(key):
        await admin_guard(connection, handler)


async def team_or_admin_guard(connection: Connection, handler: BaseRouteHandler) -> None:
    """Let teams and admins in; the route decides what a team may see."""
    await _identify(connection)


async def open_guard(_: Connection, __: BaseRouteHandler) -> None:
    """Let everybody in: health checks and the page for people."""


GUARDS = (team_guard, admin_guard, metrics_guard, team_or_admin_guard, open_guard)


async def _identify(connection: Connection) -> Caller | Admin:
    auth: Authenticator = connection.app.state.services.auth
    address = connection.client.host if connection.client else ""
    caller = await auth.identify(read_key(connection), address)
    connection.scope["state"]["caller"] = caller
    return caller


def read_key(connection: Connection) -> str | None:
    """Return the key that a request carries, as a bearer token or in x-api-key."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return connection.headers.get("x-api-key")
