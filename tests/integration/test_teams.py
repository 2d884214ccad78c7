# Teams and keys on a real Postgres: what is made, what is kept of it, and who hears of a change.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from decimal import Decimal

import asyncpg
import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Limits
from gateway.accounts.schemas import (
    LimitsInput,
    ModelLimitsInput,
    NewKey,
    NewTeam,
    OwnRotation,
    Rotation,
    SafetyInput,
    TeamPatch,
)
from gateway.accounts.team_deletion import delete_team
from gateway.accounts.team_keys import create_key, get_key, list_keys, replace_secret, revoke_key, rotate_key
from gateway.accounts.teams import create_team, find_callers, get_team, list_teams, update_team
from gateway.commands.local_batches import _whose
from gateway.core.errors import Conflict
from gateway.core.keys import key_digest
from gateway.core.principals import ACCESS_CHANNEL, Caller
from gateway.http.exchange import LONGEST_PAGE
from gateway.storage.audit_log import Act, list_acts, purge_outcomes
from gateway.storage.database import Database
from gateway.storage.tables import api_keys, audit_log
from protocol.errors import BadRequest, NotFound
from tests.support.servers import database_of_its_own

PEPPER = "pepper of all the tests"
ADMIN = Act("tests", "0192f0c0-0000-7000-8000-000000000000")
NOW = time.time()


@pytest.fixture(scope="module")
def database_url(postgres_url: str) -> Iterator[str]:
    """Give a database with our tables in it."""
    with database_of_its_own(postgres_url) as url:
        yield url


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[AsyncConnection]:
    """Give a connection whose transaction is rolled back, so that every test finds an empty house."""
    database = Database(database_url)
    async with database.engine.connect() as connection:
        transaction = await connection.begin()
        yield connection
        await transaction.rollback()
    await database.close()


async def find_caller(connection: AsyncConnection, digest: bytes) -> Caller | None:
    """Look one key up, as any number of them are."""
    return (await find_callers(connection, [digest])).get(digest)


async def test_created_team_is_found_as_it_was_made(connection: AsyncConnection) -> None:
    """Everything an admin says of a team is kept; dollars become whole nano-dollars."""
    limits = LimitsInput(requests_per_minute=60, usd_per_day=Decimal("12.000000001"))
    new = NewTeam(
        id="search", name=" Search ", weight=2.5, allowed_models=["a", "b", "a"], limits=limits, safety=SafetyInput()
    )

    await create_team(connection, new, ADMIN, models={"a", "b"})
    team = (await get_team(connection, "search")).team

    assert team.name == "Search"
    assert team.weight == 2.5
    assert team.allowed_models == {"a", "b"}
    assert team.limits == Limits(requests_per_minute=60, nanousd_per_day=12_000_000_001)
    assert not team.is_suspended


