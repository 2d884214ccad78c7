# API key -> Caller or Admin. Keys are looked up whole, by their digest; what is known is
# remembered until Postgres announces a change, so a revoked key is refused within a second.

from __future__ import annotations

import asyncio
import hmac
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import asyncpg
import structlog
from msgspec.structs import replace

from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.lease_store import TIGHT_CHANNEL
from gateway.accounts.admin_keys import find_admins, move_admin_key
from gateway.accounts.guessing import Guessing
from gateway.accounts.key_lookup import LOOKUP_WITHIN, KeyLookup
from gateway.accounts.key_uses import KeyUses
from gateway.accounts.team_keys import move_key
from gateway.accounts.teams import find_callers
from gateway.core.client_addresses import is_among
from gateway.core.clock import Clock
from gateway.core.errors import AddressNotAllowed
from gateway.core.keys import (
    ADMIN_KEY_PREFIX,
    JWT_PREFIX,
    KEY_PREFIX,
    SECRET_PREFIX,
    SESSION_PREFIX,
    fingerprint,
    key_digest,
)
from gateway.core.principals import ACCESS_CHANNEL, Admin, Caller, ClientSecret, TokenKey
from gateway.storage.database import Database
from gateway.storage.schema import DRIVER_ERRORS
from protocol.errors import InvalidKey, Overloaded
from protocol.serving.deadlines import running_timeout

T = TypeVar("T")

log = structlog.get_logger()

REMEMBERED = 50_000  # keys that are known, and as many that are not
LONGEST_MEMORY = 86_400.0  # seconds after the last answer of Postgres that a key is still trusted
UNKNOWN_FOR = 10.0  # seconds that a key stays unknown without asking again
QUICK_LOOKUP = 0.5  # seconds, for a key that was known a moment ago
AWAY_FOR = 1.0  # seconds between tries while Postgres does not answer
CHECK_LISTENER_EVERY = 1.0  # seconds

