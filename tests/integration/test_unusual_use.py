# Keys that are used as they never were, on a real ledger: told once, paused where that is asked for.

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from sqlalchemy import text

from billing.ledger.ledger import insert_records
from gateway.accounts.key_uses import KeyUses, network_hash
from gateway.accounts.schemas import NewKey, NewTeam
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team
from gateway.core.background import Background
from gateway.moderation.abuse import AbuseWatch
from gateway.outbox.store import list_callbacks
from gateway.storage.audit_log import Act, list_acts
from gateway.storage.database import Database
from gateway.webhooks.unusual_use import EVENT, LEAST_DAYS, PAST, UnusualUse
from tests.support.clock import SetClock
from tests.support.factories import make_record

ADMIN = Act("tests")
DAY = 86400.0


class Key:
    """A key with a past, and what looks at it."""

    def __init__(self, database: Database, clock: SetClock) -> None:
        self.database = database
        self.clock = clock
        self.paused: list[str] = []
        self.uses = KeyUses(database, clock)
        self.watch = UnusualUse(database, clock, self._pause)

    async def make(self) -> None:
        async with self.database.begin() as connection:
            team = NewTeam(id="search", webhook_url="https://hooks.example.com/keys")
            await create_team(connection, team, ADMIN)
            new = NewKey(team_id="search")
            self.id = (await create_key(connection, "pepper", new, ADMIN, self.clock.now())).record.key_id

    async def use(self, dollars: int, *addresses: str) -> None:
        self.clock.move(0.01)
        for address in addresses:
            self.uses.note(self.id, address)
        await self.uses.flush()
        facts = {"team_id": "search", "key_id": self.id, "cost_nanousd": dollars * 10**9}
        async with self.database.begin() as connection:
            await insert_records(connection, [make_record(self.clock.new_id(), **facts)], today=self.clock.today())

    async def _pause(self, key_id: str, team_id: str) -> None:
        self.paused.append(key_id)


@pytest.fixture
async def key(database: Database, clock: SetClock) -> Key:
    """A key that has cost a dollar a day for a week and more, from one machine."""
    key = Key(database, clock)
    await key.make()
    for _ in range(LEAST_DAYS + 1):
        await key.use(1, "203.0.113.7")
        clock.move(DAY)
    return key


async def test_a_signal_is_told_once_to_the_team(key: Key, database: Database) -> None:
    """However many look and however often; what is usual is not told."""
    await key.use(1, "203.0.113.7")
    assert await key.watch.look() == []
    await key.use(9, "198.51.100.9")
    looks = await asyncio.gather(*(UnusualUse(database, key.clock, key._pause).look() for _ in range(3)))
    told = sorted((data for look in looks for data in look), key=lambda data: str(data["signal"]))

    assert [data["signal"] for data in told] == ["new_address", "spend"]
    assert (told[0]["new_addresses"], told[0]["known_addresses"]) == (1, 1)
    assert (float(told[1]["used_usd"]), float(told[1]["most_usd"])) == (10.0, 1.0)
    assert await key.watch.look() == [] and key.paused == [key.id]
    async with database.begin() as connection:
        assert [entry.action for entry in await list_acts(connection)][:2] == [EVENT, EVENT]
        callbacks = await list_callbacks(connection, team_id="search")
    assert len(callbacks) == 2


async def test_what_is_past_is_forgotten(key: Key, database: Database) -> None:
    """Addresses are kept for as long as they count, and only as hashes."""
    async with database.begin() as connection:
        kept = (await connection.execute(text("SELECT DISTINCT network FROM key_networks"))).scalars().all()
    assert kept == [network_hash(key.id, "203.0.113.7")]

    key.clock.move(DAY * (PAST + 1))
    await key.watch.look()
    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM key_networks"))).scalar_one() == 0


async def test_a_pause_holds_at_every_gateway(redis: Redis, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker asks for it, and a shorter one ends none that is longer."""
    monkeypatch.setattr("gateway.moderation.abuse.DEADLINE", 10.0)
    background = Background()
    worker, gateway = (AbuseWatch(redis, clock, background) for _ in range(2))
    await worker.pause("key_a", "team", 600.0)
    await worker.pause("key_a", "team", 60.0)
    await gateway.sync()

    assert (gateway.pause_of("key_a"), gateway.pause_of("key_b")) == (600, 0)
    await background.drain(5)


async def test_gateways_that_write_the_same_networks_do_not_deadlock(database: Database, clock: SetClock) -> None:
    """Each writes them in one order: else Postgres ends one of two that wait for each other."""
    ids = [f"key-{number}" for number in range(600)]
    one, other = KeyUses(database, clock), KeyUses(database, clock)
    for ident, reverse in zip(ids, reversed(ids), strict=True):
        one.note(ident, "192.0.2.1")
        other.note(reverse, "192.0.2.1")
    await asyncio.gather(one.flush(), other.flush())

    async with database.begin() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM key_networks"))).scalar_one() == len(ids)