async def test_what_safety_found_goes_when_its_time_is_over_and_what_admins_did_stays(
    connection: AsyncConnection,
) -> None:
    """Calls that are flagged are many; acts are few."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    row = {"actor": "system", "action": "safety.input_flagged"}
    await connection.execute(insert(audit_log), [row, row])
    newest = select(func.max(audit_log.c.id)).scalar_subquery()
    old = update(audit_log).where(audit_log.c.id != newest).values(created_at=func.now() - timedelta(days=9))
    await connection.execute(old)

    assert await purge_outcomes(connection, 10 * 86400.0) == 0
    assert await purge_outcomes(connection, 8 * 86400.0) == 1
    assert [entry.action for entry in await list_acts(connection)] == ["safety.input_flagged", "team.created"]


async def test_team_id_is_taken_once(connection: AsyncConnection) -> None:
    """A second team of the same id is refused, and the first stays as it was."""
    await create_team(connection, NewTeam(id="search", name="first"), ADMIN)

    with pytest.raises(Conflict) as refusal:
        await create_team(connection, NewTeam(id="search", name="second"), ADMIN)

    assert refusal.value.code == "team_exists"
    assert (await get_team(connection, "search")).team.name == "first"


@pytest.mark.parametrize(
    ("new", "param"),
    [
        (NewTeam(id=""), "id"),
        (NewTeam(id="Search"), "id"),
        (NewTeam(id="a" * 65), "id"),
        (NewTeam(id="x'; DROP TABLE teams; --"), "id"),
        (NewTeam(id="a", name="line\nbreak"), "name"),
        (NewTeam(id="a", weight=0), "weight"),
        (NewTeam(id="a", weight=float("inf")), "weight"),
        (NewTeam(id="a", allowed_models=["gpt-4"]), "allowed_models[0]"),
        (NewTeam(id="a", limits=LimitsInput(tokens_per_day=-1)), "limits.tokens_per_day"),
        (NewTeam(id="a", limits=LimitsInput(usd_per_month=Decimal("-0.01"))), "limits.usd_per_month"),
        (NewTeam(id="a", limits=LimitsInput(usd_per_month=Decimal("NaN"))), "limits.usd_per_month"),
    ],
)
async def test_impossible_team_is_refused(connection: AsyncConnection, new: NewTeam, param: str) -> None:
    """A value that cannot be is named in the refusal, and nothing is written."""
    with pytest.raises(BadRequest) as refusal:
        await create_team(connection, new, ADMIN, models={"gpt-4o"})

    assert refusal.value.param == param
    assert await list_teams(connection) == []


async def test_patch_changes_what_it_names_and_nothing_else(connection: AsyncConnection) -> None:
    """Absent fields stay, null takes a limit away, and limits merge one by one."""
    limits = LimitsInput(requests_per_minute=60, tokens_per_day=1000)
    await create_team(connection, NewTeam(id="search", name="Search", limits=limits), ADMIN)

    patch = TeamPatch(weight=3.0, limits=LimitsInput(requests_per_minute=None, usd_per_month=Decimal(5)))
    team = (await update_team(connection, "search", patch, ADMIN)).team

    assert team.name == "Search"
    assert team.weight == 3.0
    assert team.limits == Limits(tokens_per_day=1000, nanousd_per_month=5_000_000_000)


async def test_suspended_team_is_known_as_such(connection: AsyncConnection) -> None:
    """A suspended team's key still says whose it is, so that the refusal can say why."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    made = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)

    await update_team(connection, "search", TeamPatch(suspended=True), ADMIN)
    caller = await find_caller(connection, key_digest(PEPPER, made.key))
    await update_team(connection, "search", TeamPatch(suspended=False), ADMIN)

    assert caller is not None
    assert caller.team.is_suspended
    assert not (await get_team(connection, "search")).team.is_suspended


async def test_key_leads_to_its_team_and_only_whole(connection: AsyncConnection) -> None:
    """A key is found by all of itself: not by its digest, its prefix, or under another pepper."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    limits = LimitsInput(concurrent_requests=4)
    made = await create_key(connection, PEPPER, NewKey(team_id="search", name="ci", limits=limits), ADMIN, NOW)

    caller = await find_caller(connection, key_digest(PEPPER, made.key))

    assert caller is not None
    assert (caller.team.id, caller.key_id, caller.key_name) == ("search", made.record.key_id, "ci")
    assert caller.key_limits == Limits(concurrent_requests=4)
    assert await find_caller(connection, key_digest("another pepper", made.key)) is None
    assert await find_caller(connection, made.key.encode()) is None
    assert await find_caller(connection, key_digest(PEPPER, key_digest(PEPPER, made.key).hex())) is None


async def test_no_table_holds_a_key(connection: AsyncConnection) -> None:
    """Neither the key nor anything that could be turned into it is stored, the audit log included."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    made = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)
    rotated = await rotate_key(connection, PEPPER, made.record.key_id, Rotation(), ADMIN, NOW)

    stored = ""
    for table in ("teams", "api_keys", "audit_log"):
        rows = await connection.execute(text(f"SELECT {table}::text FROM {table}"))
        stored += "\n".join(row[0] for row in rows)

    assert made.record.prefix in stored
    for key in (made.key, rotated.key):
        assert key[len(made.record.prefix) :] not in stored


async def test_key_of_no_team_is_refused(connection: AsyncConnection) -> None:
    """A key belongs to a team that exists."""
    with pytest.raises(NotFound):
        await create_key(connection, PEPPER, NewKey(team_id="nobody"), ADMIN, NOW)


async def test_key_cannot_expire_before_it_is_made(connection: AsyncConnection) -> None:
    """An expiry in the past is a mistake, not a key."""
    await create_team(connection, NewTeam(id="search"), ADMIN)

    with pytest.raises(BadRequest):
        await create_key(connection, PEPPER, NewKey(team_id="search", expires_at=NOW - 1), ADMIN, NOW)


