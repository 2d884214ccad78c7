# Who is calling, on a real Postgres: known keys, unknown ones, revoked ones, and a database that is away.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

import gateway.accounts.auth
import migrations
from billing.core.errors import RateLimited
from billing.core.store_errors import POSTGRES_AWAY
from gateway.accounts.admin_keys import create_admin_key, list_admin_keys, revoke_admin_key
from gateway.accounts.auth import Authenticator
from gateway.accounts.client_secrets import ClientSecrets
from gateway.accounts.guessing import FAILURES_PER_ADDRESS
from gateway.accounts.key_lookup import KEYS_AT_ONCE
from gateway.accounts.key_uses import KeyUses
from gateway.accounts.schemas import NewAdminKey, NewKey, NewTeam
from gateway.accounts.team_keys import NewlyMade, create_key, get_key, revoke_key
from gateway.accounts.teams import create_team, find_callers
from gateway.core.clock import Clock
from gateway.core.keys import key_digest, new_admin_key, new_key, pepper_name
from gateway.core.principals import Admin, Caller, Role
from gateway.dev.embedded import EmbeddedPostgres
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from gateway.storage.tables import admin_keys
from protocol.errors import InvalidKey, Overloaded
from tests.support.clock import SetClock
from tests.support.temporary_stores import temporary_postgres

PEPPER = "pepper of all the tests"
ACT = Act("tests")
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """Give a Postgres that a test may stop."""
    with temporary_postgres() as server:
        migrations.upgrade(server.url)
        yield server


@asynccontextmanager
async def authenticator(
    server: EmbeddedPostgres, *admin_keys: str, clock: Clock | None = None
) -> AsyncIterator[Authenticator]:
    """Give an authenticator that listens for changes."""
    database = Database(server.url)
    auth = Authenticator(database, clock or Clock(), PEPPER, admin_keys, open_secret=ClientSecrets(PEPPER).opened)
    listening = asyncio.create_task(auth.run())
    await auth.is_listening.wait()
    yield auth
    listening.cancel()
    await database.close()


async def made_key(server: EmbeddedPostgres, team: str) -> NewlyMade:
    database = Database(server.url)
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id=team), ACT)
        made = await create_key(connection, PEPPER, NewKey(team_id=team), ACT, time.time())
    await database.close()
    return made


async def revoke(server: EmbeddedPostgres, key_id: str) -> None:
    database = Database(server.url)
    async with database.begin() as connection:
        await revoke_key(connection, key_id, ACT)
    await database.close()


def test_a_team_is_known_by_its_key(server: EmbeddedPostgres) -> None:
    """A key names its team and itself; asked again, nobody asks the database."""

    async def scene() -> None:
        made = await made_key(server, "known")
        async with authenticator(server) as auth:
            caller = await auth.identify(made.key, HERE)
            again = await auth.identify(made.key, HERE)

        assert isinstance(caller, Caller)
        assert (caller.team.id, caller.key_id) == ("known", made.record.key_id)
        assert again is caller

    asyncio.run(scene())


