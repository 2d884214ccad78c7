# Batches in Postgres: claims and leases, ends that are counted once, fences, cancelling, expiring, and who sees what.

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

from gateway.accounts.schemas import NewKey, NewTeam
from gateway.accounts.team_keys import create_key
from gateway.accounts.teams import create_team
from gateway.batch.claims import (
    CLAIM,
    WAITING,
    ClaimedItem,
    claim_items,
    claim_suspect,
    has_suspects,
    renew_leases,
    requeue,
    use_due_index,
    waiting_batches,
)
from gateway.batch.file_store import get_file, list_files
from gateway.batch.finishing import ItemResult, expire_batches, finish_cancelled, finish_items
from gateway.batch.results import ENDED, ERRORS, error_of, read_results, response_of
from gateway.batch.retention import check_retained, purge_items
from gateway.batch.running.item import result_if_given_up
from gateway.batch.shapes import Item
from gateway.batch.store import Batch, add_items, begin_batch, cancel_batch, get_batch, list_batches, make_batch
from gateway.core.clock import Clock
from gateway.core.errors import Gone
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from protocol.errors import BadRequest, NotFound
from tests.support.factories import make_record

CLOCK = Clock()
TEAM = "team_a"
KEEP = 1000.0
HOOK = "https://example.com/hook"