_KEY_SHAPE = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_ADMIN_KEY_SHAPE = re.compile(rf"{ADMIN_KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_SESSION_SHAPE = re.compile(rf"{SESSION_PREFIX}[A-Za-z0-9_-]{{43}}")


class Tokens(Protocol):
    """What knows tokens of identity providers."""

    async def key_of(self, token: str) -> TokenKey:
        """Return the key that a token stands for. Raises InvalidKey, Overloaded."""

    async def make(self, key: TokenKey) -> bool:
        """Make a key that tokens stand for; return whether it is there now. Raises Overloaded."""


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
        tokens: Tokens | None = None,
        open_secret: Callable[[str], ClientSecret] | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._pepper = pepper
        self._admins = [(key_digest(pepper, key), Admin(fingerprint(key))) for key in admin_keys]
        self._scrapers = [key_digest(pepper, key) for key in metrics_keys]
        # An admin key that was chosen by hand, without our prefix, can be guessed.
        self._is_guessable = not all(key.startswith(ADMIN_KEY_PREFIX) for key in admin_keys)
        self._known_admins: OrderedDict[bytes, tuple[Admin, int]] = OrderedDict()
        self._known: OrderedDict[bytes, tuple[Caller, int]] = OrderedDict()  # with their generation
        # Unknown keys, since when and in which generation: apart, so that no flood of them displaces a caller.
        self._unknown: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._generation = 0  # what was loaded in an older one must be looked up again
        self._guessing = Guessing(clock)
        peppers = pepper, other_peppers
        self._lookup = KeyLookup(database, *peppers, find_callers, move_key, partial(self._remember, self._known))
        remember_admin = partial(self._remember, self._known_admins)
        self._admin_lookup = KeyLookup(database, *peppers, find_admins, move_admin_key, remember_admin)
        self._heard = clock.monotonic()  # when Postgres last answered
        self._away_until = 0.0  # monotonic seconds: until then known callers are not looked up: Postgres is away
        self._tokens, self._open_secret = tokens, open_secret
        self.is_listening = asyncio.Event()  # set while the listener is connected
        self.uses = KeyUses(database, clock)
        self.on_tight: Callable[[str], None] = lambda _: None  # is told the scope of a balance that has become tight

    async def identify(self, key: str | None, address: str, *, has_begun: bool = False) -> Caller | Admin:
        """Return the caller that this key belongs to. ``has_begun``: a client secret opened a conversation in its time.

        Raises InvalidKey for none, an unknown, a revoked or an expired one; AddressNotAllowed for one that is not for
        calls from there; RateLimited for an address that keeps guessing; Overloaded when Postgres is needed to tell
        and does not answer.
        """
        if not key:
            raise InvalidKey("No API key was given. Send it as 'Authorization: Bearer tg-…'.")
        if _KEY_SHAPE.fullmatch(key) is not None:
            caller = await self._caller(key, address)
        elif self._tokens is not None and key.startswith(JWT_PREFIX):
            caller = await self._caller_by_token(self._tokens, key, address)
        elif self._open_secret is not None and key.startswith(SECRET_PREFIX):
            caller = await self._caller_by_secret(self._open_secret, key, address, has_begun=has_begun)
        else:
            return await self._admin(key, address)
        if caller is None or (caller.expires_at is not None and caller.expires_at <= self._clock.now()):
            raise InvalidKey("Incorrect API key provided: it is unknown, revoked or expired.")
        if caller.addresses is not None and not is_among(address, caller.addresses):
            raise AddressNotAllowed(f"This key may not be used from {address or 'here'}: ask who made it for you.")
        self.uses.note(caller.key_id, address if caller.secret is None else None)  # a page is anywhere
        return caller

    async def identify_session(self, token: str) -> Admin:
        """Return the person whose cookie holds this. Raises InvalidKey, Overloaded."""
        if _SESSION_SHAPE.fullmatch(token) is not None:
            admin = await self._stored_admin(token, key_digest(self._pepper, token))
            if admin is not None:
                self.uses.note(admin.fingerprint)
                return admin
        raise InvalidKey("This session has ended. Sign in again.")

    def may_scrape(self, key: str) -> bool:
        """Return whether this is a key for the metrics alone."""
        digest = key_digest(self._pepper, key)
        return any(hmac.compare_digest(known, digest) for known in self._scrapers)

    async def run(self) -> None:
        """Listen for changes to teams and keys, for ever; without a listener, look up every key."""
        while True:
            try:
                await self._listen()
            except (OSError, TimeoutError, *DRIVER_ERRORS) as exc:
                log.warning("access_listener_lost", error=repr(exc))
            self.is_listening.clear()
            self.forget()
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        direct_url = self._database.direct_url
        connection = await asyncpg.connect(direct_url or self._database.url, timeout=LOOKUP_WITHIN)
        try:
            if (
                direct_url is None
                and await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid()
            ):
                raise ConnectionError("a pooler stands before Postgres: set database_direct_url")  # it hears nothing
            await connection.add_listener(ACCESS_CHANNEL, lambda *_: self.forget())
            await connection.add_listener(TIGHT_CHANNEL, lambda *said: self.on_tight(str(said[-1])))
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
        """Look up every key anew from now on: teams or keys have changed."""
        self._generation += 1

    async def _admin(self, key: str, address: str) -> Admin:
        is_ours = key.startswith(ADMIN_KEY_PREFIX)
        if not is_ours and self._is_guessable:
            # Before the right one is looked for: guessing would find it all the same.
            self._guessing.refuse_guesser(address)
        digest = key_digest(self._pepper, key)
        matches = [admin for known, admin in self._admins if hmac.compare_digest(known, digest)]
        if matches:
            return matches[0]
        if _ADMIN_KEY_SHAPE.fullmatch(key) is not None and (admin := await self._stored_admin(key, digest)) is not None:
            self.uses.note(admin.fingerprint)
            return admin
        if is_ours or self._is_guessable:
            self._count_failure(address)
        if not is_ours:
            raise InvalidKey("Incorrect API key provided: a team's key is 'tg-' and 43 characters.")
        raise InvalidKey("Incorrect API key provided: no admin has it, or it is revoked or expired.")

    async def _stored_admin(self, key: str, digest: bytes) -> Admin | None:
        """Return the admin of a stored key, ``None`` for an unknown, a revoked or an expired one. Raises Overloaded."""
        admin, generation = self._known_admins.get(digest, (None, -1))
        if generation != self._generation:
            since, unknown_in = self._unknown.get(digest, (-math.inf, 0))
            if unknown_in == self._generation and self._clock.monotonic() - since < UNKNOWN_FOR:
                return None
            try:
                async with running_timeout(LOOKUP_WITHIN):
                    admin = await self._admin_lookup.find(digest, key, self._generation)
            except POSTGRES_AWAY as exc:
                raise Overloaded("The key cannot be checked right now: the database does not answer.") from exc
        is_over = admin is not None and admin.expires_at is not None and admin.expires_at <= self._clock.now()
        return None if is_over else admin

    async def _caller_by_token(self, tokens: Tokens, token: str, address: str) -> Caller:
        """Return the caller whose key a token of an identity provider stands for; the key is made when the first token
        comes."""
        try:
            key = await tokens.key_of(token)
        except InvalidKey:
            self._count_failure(address)
            raise
        caller = await self._caller(key.secret, None)
        if caller is None and await tokens.make(key):
            self.forget()  # also a look-up that began before there was one
            caller = await self._caller(key.secret, None)
        if caller is None:
            why = f"the key of the team '{key.team_id[:100]}' that it stands for is revoked, or there is no such team"
            raise InvalidKey(f"The token was refused: {why}.")
        return caller

    async def _caller_by_secret(
        self, open_secret: Callable[[str], ClientSecret], token: str, address: str, *, has_begun: bool
    ) -> Caller | None:
        try:
            secret = open_secret(token)
        except InvalidKey:
            self._count_failure(address)
            raise
        if not has_begun and secret.expires_at <= self._clock.now():
            raise InvalidKey("This client secret has expired: make another one.")
        caller = await self._caller(token, None, tuple(secret.digests.values()))
        return None if caller is None else replace(caller, secret=secret)

    async def _caller(self, key: str, address: str | None, digests: Sequence[bytes] = ()) -> Caller | None:
        """Return the caller of a key, or of its digests under all peppers; a wrong one counts against the address,
        where one is given."""
        digest, *others = digests or (key_digest(self._pepper, key),)
        now = self._clock.monotonic()
        known, generation = self._known.get(digest, (None, -1))
        if generation == self._generation:
            return known
        since, generation = self._unknown.get(digest, (-math.inf, 0))
        if generation == self._generation and now - since < UNKNOWN_FOR:
            return None
        remembered = known if now - self._heard < LONGEST_MEMORY else None
        if remembered is not None and now < self._away_until:
            return remembered
        patience = LOOKUP_WITHIN if remembered is None else QUICK_LOOKUP
        try:
            async with running_timeout(patience):
                caller = await self._lookup.find(digest, key, self._generation, others)
        except POSTGRES_AWAY as exc:
            self._away_until = self._clock.monotonic() + AWAY_FOR
            if remembered is not None:
                return remembered
            raise Overloaded("The key cannot be checked right now: the database does not answer.") from exc
        if caller is None and address is not None:
            self._count_failure(address)
        return caller

    def _remember(
        self, memory: OrderedDict[bytes, tuple[T, int]], digest: bytes, generation: int, owner: T | None
    ) -> None:
        self._heard = now = self._clock.monotonic()
        memory.pop(digest, None)
        self._unknown.pop(digest, None)
        if owner is not None:
            memory[digest] = (owner, generation)
            _bound(memory)
        else:
            self._unknown[digest] = (now, generation)
            _bound(self._unknown)

    def _count_failure(self, address: str) -> None:
        """Count a wrong key, when it is known to be one: a right one is never refused for those beside it."""
        self._guessing.refuse_guesser(address)
        self._guessing.count_failure(address)


def _bound(memory: OrderedDict[bytes, Any]) -> None:
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