def test_a_burst_under_a_new_key_asks_the_database_once(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes together under one key waits for one lookup, not for a connection each; who leaves breaks nobody's."""
    asked = []

    async def find(connection: AsyncConnection, digests: Sequence[bytes]) -> dict[bytes, Caller]:
        asked.append(digests)
        await asyncio.sleep(0.02)
        return await find_callers(connection, digests)

    async def scene() -> None:
        made = await made_key(server, "burst")
        monkeypatch.setattr("gateway.accounts.auth.find_callers", find)
        async with authenticator(server) as auth:
            first, *others = [asyncio.create_task(auth.identify(made.key, HERE)) for _ in range(300)]
            await asyncio.sleep(0)
            first.cancel()
            callers = await asyncio.gather(*others)

        assert len(asked) == 1
        assert [caller.key_id for caller in callers if isinstance(caller, Caller)] == [made.record.key_id] * 299

    asyncio.run(scene())


def test_the_stored_digest_is_no_key(server: EmbeddedPostgres) -> None:
    """Whoever reads the table of keys cannot call with what stands in it."""

    async def scene() -> None:
        made = await made_key(server, "stolen")
        digest = key_digest(PEPPER, made.key)
        async with authenticator(server) as auth:
            for stolen in (digest.hex(), "tg-" + digest.hex()[:43], digest.decode("latin-1")):
                with pytest.raises(InvalidKey):
                    await auth.identify(stolen, HERE)

    asyncio.run(scene())


def test_a_revoked_key_is_refused_within_a_second(server: EmbeddedPostgres) -> None:
    """A gateway that has seen a key a moment ago hears of its end from Postgres."""

    async def scene(team: str) -> float:
        made = await made_key(server, team)
        async with authenticator(server) as auth:
            await auth.identify(made.key, HERE)
            await revoke(server, made.record.key_id)
            revoked = time.monotonic()
            while True:
                try:
                    await auth.identify(made.key, HERE)
                except InvalidKey:
                    return time.monotonic() - revoked
                await asyncio.sleep(0.01)

    # The machine may be busy; not each time.
    assert any(asyncio.run(asyncio.wait_for(scene(f"revoked-{n}"), 20)) < 1.0 for n in range(4))


def test_a_client_secret_ends_to_the_second_and_with_its_key(server: EmbeddedPostgres) -> None:
    """It is its key's caller; one that was changed, or sealed under another pepper, is nobody's. A conversation that it
    opened in time is looked at anew without its time, and not without its key."""

    async def scene() -> None:
        made, clock = await made_key(server, "paged"), SetClock()
        token, foreign = [
            ClientSecrets(pepper).made(made.key, "talker", b"{}", "Ada", clock.now() + 10)
            for pepper in (PEPPER, "other")
        ]
        cut = len(token) // 2
        changed = token[:cut] + ("A" if token[cut] != "A" else "B") + token[cut + 1 :]
        async with authenticator(server, clock=clock) as auth:

            async def refused(secret: str, *, has_begun: bool = False) -> bool:
                try:
                    caller = await auth.identify(secret, HERE, has_begun=has_begun)
                except InvalidKey:
                    return True
                assert isinstance(caller, Caller) and caller.secret is not None
                return (caller.key_id, caller.secret.user) != (made.record.key_id, "Ada")

            assert [await refused(each) for each in (token, changed, foreign, "ek_", "ek_é")] == [False] + [True] * 4
            assert auth.uses._used and not auth.uses._networks  # a page is everywhere, and no sign of a stolen key
            clock.time += 9.5
            assert not await refused(token)
            clock.time += 0.5
            assert await refused(token) and not await refused(token, has_begun=True)
            await revoke(server, made.record.key_id)
            auth.forget()
            assert await refused(token, has_begun=True)

    asyncio.run(scene())


def test_a_new_key_works_at_once_although_it_was_unknown(server: EmbeddedPostgres) -> None:
    """What a gateway remembers as unknown is forgotten when any key is made."""

    async def scene() -> None:
        async with authenticator(server) as auth:
            with pytest.raises(InvalidKey):
                await auth.identify(new_key(), HERE)
            made = await made_key(server, "fresh")
            await asyncio.sleep(0.2)
            assert isinstance(await auth.identify(made.key, HERE), Caller)

    asyncio.run(scene())


def test_an_address_that_keeps_guessing_is_slowed_down_alone(server: EmbeddedPostgres) -> None:
    """Past some failures an address hears 429 for wrong keys; other addresses, and right keys of this one, go on."""

    async def scene() -> None:
        known, newcomer = await made_key(server, "patient"), await made_key(server, "newcomer")
        async with authenticator(server) as auth:
            await auth.identify(known.key, "10.0.0.1")
            with pytest.raises(RateLimited):  # a few failures are forgiven while the others are made
                for _ in range(3 * FAILURES_PER_ADDRESS):
                    with suppress(InvalidKey):
                        await auth.identify(new_key(), "10.0.0.1")
            with pytest.raises(InvalidKey):
                await auth.identify(new_key(), "10.0.0.2")
            assert isinstance(await auth.identify(known.key, "10.0.0.1"), Caller)
            assert isinstance(await auth.identify(newcomer.key, "10.0.0.1"), Caller)
            await made_key(server, "another")  # after any change, what is remembered is looked up again
            await asyncio.sleep(0.2)
            assert isinstance(await auth.identify(known.key, "10.0.0.1"), Caller)

    asyncio.run(scene())


def test_an_address_of_ipv6_is_a_whole_network(server: EmbeddedPostgres) -> None:
    """A client has 2**64 of them, and could guess from another each time."""

    async def scene() -> None:
        async with authenticator(server) as auth:
            with pytest.raises(RateLimited):
                for n in range(3 * FAILURES_PER_ADDRESS):
                    with suppress(InvalidKey):
                        await auth.identify(new_key(), f"2001:db8:0:7::{n:x}")
            with pytest.raises(InvalidKey):
                await auth.identify(new_key(), "2001:db8:0:8::1")

    asyncio.run(scene())


class CountedLookups:
    """A way to look keys up that counts how often it is asked, and how often at once; however busy the machine is, it
    is in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.asked, self.most = 0, 0
        self._running = 0
        self._find = getattr(gateway.accounts.auth, name)
        monkeypatch.setattr(f"gateway.accounts.auth.{name}", self)
        for module in ("auth", "key_lookup"):
            monkeypatch.setattr(f"gateway.accounts.{module}.LOOKUP_WITHIN", 30.0)

    async def __call__(self, connection: AsyncConnection, digests: Sequence[bytes]) -> Any:
        self.asked, self._running = self.asked + 1, self._running + 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0.02)
        found = await self._find(connection, digests)
        self._running -= 1
        return found


def test_a_new_key_waits_for_two_queries_at_most_in_any_flood_of_wrong_ones(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that wait are one question, and one is asked at a time: wrong keys hold one connection to Postgres, however
    many come."""

    async def scene() -> None:
        made = await made_key(server, "crowded")
        lookups = CountedLookups(monkeypatch, "find_callers")
        async with authenticator(server) as auth:
            wrong = [asyncio.create_task(auth.identify(new_key(), "10.0.0.9")) for _ in range(KEYS_AT_ONCE - 1)]
            await asyncio.sleep(0)
            caller = await auth.identify(made.key, "10.0.0.9")
            before = lookups.asked
            outcomes = await asyncio.gather(*wrong, return_exceptions=True)

        assert isinstance(caller, Caller) and caller.team.id == "crowded"
        assert before <= 2 and lookups.most == 1
        assert {type(outcome) for outcome in outcomes} == {InvalidKey, RateLimited}

    asyncio.run(scene())


def test_wrong_keys_displace_no_caller(server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a flood before an outage would lock teams out for as long as Postgres is away."""
    monkeypatch.setattr("gateway.accounts.auth.REMEMBERED", 10)

    async def scene() -> None:
        made = await made_key(server, "kept")
        async with authenticator(server) as auth:
            caller = await auth.identify(made.key, HERE)
            for _ in range(30):
                with suppress(InvalidKey, RateLimited):
                    await auth.identify(new_key(), "10.0.0.4")

            assert await auth.identify(made.key, HERE) is caller

    asyncio.run(scene())


def test_admin_keys_are_known_without_a_database(server: EmbeddedPostgres) -> None:
    """An admin key is compared whole; a wrong one is refused."""

    async def scene() -> None:
        key = new_admin_key()
        async with authenticator(server, new_admin_key(), key) as auth:
            admin = await auth.identify(key, HERE)
            with pytest.raises(InvalidKey):
                await auth.identify(key[:-1], HERE)

        assert isinstance(admin, Admin)
        assert key not in admin.fingerprint

    asyncio.run(scene())


def test_admin_key_may_be_any_secret_of_the_operator(server: EmbeddedPostgres) -> None:
    """The prefix is a custom, not a rule: whatever the configuration lists lets in."""

    async def scene() -> None:
        async with authenticator(server, "correct horse battery staple") as auth:
            admin = await auth.identify("correct horse battery staple", HERE)
            with pytest.raises(InvalidKey):
                await auth.identify("correct horse battery stapl", HERE)

        assert isinstance(admin, Admin)

    asyncio.run(scene())


def test_a_stored_admin_key_is_known_until_it_ends() -> None:
    """By its role, at every gateway, under an old pepper too; an expired one and one revoked elsewhere are refused
    within a second, and without Postgres no more than a 503 is said."""

    async def scene() -> None:
        clock = SetClock()
        with temporary_postgres() as server:
            await asyncio.to_thread(migrations.upgrade, server.url)
            database = Database(server.url)
            async with database.begin() as connection:
                soon = NewAdminKey(role=Role.VIEWER, expires_at=clock.now() + 60)
                brief, _ = await create_admin_key(connection, PEPPER, soon, ACT, clock.now())
                lasting, record = await create_admin_key(
                    connection, "an old pepper", NewAdminKey(role=Role.OPERATOR), ACT, clock.now()
                )
            old = Authenticator(database, clock, PEPPER, (), ("an old pepper",))
            async with authenticator(server, clock=clock) as auth:
                viewer, operator = await auth.identify(brief, HERE), await old.identify(lasting, HERE)
                async with asyncio.timeout(5), database.begin() as connection:
                    peppers = select(admin_keys.c.pepper)
                    while {*(await connection.execute(peppers)).scalars()} != {pepper_name(PEPPER)}:
                        await asyncio.sleep(0.02)
                moved = await auth.identify(lasting, HERE)  # which knows its own pepper alone
                clock.move(61)
                with pytest.raises(InvalidKey):
                    await auth.identify(brief, HERE)
                await auth.uses.flush()
                async with database.begin() as connection:
                    used = {one.key_id: one.last_used_at for one in await list_admin_keys(connection)}
                    await revoke_admin_key(connection, record.key_id, ACT)
                async with asyncio.timeout(1):
                    with suppress(InvalidKey):
                        while await auth.identify(lasting, HERE):
                            await asyncio.sleep(0.02)
                await database.close()
                await asyncio.to_thread(server.stop)
                with pytest.raises(Overloaded):
                    await auth.identify(new_admin_key(), HERE)

        assert isinstance(viewer, Admin) and viewer.role is Role.VIEWER
        assert operator == moved == Admin(record.key_id, Role.OPERATOR)
        assert used[record.key_id] is not None

    asyncio.run(scene())


def test_a_stored_admin_key_waits_for_no_flood_of_wrong_ones(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a stranger without any key keep an admin out: all that wait are one question."""

    async def scene() -> None:
        database = Database(server.url)
        async with database.begin() as connection:
            key, record = await create_admin_key(connection, PEPPER, NewAdminKey(role=Role.VIEWER), ACT, time.time())
        await database.close()
        lookups = CountedLookups(monkeypatch, "find_admins")
        async with authenticator(server) as auth:
            wrong = [asyncio.create_task(auth.identify(new_admin_key(), "10.0.0.9")) for _ in range(KEYS_AT_ONCE - 1)]
            await asyncio.sleep(0)
            admin = await auth.identify(key, "10.0.0.9")
            before = lookups.asked
            outcomes = await asyncio.gather(*wrong, return_exceptions=True)

        assert isinstance(admin, Admin) and admin.fingerprint == record.key_id
        assert before <= 2 and lookups.most == 1
        assert {type(outcome) for outcome in outcomes} == {InvalidKey, RateLimited}

    asyncio.run(scene())


def test_an_admin_key_that_can_be_thought_of_is_not_found_by_guessing(server: EmbeddedPostgres) -> None:
    """Past some failures the right one is refused, too, from that address; where all admin keys are random, no other is
    looked at."""

    async def scene() -> None:
        async with authenticator(server, "letmein") as auth, authenticator(server, new_admin_key()) as random:
            for auth_, ends in ((auth, RateLimited), (random, InvalidKey)):
                with pytest.raises(ends):
                    for word in range(3 * FAILURES_PER_ADDRESS):
                        with suppress(InvalidKey):
                            await auth_.identify(f"guess{word}", "10.0.0.3")
                    await auth_.identify("letmein", "10.0.0.3")
            assert isinstance(await auth.identify("letmein", HERE), Admin)

    asyncio.run(scene())


def test_without_postgres_a_known_key_goes_on_and_an_unknown_one_is_a_503() -> None:
    """A database that is away never turns a good key into a 401."""

    async def scene() -> None:
        with temporary_postgres() as server:
            await asyncio.to_thread(migrations.upgrade, server.url)
            made = await made_key(server, "away")
            async with authenticator(server) as auth:
                await auth.identify(made.key, HERE)
                await asyncio.to_thread(server.stop)
                await asyncio.sleep(0.3)
                assert isinstance(await auth.identify(made.key, HERE), Caller)
                with pytest.raises(Overloaded):
                    await auth.identify(new_key(), HERE)

    asyncio.run(scene())


def test_a_key_is_trusted_for_a_day_after_postgres_was_last_heard_however_long_it_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known for weeks, it goes on through an outage of hours; a gateway cut off for a day trusts nobody by heart."""

    monkeypatch.setattr(gateway.accounts.auth, "CHECK_LISTENER_EVERY", 0.05)

    async def scene() -> None:
        clock = SetClock()
        with temporary_postgres() as server:
            await asyncio.to_thread(migrations.upgrade, server.url)
            made = await made_key(server, "faithful")
            async with authenticator(server, clock=clock) as auth:
                await auth.identify(made.key, HERE)
                clock.move(30 * 86_400)
                while auth._heard < clock.monotonic():  # until Postgres is heard of
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(server.stop)
                while auth.is_listening.is_set():
                    await asyncio.sleep(0.05)
                assert isinstance(await auth.identify(made.key, HERE), Caller)
                clock.move(23 * 3600)
                assert isinstance(await auth.identify(made.key, HERE), Caller)
                clock.move(3600)
                with pytest.raises(Overloaded):
                    await auth.identify(made.key, HERE)

    asyncio.run(scene())


async def test_a_key_tells_when_it_was_last_used(database: Database, clock: SetClock) -> None:
    """To about a minute: several uses are one write, another process's later one stays, a lost Postgres loses none."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="used", name="Used"), ACT)
        made = await create_key(connection, PEPPER, NewKey(team_id="used"), ACT, clock.now())
        other = await create_key(connection, PEPPER, NewKey(team_id="used"), ACT, clock.now())
    auth, beside = (Authenticator(database, clock, PEPPER, ()) for _ in range(2))

    async def last_used() -> list[datetime | None]:
        async with database.begin() as connection:
            return [(await get_key(connection, each.record.key_id)).last_used_at for each in (made, other)]

    assert await last_used() == [None, None]
    for _ in range(3):
        await auth.identify(made.key, HERE)
    assert await last_used() == [None, None]  # no call waits for a write
    await auth.uses.flush()
    first = clock.moment()
    assert await last_used() == [first, None]

    clock.move(30)
    await beside.identify(made.key, HERE)
    await beside.uses.flush()
    assert await last_used() == [first, None]
    clock.move(60)
    await beside.identify(made.key, HERE)
    gone = KeyUses(Database("postgresql://127.0.0.1:1/x"), clock)
    gone.note(made.record.key_id)
    for _ in range(2):  # it waits on
        with pytest.raises(POSTGRES_AWAY):
            await gone.flush()
    await beside.uses.flush()
    assert await last_used() == [clock.moment(), None]