@pytest.fixture
async def key_id(database: Database) -> str:
    """The key of a team."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id=TEAM), Act("test"))
        return (await create_key(connection, "pepper", NewKey(team_id=TEAM), Act("test"), CLOCK.now())).record.key_id


async def batch_of(database: Database, key_id: str, count: int) -> str:
    """Make a batch that runs, with a callback."""
    async with database.begin() as connection:
        batch = await make_batch(
            connection,
            CLOCK,
            team_id=TEAM,
            key_id=key_id,
            endpoint="/v1/chat/completions",
            callback_url=HOOK,
        )
        await add_items(connection, batch.id, 0, [Item(f"c{n}", b'{"model":"m"}') for n in range(count)])
        await begin_batch(connection, CLOCK, batch.id, count, "m", None)
    return batch.id


async def claim(
    database: Database, batch_id: str, owner: str, at_most: int = 100, room: int = 10**9
) -> list[ClaimedItem]:
    """Claim items."""
    async with database.begin() as connection:
        return await claim_items(connection, batch_id, owner, at_most, room)


async def finish(database: Database, owner: str, *ends: ItemResult) -> set[str]:
    """Say how items ended."""
    async with database.begin() as connection:
        return await finish_items(connection, CLOCK, owner, ends, KEEP)


async def look(database: Database, batch_id: str) -> Batch:
    """Return a batch."""
    async with database.begin() as connection:
        return await get_batch(connection, TEAM, batch_id)


async def expire_leases(database: Database) -> None:
    """Let every lease end."""
    async with database.begin() as connection:
        await connection.execute(text("UPDATE batch_items SET lease_until = now() - interval '1 s'"))


async def one(database: Database, query: str) -> Any:
    """Return the one value that a query finds."""
    async with database.begin() as connection:
        return (await connection.execute(text(query))).scalar_one()


def done(claim: ClaimedItem, cost: int = 100) -> ItemResult:
    """Return the end of an item that was answered."""
    record = make_record(CLOCK.new_id(), team_id=TEAM, client_request_id=claim.name, cost_nanousd=cost)
    return ItemResult(
        claim=claim,
        status="completed",
        request_id=record.request_id,
        response=response_of(200, record.request_id, b'{"text":"\\u0000 \xc3\xa9"}'),
        record=record,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        cost_nanousd=cost,
    )


def failed(claim: ClaimedItem) -> ItemResult:
    """Return the end of an item that was refused."""
    return ItemResult(claim=claim, status="failed", request_id=CLOCK.new_id(), response=response_of(400, "r", b"{}"))


async def test_the_last_end_ends_the_batch(database: Database, key_id: str) -> None:
    """Its row, its files, its callback and what it cost are there in the same moment."""
    batch_id = await batch_of(database, key_id, 3)
    first, second, third = await claim(database, batch_id, "w")

    await finish(database, "w", done(first), failed(second))
    assert (await look(database, batch_id)).status == "in_progress"
    await finish(database, "w", done(third, cost=7))

    batch = await look(database, batch_id)
    assert (batch.status, batch.completed, batch.failed, batch.cost_nanousd) == ("completed", 2, 1, 107)
    assert await one(database, "SELECT sum(cost_nanousd) FROM usage_records") == 107
    assert await one(database, "SELECT event FROM callbacks") == "batch.completed"
    assert batch.output_file_id is not None and batch.error_file_id is not None
    for file_id, statuses in ((batch.output_file_id, ("completed",)), (batch.error_file_id, ERRORS)):
        contents = b"".join([page async for page in read_results(database, batch_id, statuses)])
        async with database.begin() as connection:
            assert (await get_file(connection, TEAM, file_id)).bytes == len(contents)


async def test_results_are_lines_in_order(database: Database, key_id: str) -> None:
    """Whatever order they came in, and whatever is in them."""
    batch_id = await batch_of(database, key_id, 450)
    claims = await claim(database, batch_id, "w", 1000)
    for start in range(0, 450, 100):
        await finish(database, "w", *(done(each) for each in reversed(claims[start : start + 100])))

    pages = [page async for page in read_results(database, batch_id, ENDED)]

    lines = [msgspec.json.decode(line) for line in b"".join(pages).splitlines()]
    assert len(pages) == 3
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(450)]
    assert len({line["id"] for line in lines}) == 450
    assert lines[7]["response"]["body"] == {"text": "\x00 é"} and lines[7]["error"] is None


async def test_two_workers_claim_nothing_twice(database: Database, key_id: str) -> None:
    """Whoever comes while another claims passes over what that one takes."""
    batch_id = await batch_of(database, key_id, 40)

    found = await asyncio.gather(*(claim(database, batch_id, f"w{n}", 10) for n in range(6)))

    names = [each.name for claims in found for each in claims]
    assert len(names) == len(set(names)) and len(names) >= 10
    rest = await claim(database, batch_id, "last")
    assert len(rest) + len(names) == 40
    async with database.begin() as connection:
        assert await waiting_batches(connection) == []


async def test_a_late_worker_changes_nothing(database: Database, key_id: str) -> None:
    """Its lease has ended, another has the item: what it says is neither stored nor booked nor counted."""
    batch_id = await batch_of(database, key_id, 1)
    (stale,) = await claim(database, batch_id, "slow")
    await expire_leases(database)
    (fresh,) = await claim(database, batch_id, "quick")

    late = await finish(database, "slow", done(stale, cost=999))
    async with database.begin() as connection:
        await renew_leases(connection, "slow", [stale])
        await requeue(connection, "slow", stale, 0.0, is_try=True)
    stored = await finish(database, "quick", done(fresh, cost=5))

    assert (late, stored, fresh.tries) == (set(), {fresh.name}, 2)
    assert (await look(database, batch_id)).cost_nanousd == 5
    assert await one(database, "SELECT sum(cost_nanousd) FROM usage_records") == 5


async def test_an_end_that_is_said_twice_counts_once(database: Database, key_id: str) -> None:
    """When nobody heard that the first was stored: it is ours all the same, and paid once."""
    batch_id = await batch_of(database, key_id, 2)
    first, _ = await claim(database, batch_id, "w")
    end = done(first)

    assert await finish(database, "w", end) == await finish(database, "w", end) == {first.name}

    batch = await look(database, batch_id)
    assert (batch.completed, batch.cost_nanousd, batch.status) == (1, 100, "in_progress")
    assert await one(database, "SELECT count(*) FROM usage_records") == 1


async def test_a_renewed_lease_lasts(database: Database, key_id: str) -> None:
    """Nobody else gets what still runs."""
    batch_id = await batch_of(database, key_id, 1)
    claims = await claim(database, batch_id, "w")
    await expire_leases(database)
    async with database.begin() as connection:
        await renew_leases(connection, "w", claims)

    assert await claim(database, batch_id, "other") == []


async def test_what_is_lost_twice_runs_alone_and_then_ends(database: Database, key_id: str) -> None:
    """Only leases that end by themselves count, not what is put back; three more of them, alone, are the end."""
    batch_id = await batch_of(database, key_id, 2)
    for owner in ("a", "b"):
        lost, returned = await claim(database, batch_id, owner)
        async with database.begin() as connection:
            await requeue(connection, owner, returned, 0.0, is_try=False)
            assert not await has_suspects(connection)
        await expire_leases(database)
    assert [each.position for each in await claim(database, batch_id, "c")] == [returned.position]

    for losses in (2, 3, 4, 5):
        async with database.begin() as connection:
            assert await has_suspects(connection)
            alone = await claim_suspect(connection, "d")
            assert await claim_suspect(connection, "e") is None and not await has_suspects(connection)
        assert alone is not None and (alone.position, alone.losses) == (lost.position, losses)
        end = result_if_given_up(alone, CLOCK)
        assert (end is None) == (losses < 5)
        if end is None:
            await expire_leases(database)
        else:
            await finish(database, "d", end)

    assert (await look(database, batch_id)).failed == 1
    (page,) = [page async for page in read_results(database, batch_id, ERRORS)]
    assert msgspec.json.decode(page)["error"]["code"] == "worker_lost"


async def test_what_is_put_back_waits(database: Database, key_id: str) -> None:
    """A rate limit costs no try; an upstream's failure does."""
    batch_id = await batch_of(database, key_id, 2)
    first, second = await claim(database, batch_id, "w")
    async with database.begin() as connection:
        await requeue(connection, "w", first, 60.0, is_try=False)
        await requeue(connection, "w", second, 0.0, is_try=True)

    (again,) = await claim(database, batch_id, "w")
    assert (again.position, again.tries) == (second.position, 2)
    async with database.begin() as connection:
        await connection.execute(text("UPDATE batch_items SET not_before = now() - interval '1 s'"))
    assert [(each.position, each.tries) for each in await claim(database, batch_id, "w")] == [(first.position, 1)]


