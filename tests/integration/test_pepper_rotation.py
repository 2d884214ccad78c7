# One pepper is changed for another, step by step as docs/operations/secrets.md has it, on a real Postgres: keys,
# webhook secrets and stored answers are known all the time, by gateways of both steps, and the first can go.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from typer.testing import CliRunner

import gateway.cli
from gateway.accounts.auth import Authenticator
from gateway.accounts.client_secrets import ClientSecrets
from gateway.accounts.provider_keys import create_provider_key, reseal_provider_keys
from gateway.accounts.schemas import NewKey, NewProviderKey, NewTeam, OwnRotation
from gateway.accounts.team_keys import NewlyMade, create_key, list_keys, replace_secret
from gateway.accounts.team_secrets import PURPOSE, create_secret, load_secrets, reseal_secrets
from gateway.accounts.teams import create_team, find_caller_of_key
from gateway.core.clock import Clock
from gateway.core.keys import new_key, pepper_name
from gateway.core.principals import Caller
from gateway.core.settings import ProviderSettings
from gateway.idempotency.store import Answered, IdempotencyStore, Reused, Running
from gateway.idempotency.stored_answers import Claim, Place, StoredAnswer
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.upstreams.registry import PURPOSE as OF_PROVIDER_KEYS
from gateway.upstreams.registry import ProviderRegistry
from protocol.errors import InvalidKey
from router.catalog.targets import Endpoint, Target
from tests.support.house import model

OLD, NEW = "the pepper that was", "the pepper that will be"
ACT = Act("tests")
HERE = "127.0.0.1"
PLACE = Place("team_a", "chat.completions", "key-1")
CONFIG = """\
database_url: {database_url}
redis_url: redis://127.0.0.1:1
admin_keys: [tgadmin-of-the-tests]
key_pepper: {pepper}
other_key_peppers: [{other}]
providers: {{own: {{format: openai, self_hosted: true, endpoints: [{{region: here, base_url: "http://gpu/v1"}}]}}}}
models: {{small: {{provider: own, price: {{input: 1, output: 2}}}}}}
"""


@asynccontextmanager
async def gateway_with(database: Database, pepper: str, *others: str) -> AsyncIterator[Authenticator]:
    """Give what a gateway knows callers by; it has just been started."""
    auth = Authenticator(database, Clock(), pepper, (), others, open_secret=ClientSecrets(pepper, *others).opened)
    listening = asyncio.create_task(auth.run())
    await auth.is_listening.wait()
    yield auth
    listening.cancel()


async def made_key(database: Database, team: str, pepper: str) -> NewlyMade:
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id=team), ACT)
        return await create_key(connection, pepper, NewKey(team_id=team), ACT, time.time())


async def moved(auth: Authenticator) -> None:
    """Wait until no key is about to move."""
    if auth._lookup._moving is not None:
        await auth._lookup._moving


async def under(database: Database, pepper: str) -> set[str]:
    """Return the ids of the keys that are stored under this pepper."""
    async with database.begin() as connection:
        return {key.key_id for key in await list_keys(connection) if key.pepper == pepper_name(pepper)}


async def test_keys_are_known_at_every_step_and_move(database: Database) -> None:
    """Made under the old pepper, a key works with either in force, and alone with the new one once it was used."""
    used, unused = await made_key(database, "used", OLD), await made_key(database, "unused", OLD)
    async with gateway_with(database, OLD, NEW) as first, gateway_with(database, NEW, OLD) as second:
        for auth in (second, first, second, first, second):  # both run while the house is restarted
            auth.forget()
            caller = await auth.identify(used.key, HERE)
            assert isinstance(caller, Caller) and caller.key_id == used.record.key_id
            await moved(auth)
        with pytest.raises(InvalidKey):
            await second.identify(new_key(), HERE)
    async with gateway_with(database, NEW) as last:
        assert isinstance(await last.identify(used.key, HERE), Caller)
        with pytest.raises(InvalidKey):
            await last.identify(unused.key, HERE)


