# The input of a batch that came as a file, checked in Postgres: what cannot be taken in fails its own batch; it neither
# stops the worker nor holds up the batches behind it.

from __future__ import annotations

import json

import pytest
from sqlalchemy import text

from billing.core.store_errors import POSTGRES_AWAY
from gateway.accounts.schemas import NewKey, NewTeam
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team
from gateway.batch.checking import MOST_TRIES, check_next_input
from gateway.batch.claims import claim_items
from gateway.batch.file_store import add_chunk, begin_file, delete_file, end_file
from gateway.batch.shapes import Item
from gateway.batch.store import Batch, add_items, begin_batch, cancel_batch, get_batch, make_batch
from gateway.core.clock import Clock
from gateway.storage.audit_log import Act
from gateway.storage.database import Database

CLOCK = Clock()
TEAM = "team_a"
KEEP = 1000.0


@pytest.fixture
async def key_id(database: Database) -> str:
    """The key of a team."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id=TEAM), Act("test"))
        return (await create_key(connection, "pepper", NewKey(team_id=TEAM), Act("test"), CLOCK.now())).record.key_id


async def batch_of(database: Database, key_id: str, contents: bytes, *, claimed: int | None = None) -> str:
    """Make a batch of a file, unchecked; ``claimed``: how long the file says it is."""
    async with database.begin() as connection:
        file_id = await begin_file(connection, TEAM, "x.jsonl", "batch")
        await add_chunk(connection, file_id, 0, contents)
        await end_file(connection, file_id, len(contents) if claimed is None else claimed, KEEP)
        batch = await make_batch(
            connection,
            CLOCK,
            team_id=TEAM,
            key_id=key_id,
            endpoint="/v1/chat/completions",
            input_file_id=file_id,
        )
    return batch.id


def line(custom_id: str = "a", body: str = '{"model":"m"}') -> bytes:
    """Return a line of an input file."""
    return b'{"custom_id":%b,"method":"POST","url":"/v1/chat/completions","body":%b}\n' % (
        json.dumps(custom_id).encode(),
        body.encode(),
    )


async def look(database: Database, batch_id: str) -> Batch:
    """Return a batch."""
    async with database.begin() as connection:
        return await get_batch(connection, TEAM, batch_id)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (line(body='{"model":"m","x":' + "[" * 50_000 + "]" * 50_000 + "}"), "invalid_json_line"),
        (b'{"custom_id":"a","other":' + b'{"x":' * 50_000 + b"1" + b"}" * 50_000 + b"}\n", "invalid_json_line"),
        (line(body='{"model":"a\\u0000b"}'), "invalid_body"),
        (line(body='{"model":"' + "m" * 1000 + '"}'), "invalid_body"),
        (line(body='{"model":""}'), "invalid_body"),
        (line(body='","'), "invalid_body"),
    ],
)
async def test_a_hostile_line_fails_its_batch(database: Database, key_id: str, bad: bytes, code: str) -> None:
    """With its line, and the batch behind it is checked."""
    hostile = await batch_of(database, key_id, line("first") + bad)
    harmless = await batch_of(database, key_id, line())

    assert [await check_next_input(database, CLOCK) for _ in range(3)] == [hostile, harmless, None]

    ended = await look(database, hostile)
    assert (ended.status, [(error["line"], error["code"]) for error in ended.errors or ()]) == ("failed", [(2, code)])
    assert (await look(database, harmless)).status == "in_progress"


async def test_a_file_that_goes_while_it_is_read_fails_its_batch(database: Database, key_id: str) -> None:
    """Half of an input is not run: it would look like the whole."""
    batch_id = await batch_of(database, key_id, line("a") + line("b"), claimed=9999)

    await check_next_input(database, CLOCK)

    ended = await look(database, batch_id)
    assert (ended.status, [error["code"] for error in ended.errors or ()]) == ("failed", ["file_not_found"])


async def test_a_file_that_is_deleted_is_missed_before_it_was_read_and_not_after(
    database: Database, key_id: str
) -> None:
    """A batch runs on what it has read of it."""
    early, late = await batch_of(database, key_id, line()), await batch_of(database, key_id, line())
    files = {batch_id: (await look(database, batch_id)).input_file_id or "" for batch_id in (early, late)}
    async with database.begin() as connection:
        await delete_file(connection, TEAM, files[early])
    assert [await check_next_input(database, CLOCK) for _ in range(2)] == [early, late]
    async with database.begin() as connection:
        await delete_file(connection, TEAM, files[late])
        (claim,) = await claim_items(connection, late, "w", 1, 10**6)

    assert [error["code"] for error in (await look(database, early)).errors or ()] == ["file_not_found"]
    assert ((await look(database, late)).status, claim.body) == ("in_progress", b'{"model":"m"}')


async def test_an_input_that_cannot_be_stored_waits_behind_others_and_fails(database: Database, key_id: str) -> None:
    """Postgres refuses it again and again: that is told, and meanwhile others are checked."""
    async with database.begin() as connection:
        await connection.execute(text("ALTER TABLE batch_items ADD CHECK (custom_id <> 'unwilling')"))
    unwilling = await batch_of(database, key_id, line("unwilling"))
    harmless = await batch_of(database, key_id, line())

    with pytest.raises(POSTGRES_AWAY):
        await check_next_input(database, CLOCK)
    assert await check_next_input(database, CLOCK) == harmless
    for _ in range(MOST_TRIES - 1):
        with pytest.raises(POSTGRES_AWAY):
            await check_next_input(database, CLOCK)

    ended = await look(database, unwilling)
    assert (ended.status, [error["code"] for error in ended.errors or ()]) == ("failed", ["server_error"])


async def test_a_batch_can_be_cancelled_while_its_input_is_checked(database: Database, key_id: str) -> None:
    """The cancel does not wait for the check, and the check finds out."""
    batch_id = await batch_of(database, key_id, line())

    async with database.begin() as checking:
        await add_items(checking, batch_id, 0, [Item("a", b"{}")])
        async with database.begin() as connection:
            cancelled = await cancel_batch(connection, CLOCK, TEAM, batch_id, KEEP)
        begun = await begin_batch(checking, CLOCK, batch_id, 1, "m", None)

    assert (cancelled.status, begun) == ("cancelled", None)