async def test_rotated_key_works_until_the_overlap_ends(connection: AsyncConnection) -> None:
    """Rotation makes a key like the old one, which then lives for the overlap and no longer."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    new = NewKey(team_id="search", name="ci", limits=LimitsInput(tokens_per_day=9))
    old = await create_key(connection, PEPPER, new, ADMIN, NOW)

    made = await rotate_key(connection, PEPPER, old.record.key_id, Rotation(overlap="2h"), ADMIN, NOW)
    before = await find_caller(connection, key_digest(PEPPER, old.key))
    after = await find_caller(connection, key_digest(PEPPER, made.key))

    assert made.key != old.key
    assert (made.record.name, made.record.limits) == ("ci", Limits(tokens_per_day=9))
    assert before is not None
    assert before.expires_at == pytest.approx(NOW + 7200, abs=0.001)
    assert after is not None
    assert after.expires_at is None


async def test_rotation_without_overlap_ends_the_old_key_at_once(connection: AsyncConnection) -> None:
    """An overlap of nothing revokes: what a leaked key needs."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    old = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)

    await rotate_key(connection, PEPPER, old.record.key_id, Rotation(overlap=0), ADMIN, NOW)

    assert await find_caller(connection, key_digest(PEPPER, old.key)) is None
    with pytest.raises(Conflict):
        await rotate_key(connection, PEPPER, old.record.key_id, Rotation(), ADMIN, NOW)


async def test_revoked_key_is_unknown_for_ever(connection: AsyncConnection) -> None:
    """A revoked key leads nowhere; revoking it again changes nothing."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    made = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)

    first = await revoke_key(connection, made.record.key_id, ADMIN)
    second = await revoke_key(connection, made.record.key_id, ADMIN)

    assert first == second == await get_key(connection, made.record.key_id)
    assert await find_caller(connection, key_digest(PEPPER, made.key)) is None
    with pytest.raises(NotFound):
        await revoke_key(connection, "key_unknown", ADMIN)


async def test_who_names_no_team_means_the_only_one_that_is_there(connection: AsyncConnection) -> None:
    """A deleted one is none, though its row stays: `tollgate batch submit` asks for no --team."""
    for team_id in ("ads", "search"):
        await create_team(connection, NewTeam(id=team_id), ADMIN)
    made = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)
    await delete_team(connection, "ads", ADMIN, "ads")

    assert await _whose(connection, None) == ("search", made.record.key_id)


async def test_a_replaced_secret_ends_with_its_overlap(connection: AsyncConnection) -> None:
    """It works to that moment or the key's own end, and then its team may replace the next one."""
    await create_team(connection, NewTeam(id="search"), ADMIN)
    first = await create_key(connection, PEPPER, NewKey(team_id="search", expires_at=NOW + 90), ADMIN, NOW)
    key_id = first.record.key_id

    second = await replace_secret(connection, PEPPER, key_id, OwnRotation(overlap="1h"), ADMIN, NOW)
    old = await find_caller(connection, key_digest(PEPPER, first.key))
    new = await find_caller(connection, key_digest(PEPPER, second.key))
    with pytest.raises(Conflict):
        await replace_secret(connection, PEPPER, key_id, OwnRotation(), ADMIN, NOW + 60)
    await connection.execute(update(api_keys).values(expires_at=None))
    bounded = await find_caller(connection, key_digest(PEPPER, first.key))
    third = await replace_secret(connection, PEPPER, key_id, OwnRotation(overlap=60), ADMIN, NOW + 3601)

    assert old is not None and new is not None and bounded is not None
    assert (old.expires_at, old.key_id) == (new.expires_at, key_id)
    assert new.expires_at == pytest.approx(NOW + 90, abs=0.001)
    assert bounded.expires_at == pytest.approx(NOW + 3600, abs=0.001)
    assert await find_caller(connection, key_digest(PEPPER, first.key)) is None
    assert await find_caller(connection, key_digest(PEPPER, second.key)) is not None
    assert await find_caller(connection, key_digest(PEPPER, third.key)) is not None