async def test_a_client_secret_takes_no_key_for_unknown(database: Database) -> None:
    """While its key moves to and fro, a page is known at gateways of either step, and the key beside it; a page whose
    secret was made before there was another pepper is not, and the key is all the same."""
    made, ends = await made_key(database, "paged", OLD), time.time() + 60
    peppers = ((OLD, NEW), (NEW, OLD), (OLD,))
    *pages, early = [ClientSecrets(*each).made(made.key, "talker", b"{}", None, ends) for each in peppers]
    async with gateway_with(database, OLD, NEW) as first, gateway_with(database, NEW, OLD) as second:
        for auth in (second, first, second, first):
            auth.forget()
            with pytest.raises(InvalidKey):
                await auth.identify(early, HERE)
            for key in (*pages, made.key):
                caller = await auth.identify(key, HERE)
                assert isinstance(caller, Caller) and caller.key_id == made.record.key_id
            await moved(auth)


async def test_a_replaced_secret_moves(database: Database) -> None:
    """The one before works to the end of its overlap under whatever pepper it is stored."""
    made = await made_key(database, "replaced", OLD)
    async with database.begin() as connection:
        await replace_secret(connection, OLD, made.record.key_id, OwnRotation(), ACT, time.time())

    async with gateway_with(database, NEW, OLD) as auth:
        before = await auth.identify(made.key, HERE)
        await moved(auth)
    async with gateway_with(database, NEW) as auth:
        after = await auth.identify(made.key, HERE)

    assert isinstance(before, Caller)
    assert before == after


async def test_a_key_that_cannot_move_is_known_all_the_same(database: Database) -> None:
    """A row that another transaction holds, or a standby that takes no writes, fails the move alone: the key and all
    that wait with it are found, and it moves another time."""
    held, free = await made_key(database, "held", OLD), await made_key(database, "free", OLD)
    async with gateway_with(database, NEW, OLD) as auth:
        async with database.begin() as connection:
            row = text("SELECT 1 FROM api_keys WHERE id = :id FOR UPDATE")
            await connection.execute(row, {"id": held.record.key_id})
            callers = await asyncio.gather(*(auth.identify(made.key, HERE) for made in (held, free)))
            assert [caller.key_id for caller in callers if isinstance(caller, Caller)] == [
                held.record.key_id,
                free.record.key_id,
            ]
            await moved(auth)
        assert await under(database, NEW) == {free.record.key_id}
        auth.forget()
        await auth.identify(held.key, HERE)
        await moved(auth)
    assert await under(database, NEW) == {held.record.key_id, free.record.key_id}


async def test_gateways_that_meet_a_key_at_once_all_know_it(database: Database) -> None:
    """Whoever moves it first, nobody who looks at the same moment takes it for unknown."""
    made = await made_key(database, "crowd", OLD)
    gateways = [Authenticator(database, Clock(), *peppers) for peppers in [(NEW, (), (OLD,)), (OLD, (), (NEW,))] * 8]

    callers = await asyncio.gather(*(auth.identify(made.key, HERE) for auth in gateways))

    assert {caller.key_id for caller in callers if isinstance(caller, Caller)} == {made.record.key_id}
    assert len(callers) == 16