async def test_cancelling_lets_what_runs_end(database: Database, key_id: str) -> None:
    """What waits never runs, what runs is kept and paid, and the last of it ends the batch."""
    batch_id = await batch_of(database, key_id, 5)
    running, returned = await claim(database, batch_id, "w", 2)
    async with database.begin() as connection:
        assert (await cancel_batch(connection, CLOCK, TEAM, batch_id, KEEP)).status == "cancelling"
    assert await claim(database, batch_id, "w") == []
    async with database.begin() as connection:
        await requeue(connection, "w", returned, 0.0, is_try=False)
    await finish(database, "w", done(running))

    batch = await look(database, batch_id)
    assert (batch.status, batch.completed, batch.cost_nanousd) == ("cancelled", 1, 100)
    assert await one(database, "SELECT event FROM callbacks") == "batch.cancelled"
    async with database.begin() as connection:
        assert (await cancel_batch(connection, CLOCK, TEAM, batch_id, KEEP)).status == "cancelled"


async def test_a_cancelled_batch_whose_worker_died_ends(database: Database, key_id: str) -> None:
    """Once its leases have ended."""
    batch_id = await batch_of(database, key_id, 2)
    await claim(database, batch_id, "dead", 1)
    async with database.begin() as connection:
        await cancel_batch(connection, CLOCK, TEAM, batch_id, KEEP)
        await finish_cancelled(connection, CLOCK, KEEP)
    assert (await look(database, batch_id)).status == "cancelling"
    await expire_leases(database)
    async with database.begin() as connection:
        await finish_cancelled(connection, CLOCK, KEEP)

    assert (await look(database, batch_id)).status == "cancelled"


async def test_an_expired_batch_keeps_what_it_has(database: Database, key_id: str) -> None:
    """The rest are errors as OpenAI words them; who ends too late is too late."""
    batch_id = await batch_of(database, key_id, 3)
    first, second = await claim(database, batch_id, "w", 2)
    await finish(database, "w", done(first))
    async with database.begin() as connection:
        await connection.execute(text("UPDATE batches SET expires_at = now() - interval '1 s'"))
        assert await waiting_batches(connection) == []
        assert await expire_batches(connection, CLOCK, KEEP) == [batch_id]
    assert await finish(database, "w", done(second)) == set()

    batch = await look(database, batch_id)
    lines = b"".join([page async for page in read_results(database, batch_id, ENDED)]).splitlines()
    assert (batch.status, batch.completed, batch.cost_nanousd) == ("expired", 1, 100)
    told = msgspec.json.decode(error_of("batch_expired", ""))["code"]
    assert [(msgspec.json.decode(line)["error"] or {}).get("code") for line in lines] == [None, told, told]
    assert await one(database, "SELECT event FROM callbacks") == "batch.expired"


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.soak)])
async def test_the_last_two_ends_at_once_end_it_once(database: Database, key_id: str, times: int) -> None:
    """Two workers finish the two last items in the same moment, three batches at a time: one callback each."""
    batch_ids = await many_of_two(database, key_id, times)

    for start in range(0, times, 3):
        pairs = [(batch_id, place) for batch_id in batch_ids[start : start + 3] for place in (0, 1)]
        ends = [finish(database, f"w{place}", done(claimed_item(batch_id, place))) for batch_id, place in pairs]
        await asyncio.gather(*ends)

    ended = "SELECT count(*) FROM batches WHERE status = 'completed' AND completed = 2 AND output_file_id IS NOT NULL"
    assert await one(database, ended) == times
    assert await one(database, "SELECT count(*) FROM callbacks") == times
    assert await one(database, "SELECT count(DISTINCT batch_id) FROM callbacks") == times
    assert await one(database, "SELECT count(*) FROM usage_records") == 2 * times


