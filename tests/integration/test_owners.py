# Owners as people see them: what each holds, which do not answer, and the end of one whose journal is lost.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import Result
from sqlalchemy import text
from typer.testing import CliRunner

import gateway.cli
from billing.upkeep.audit import audit
from billing.upkeep.owner_list import (
    RETIRED_AFTER,
    SILENT,
    SilentRoom,
    list_owners,
    retire_owner,
    silent_owners,
    silent_room,
)
from gateway.core.clock import Clock
from gateway.storage.audit_log import list_acts
from gateway.storage.database import Database
from tests.support.config_text import write_config
from tests.support.factories import make_record
from tests.support.lessee import Lessee


@pytest.fixture
async def house(database: Database) -> AsyncIterator[Database]:
    """Four owners that hold the same of a team: one answers, one is silent, one is lost, one has ended."""
    clock = Clock()
    async with database.begin() as connection:
        await connection.execute(text("INSERT INTO teams (id, name) VALUES ('team_a', 'A')"))
    for name in ("living", "silent", "lost", "ended"):
        owner = await Lessee(database, clock, name).begin()
        assert await owner.draw(1000, 5_000_000)
        await owner.book(make_record(clock.new_id()))
        if name == "ended":
            await owner.end()
    await silence(database, "silent", SILENT + 1)
    await silence(database, "lost", 7200)
    async with database.begin() as connection:
        await connection.execute(text("UPDATE owners SET lost_at = now() WHERE id = 'lost'"))
    yield database


async def silence(database: Database, owner: str, seconds: float) -> None:
    """Let an owner have been seen last so many seconds ago."""
    async with database.begin() as connection:
        later = text("UPDATE owners SET seen_at = clock_timestamp() - CAST(:ago AS interval) WHERE id = :id")
        await connection.execute(later, {"id": owner, "ago": timedelta(seconds=seconds)})


async def test_owners_are_listed_with_what_they_hold(house: Database) -> None:
    """Seen last first; what each holds unused, by its teams; ended ones only where they are asked for."""
    async with house.begin() as connection:
        shown = await list_owners(connection)
        ended = {one.id for one in await list_owners(connection, with_ended=True)} - {one.id for one in shown}

    assert [(one.id, one.state) for one in shown] == [("living", "answers"), ("silent", "silent"), ("lost", "lost")]
    assert {(one.scopes, one.unused_tokens, one.unused_nanousd) for one in shown} == {(2, 880, 4_600_000)}
    assert ended == {"ended"}


async def test_room_of_owners_that_do_not_answer_is_known(house: Database) -> None:
    """Of a team and of a key, today and this month; what a living one holds is not in it."""
    async with house.begin() as connection:
        assert await silent_owners(connection) == 2
        assert await silent_room(connection, "team:team_a") == SilentRoom(1760, 9_200_000, 9_200_000)
        assert await silent_room(connection, "key:key_a") == SilentRoom(1760, 9_200_000, 9_200_000)
        assert not await silent_room(connection, "team:team_b")
        await connection.execute(text("UPDATE owners SET seen_at = clock_timestamp()"))
        assert (await silent_owners(connection), bool(await silent_room(connection, "team:team_a"))) == (0, False)


@pytest.mark.parametrize(("owner", "said"), [("living", "alive"), ("ended", "ended"), ("nobody", "unknown")])
async def test_an_owner_that_lives_or_has_ended_is_not_retired(house: Database, owner: str, said: str) -> None:
    """One that beat in the last ten seconds may hold calls this moment."""
    await silence(house, "living", RETIRED_AFTER - 2)
    before = await balances(house)
    async with house.begin() as connection:
        assert await retire_owner(connection, owner) == said

    assert await balances(house) == before


async def test_what_a_retired_owner_held_goes_back(house: Database) -> None:
    """Balances have its room again, what it spent stays spent, and a journal that returns all the same is booked."""
    lost = Lessee(house, Clock(), "lost")
    [drawn] = {each for each in await balances(house) if each > 10_000}
    async with house.begin() as connection:
        assert await retire_owner(connection, "lost") == "retired"

    assert {each for each in await balances(house) if each > 10_000} == {drawn - 4_600_000}
    assert await lost.store.beat("lost", 0.0, 0) is None
    await lost.book(make_record(lost.clock.new_id()))
    assert {each for each in await balances(house) if each > 10_000} == {drawn - 4_200_000}
    assert (await audit(house, lost.clock.today())).differences == []


async def balances(database: Database) -> list[int]:
    """Return what all balances have drawn."""
    async with database.begin() as connection:
        return list((await connection.execute(text("SELECT drawn FROM balances ORDER BY 1"))).scalars())


async def test_the_commands_list_and_retire(house: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tollgate owners` shows who holds what; `retire` asks, and says why it will not; the audit log has it."""
    if not any(group.name == "owners" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()
    config = write_config(tmp_path / "tollgate.yaml", house.url, "redis://127.0.0.1:1")
    monkeypatch.setenv("TOLLGATE_CONFIG", str(config))
    monkeypatch.setenv("COLUMNS", "400")

    async def tollgate(*words: str, says: str | None = None) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, gateway.cli.app, list(words), says)

    table, listed = await tollgate("owners"), await tollgate("owners", "list", "--ended", "--format", "json")
    alive = await tollgate("owners", "retire", "living", "--yes")
    unsure = await tollgate("owners", "retire", "lost", says="n\n")
    done = await tollgate("owners", "retire", "lost", says="y\n")
    again = await tollgate("owners", "retire", "lost", "--yes")

    assert table.exit_code == 0 and "silent" in table.output and "0.0046" in table.output
    assert [one["id"] for one in json.loads(listed.output)["data"]] == ["ended", "living", "silent", "lost"]
    assert (alive.exit_code, unsure.exit_code, done.exit_code, again.exit_code) == (1, 1, 0, 1)
    assert "was seen in the last 10 s" in alive.output and "nothing was done" in unsure.output
    assert "lost has ended: $0.0046 and 880 tokens went back to 2 teams and keys" in done.output
    assert "has ended already" in again.output
    async with house.begin() as connection:
        [act] = await list_acts(connection, action="owner.retired")
    assert (act.subject, act.details["unused_tokens"]) == ("lost", 880)