async def test_lists_can_be_paged(connection: AsyncConnection) -> None:
    """Pages follow one another without a gap and without a repetition."""
    for name in "abcde":
        await create_team(connection, NewTeam(id=name), ADMIN)
        await create_key(connection, PEPPER, NewKey(team_id=name), ADMIN, NOW)

    keys = await list_keys(connection)
    first = await list_keys(connection, limit=2)
    rest = await list_keys(connection, after=first[-1].key_id)

    assert [each.team.id for each in await list_teams(connection, after="b", limit=2)] == ["c", "d"]
    assert [key.team_id for key in keys] == list("abcde")
    assert first + rest == keys


async def test_teams_are_found_by_a_part_of_their_id_or_name(connection: AsyncConnection) -> None:
    """In any case; what SQL would take for a pattern stands for itself."""
    for team_id, name in (("search", "Web"), ("web_two", "50% off"), ("other", "Other")):
        await create_team(connection, NewTeam(id=team_id, name=name), ADMIN)

    async def found(words: str) -> list[str]:
        return [each.team.id for each in await list_teams(connection, search=words)]

    assert await found("WEB") == ["search", "web_two"]
    assert await found("%") == ["web_two"]
    assert await found("b_t") == ["web_two"]
    assert await found("none") == []


async def test_the_longest_page_of_the_audit_log_tells_of_the_next(connection: AsyncConnection) -> None:
    """However many entries a page may have, one more is read: whether there is another page hangs on it."""
    entry = {"actor": "tests", "action": "team.updated"}
    await connection.execute(insert(audit_log), [entry] * (LONGEST_PAGE + 2))

    acts = await list_acts(connection, limit=LONGEST_PAGE + 1)

    assert len(acts) == LONGEST_PAGE + 1


async def test_every_change_is_in_the_audit_log(connection: AsyncConnection) -> None:
    """Who did what, to whom and in which request, newest first; of a team what changed, with what was before."""
    limits = LimitsInput(requests_per_minute=60, usd_per_day=Decimal(1))
    users = {"ann": ModelLimitsInput(tokens_per_day=7)}
    await create_team(connection, NewTeam(id="search", limits=limits, user_limits=users), ADMIN)
    await update_team(connection, "search", TeamPatch(suspended=True), ADMIN)
    changed = TeamPatch(name="search", limits=LimitsInput(usd_per_day=Decimal(2)), user_limits=None)
    for _ in range(2):  # the second time nothing changes
        await update_team(connection, "search", changed, ADMIN)
    made = await create_key(connection, PEPPER, NewKey(team_id="search"), ADMIN, NOW)
    await revoke_key(connection, made.record.key_id, ADMIN)

    acts = await list_acts(connection, team_id="search")

    assert [act.action for act in acts] == ["key.revoked", "key.created", *2 * ["team.updated"], "team.created"]
    assert acts[0].subject == made.record.key_id
    assert {(act.actor, act.request_id) for act in acts} == {(ADMIN.actor, ADMIN.request_id)}
    was = acts[2].details["before"]
    assert acts[2].details == {"limits": {"nanousd_per_day": 2 * 10**9}, "before": was} and "ann" not in str(acts)
    assert was["limits"] == {"nanousd_per_day": 10**9}
    assert list(was["user_limits"].values()) == [{"tokens_per_day": 7}]
    assert acts[3].details == {"suspended": True, "before": {"suspended": False}}


async def test_gateways_hear_of_a_change_when_it_is_committed(database_url: str) -> None:
    """A committed change is announced on the access channel; one that is rolled back is not."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = await asyncpg.connect(database_url)
    await listener.add_listener(ACCESS_CHANNEL, lambda _connection, _pid, _channel, payload: heard.put_nowait(payload))
    database = Database(database_url)

    with pytest.raises(RuntimeError):
        async with database.begin() as connection:
            await create_team(connection, NewTeam(id="never"), ADMIN)
            raise RuntimeError
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="loud"), ADMIN)
    first = await asyncio.wait_for(heard.get(), 5)
    async with database.begin() as connection:
        made = await create_key(connection, PEPPER, NewKey(team_id="loud"), ADMIN, NOW)
        await revoke_key(connection, made.record.key_id, ADMIN)
    second = await asyncio.wait_for(heard.get(), 5)
    async with database.begin() as connection:
        await connection.execute(text("TRUNCATE teams, api_keys, audit_log CASCADE"))
    await database.close()
    await listener.close()

    assert (first, second) == ("loud", "loud")