async def many_of_two(database: Database, key_id: str, count: int) -> list[str]:
    """Make batches of two items, each claimed by a worker of its own, without a statement for each."""
    first = await batch_of(database, key_id, 2)
    copy = """
        INSERT INTO batches (id, team_id, key_id, endpoint, status, callback_url, total, expires_at, in_progress_at)
        SELECT id || '_' || number, team_id, key_id, endpoint, status, callback_url, total, expires_at, in_progress_at
        FROM batches, generate_series(2, :count) AS number
    """
    items = """
        INSERT INTO batch_items (batch_id, position, custom_id, body, status)
        SELECT batches.id, position, custom_id, body, item.status FROM batches, batch_items AS item
        WHERE batches.id <> item.batch_id
    """
    claims = """
        UPDATE batch_items SET status = 'running', tries = 1, lease_owner = 'w' || position,
               lease_until = now() + interval '1 hour'
    """
    async with database.begin() as connection:
        await connection.execute(text(copy), {"count": count})
        await connection.execute(text(items))
        await connection.execute(text(claims))
    return [first, *(f"{first}_{number}" for number in range(2, count + 1))]


def claimed_item(batch_id: str, position: int) -> ClaimedItem:
    """Return the first claim of an item."""
    return ClaimedItem(
        batch_id=batch_id,
        position=position,
        custom_id=f"c{position}",
        body=b"{}",
        tries=1,
        losses=0,
        is_first=True,
        endpoint="/v1/chat/completions",
        concurrency_group="m",
        key_id="",
        priority="normal",
        expires_at=0.0,
    )


async def test_what_was_asked_is_erased_with_its_answer_and_what_was_answered_in_time(
    database: Database, key_id: str
) -> None:
    """Then it is said that the results are gone: there is no empty answer, and none in part."""
    batch_id = await batch_of(database, key_id, 3)
    first, second = await claim(database, batch_id, "w", 2)
    await finish(database, "w", done(first))
    assert await one(database, "SELECT array_agg(length(body) ORDER BY position) FROM batch_items") == [0, 13, 13]
    (third,) = await claim(database, batch_id, "w")
    await finish(database, "w", done(second), done(third))
    batch = await look(database, batch_id)

    async with database.begin() as connection:
        await check_retained(connection, CLOCK, batch, KEEP)
        assert await purge_items(connection, KEEP) == 0
        with pytest.raises(Gone, match="erased"):
            await check_retained(connection, CLOCK, batch, -1.0)
        assert await purge_items(connection, -1.0) == 3
        with pytest.raises(Gone, match="erased"):
            await check_retained(connection, CLOCK, batch, KEEP)


async def test_cancelling_while_all_ends_never_locks_up(database: Database, key_id: str) -> None:
    """Claims, ends, a cancel and an expiry in one moment: each batch ends, in one way."""
    for _ in range(15):
        batch_id = await batch_of(database, key_id, 8)
        claims = await claim(database, batch_id, "w", 6)

        async def cancel(batch_id: str = batch_id) -> None:
            async with database.begin() as connection:
                await cancel_batch(connection, CLOCK, TEAM, batch_id, KEEP)

        async def expire(batch_id: str = batch_id) -> None:
            async with database.begin() as connection:
                await connection.execute(text("UPDATE batches SET expires_at = now() WHERE id = :id"), {"id": batch_id})
                await expire_batches(connection, CLOCK, KEEP)

        ends = [finish(database, "w", done(each)) for each in claims]
        await asyncio.gather(*ends[:3], cancel(), *ends[3:], claim(database, batch_id, "x"))
        await expire()
        assert (await look(database, batch_id)).status in ("cancelled", "expired")