async def test_webhook_secrets_move(database: Database) -> None:
    """A worker seals them anew when it starts; what neither pepper opens stays as it was."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="search"), ACT)
        await create_secret(connection, Sealer(OLD, PURPOSE), "search", ACT)
        await create_secret(connection, Sealer("a third", PURPOSE), "search", ACT)
        before = await load_secrets(connection, Sealer(OLD, PURPOSE), ["search"])
        count = await reseal_secrets(connection, Sealer(NEW, PURPOSE, OLD))
        again = await reseal_secrets(connection, Sealer(NEW, PURPOSE, OLD))

        assert (count, again) == (1, 0)
        assert await load_secrets(connection, Sealer(NEW, PURPOSE), ["search"]) == before
        assert len(await load_secrets(connection, Sealer("a third", PURPOSE), ["search"])) == 1


async def test_teams_own_keys_of_providers_move(database: Database) -> None:
    """A worker seals them anew when it starts; what neither pepper opens stays as it was. Each opens for its team."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="owner"), ACT)
        for pepper in (OLD, "a third"):
            new = NewProviderKey(provider="openai", key=f"sk-under {pepper}".replace(" ", "-"))
            await create_provider_key(connection, Sealer(pepper, OF_PROVIDER_KEYS), "owner", new, ACT)
        made = await create_key(connection, OLD, NewKey(team_id="owner"), ACT, time.time())
        count = await reseal_provider_keys(connection, Sealer(NEW, OF_PROVIDER_KEYS, OLD))
        again = await reseal_provider_keys(connection, Sealer(NEW, OF_PROVIDER_KEYS, OLD))
        caller = await find_caller_of_key(connection, made.record.key_id)
    assert caller is not None
    settings = ProviderSettings(name="openai", format="openai", endpoints=(Endpoint("us", "http://openai/v1"),))
    registry = ProviderRegistry({"openai": settings}, sealer=Sealer(NEW, OF_PROVIDER_KEYS))
    own = registry.own_keys(caller.team, settings)
    other = None if own is None else replace(own, team="thief")

    assert (count, again) == (1, 0)
    assert registry.keys_at(Target(model("small", "openai"), settings.endpoints[0], own)) == (
        "sk-under-" + OLD.replace(" ", "-"),
    )
    assert registry.keys_at(Target(model("small", "openai"), settings.endpoints[0], other)) == ()
    assert "sk-under" not in repr(caller)


async def test_answers_are_replayed_and_calls_joined(database: Database) -> None:
    """The same request under the same Idempotency-Key is the same, whichever pepper its digest was taken under."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="team_a"), ACT)
    clock = Clock()
    one, two = (
        IdempotencyStore(database, clock, Sealer(pepper, "idempotency", other), retention=60.0)
        for pepper, other in ((OLD, NEW), (NEW, OLD))
    )
    mine = Claim(PLACE, b"under old", clock.new_id(), (b"under new",))
    same = Claim(PLACE, b"under new", clock.new_id(), (b"under old",))
    another = Claim(PLACE, b"another under new", clock.new_id(), (b"another under old",))
    answer = StoredAnswer(200, (), b"the answer")

    assert await one.claim(mine) == mine
    assert await two.claim(same) == Running()
    assert await one.store(mine, answer, None)
    assert await two.claim(same) == Answered(mine.request_id, answer)
    assert await two.claim(another) == Reused()


async def test_an_abandoned_call_is_taken_over(database: Database) -> None:
    """A gateway of the step before that died leaves its call to one of the next."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="team_a"), ACT)
    clock = Clock()
    dead = IdempotencyStore(database, clock, Sealer(OLD, "idempotency", NEW), retention=60.0, lease=0.0)
    heir = IdempotencyStore(database, clock, Sealer(NEW, "idempotency", OLD), retention=60.0)
    await dead.claim(Claim(PLACE, b"under old", clock.new_id(), (b"under new",)))

    found = await heir.claim(Claim(PLACE, b"under new", request_id := clock.new_id(), (b"under old",)))

    assert isinstance(found, Claim) and found.request_id == request_id


async def test_the_list_of_keys_tells_who_has_not_moved(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is another pepper, `tollgate keys list` says which keys still need it."""
    for team, pepper in (("moved", NEW), ("left", OLD)):
        await made_key(database, team, pepper)
    file = tmp_path / "tollgate.yaml"
    file.write_text(CONFIG.format(database_url=database.url, pepper=NEW, other=OLD))
    monkeypatch.setenv("TOLLGATE_CONFIG", str(file))
    if not any(group.name == "teams" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()

    listed = await asyncio.to_thread(
        CliRunner().invoke, gateway.cli.app, ["keys", "list", "--format", "json"], catch_exceptions=False
    )

    keys = {key["team_id"]: key["pepper"] for key in json.loads(listed.stdout)["data"]}
    assert keys == {"moved": "current", "left": "other"}