async def test_another_team_sees_nothing(database: Database, key_id: str) -> None:
    """Neither the batch nor its files are there for it."""
    batch_id = await batch_of(database, key_id, 1)
    (only,) = await claim(database, batch_id, "w")
    await finish(database, "w", done(only))
    file_id = (await look(database, batch_id)).output_file_id
    assert file_id is not None
    async with database.begin() as connection:
        for question in (
            get_batch(connection, "other", batch_id),
            cancel_batch(connection, CLOCK, "other", batch_id, KEEP),
            get_file(connection, "other", file_id),
        ):
            with pytest.raises(NotFound):
                await question


async def test_what_waits_holds_up_nothing_behind_it(database: Database, key_id: str) -> None:
    """What was never tried comes first, then what is due, the longest first."""
    batch_id = await batch_of(database, key_id, 4)
    for position, wait in ((0, -1.0), (1, 60.0), (2, -2.0)):
        (each,) = await claim(database, batch_id, "w", 1)
        assert each.position == position
        async with database.begin() as connection:
            await requeue(connection, "w", each, 60.0, is_try=True)
            moved = "UPDATE batch_items SET not_before = now() + make_interval(secs => :wait) WHERE position = :place"
            await connection.execute(text(moved), {"wait": wait, "place": position})

    assert [(await claim(database, batch_id, "w", 1))[0].position for _ in range(3)] == [3, 2, 0]
    assert await claim(database, batch_id, "w") == []


@pytest.mark.parametrize("waiting", [0, 10_000, 20_000])
async def test_a_claim_reads_little_however_much_there_is(database: Database, key_id: str, waiting: int) -> None:
    """Of 20,000 items, however many of them wait for another try, and though no statistics know of them yet."""
    batch_id = await batch_of(database, key_id, 1)
    many = """
        INSERT INTO batch_items (batch_id, position, custom_id, body, status, not_before)
        SELECT :batch_id, number, number, '{}', 'queued',
               CASE WHEN number <= :waiting THEN now() + interval '1 hour' END
        FROM generate_series(1, 20000) AS number
    """
    async with database.begin() as connection:
        await connection.execute(text(many), {"batch_id": batch_id, "waiting": waiting})
    assert len(await claim(database, batch_id, "w", 16)) == (1 if waiting == 20_000 else 16)
    asked = {"batch_id": batch_id, "owner": "w", "at_most": 16, "room": 1000, "lease": timedelta(seconds=1)}

    for query, values in ((CLAIM, asked), (WAITING, {})):
        async with database.begin() as connection:
            await use_due_index(connection)
            explain = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {query.text}")
            (plan,) = (await connection.execute(explain, values)).scalar_one()
        assert sum(rows_read(plan["Plan"])) < 150, plan


def rows_read(node: dict[str, Any]) -> Iterator[float]:
    """Yield how many rows each scan of a plan looked at."""
    if "Scan" in node["Node Type"]:
        yield (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    for each in node.get("Plans", ()):
        yield from rows_read(each)


async def test_a_claim_takes_no_more_bytes_than_there_is_room(database: Database, key_id: str) -> None:
    """Items of 13 bytes: the one that reaches the room is the last, and one always fits."""
    batch_id = await batch_of(database, key_id, 6)

    taken = [[each.position for each in await claim(database, batch_id, "w", room=room)] for room in (1, 27, 13)]

    assert taken == [[0], [1, 2, 3], [4]]


async def test_a_list_does_not_end_where_its_place_was_lost(database: Database, key_id: str) -> None:
    """The id to go on after may be deleted, or another team's: that is said, not an empty page."""
    batch_id = await batch_of(database, key_id, 1)
    async with database.begin() as connection:
        assert await list_batches(connection, TEAM, after=batch_id, limit=5) == []
        with pytest.raises(BadRequest):
            await list_batches(connection, "other", after=batch_id, limit=5)
        with pytest.raises(BadRequest):
            await list_files(connection, TEAM, purpose=None, after="file-gone", limit=5, ascending=True)
