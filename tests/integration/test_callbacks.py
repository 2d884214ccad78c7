# Callbacks from the outbox to a receiver: signed, at least once, in fair turns, delivered or given up after 24 hours.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest
from openai import OpenAI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.schemas import NewTeam, TeamPatch
from gateway.accounts.team_secrets import PURPOSE, create_secret, delete_secret, list_secrets
from gateway.accounts.teams import create_team, update_team
from gateway.core.background import stop_all
from gateway.core.errors import Conflict
from gateway.egress.destinations import Guard
from gateway.outbox.schedule import KEEP_TRYING
from gateway.outbox.signing import Event
from gateway.outbox.store import (
    LEASE,
    PER_RECEIVER,
    PER_TEAM,
    ClaimedCallback,
    claim_due,
    drop_old,
    enqueue,
    find_callback,
    list_callbacks,
    reopen,
)
from gateway.storage.audit_log import Act, list_acts
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.webhooks import budget_alerts
from gateway.webhooks import deliverer as deliverer_module
from gateway.webhooks import sender as sender_module
from gateway.webhooks.deliverer import Deliverer
from gateway.webhooks.sender import Sender
from protocol.errors import NotFound
from tests.support.clock import SetClock
from tests.support.receiver import HANG, OK, RESET, Delivery, Receiver, answer, receiving

LOOPBACK = (ip_network("127.0.0.0/8"),)
ADMIN = Act("tests")
SEALER = Sealer("pepper", PURPOSE)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Somebody who listens."""
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
def clock() -> SetClock:
    """Now, until a test moves it."""
    return SetClock(round(time.time()))


@pytest.fixture
async def secret(database: Database) -> str:
    """The secret of the one team there is."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="search"), ADMIN)
        return (await create_secret(connection, SEALER, "search", ADMIN)).secret


@pytest.fixture
async def worker(database: Database, clock: SetClock) -> AsyncIterator[Callable[[], Deliverer]]:
    """Make deliverers, each as another worker has one."""
    made: list[Deliverer] = []

    def make() -> Deliverer:
        made.append(Deliverer(database, clock, Sender(Guard(LOOPBACK)), SEALER, lambda: 1.0))
        return made[-1]

    yield make
    for each in made:
        await each.finish(0)


async def put(database: Database, clock: SetClock, url: str, team_id: str = "search") -> str:
    async with database.begin() as connection:
        event = Event.now(clock, "batch.completed", {"id": "batch_1"})
        return await enqueue(connection, event, team_id=team_id, url=url)


async def row(database: Database, callback_id: str) -> dict[Any, Any]:
    async with database.begin() as connection:
        found = await find_callback(connection, callback_id)
    assert found is not None
    return dict(found)


async def deliver(worker: Deliverer) -> int:
    """Try what is due, and wait for how it ends."""
    count = await worker.start_due()
    await worker.finish(30)
    return count


async def test_an_event_arrives_signed(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """What commits in the outbox reaches the receiver, and the stock client verifies it."""
    callback_id = await put(database, clock, receiver.url())
    await deliver(worker())

    (delivery,) = receiver.deliveries
    with OpenAI(api_key="none", webhook_secret=secret) as client:
        event = client.webhooks.unwrap(delivery.body, delivery.headers)
    assert (event.id, event.type) == (callback_id, "batch.completed")
    assert delivery.headers["webhook-id"] == callback_id
    stored = await row(database, callback_id)
    assert (stored["tries"], stored["last_status"], stored["last_error"]) == (1, 204, None)
    assert stored["delivered_at"].timestamp() == clock.now()
    assert stored["lease_owner"] is stored["given_up_at"] is None


async def test_nothing_goes_out_that_was_rolled_back(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """An event stands or falls with the transaction that it speaks of."""
    with pytest.raises(RuntimeError):
        async with database.begin() as connection:
            event = Event.now(clock, "batch.completed", {})
            await enqueue(connection, event, team_id="search", url=receiver.url())
            raise RuntimeError

    assert await deliver(worker()) == 0
    assert receiver.connections == 0


async def test_both_secrets_sign_while_there_are_two(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """A receiver changes over at its own time; a third secret must wait for the first to go."""
    async with database.begin() as connection:
        second = await create_secret(connection, SEALER, "search", ADMIN)
        first = (await list_secrets(connection, "search"))[0]
    with pytest.raises(Conflict) as refusal:
        async with database.begin() as connection:
            await create_secret(connection, SEALER, "search", ADMIN)
    await put(database, clock, receiver.url())
    await deliver(worker())
    async with database.begin() as connection:
        await delete_secret(connection, "search", first.id, ADMIN)
    await put(database, clock, receiver.url())
    await deliver(worker())

    assert first.id in refusal.value.message and second.record.id in refusal.value.message
    signatures = [delivery.headers["webhook-signature"].split(" ") for delivery in receiver.deliveries]
    assert [len(each) for each in signatures] == [2, 1]
    with OpenAI(api_key="none") as client:
        for old_or_new in (secret, second.secret):
            client.webhooks.unwrap(receiver.deliveries[0].body, receiver.deliveries[0].headers, secret=old_or_new)
        client.webhooks.unwrap(receiver.deliveries[1].body, receiver.deliveries[1].headers, secret=second.secret)


async def test_secrets_are_sealed_and_audited(database: Database, secret: str) -> None:
    """Neither the table nor the audit log shows one; another team cannot end it."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="other"), ADMIN)
        (record,) = await list_secrets(connection, "search")
        with pytest.raises(NotFound):
            await delete_secret(connection, "other", record.id, ADMIN)
        await delete_secret(connection, "search", record.id, ADMIN)
        acts = [act.action for act in await list_acts(connection, team_id="search")]
        stored = ""
        for table in ("webhook_secrets", "audit_log"):
            rows = await connection.execute(text(f"SELECT {table}::text FROM {table}"))
            stored += "\n".join(each[0] for each in rows)

    assert secret.removeprefix("whsec_") not in stored
    assert acts == ["webhook_secret.deleted", "webhook_secret.created", "team.created"]


async def test_events_wait_for_a_secret(
    database: Database, clock: SetClock, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """Nothing goes out unsigned: it says what is missing, and goes when that is there."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="search"), ADMIN)
    callback_id = await put(database, clock, receiver.url())
    await deliver(worker())
    waiting = await row(database, callback_id)
    async with database.begin() as connection:
        await create_secret(connection, SEALER, "search", ADMIN)
    clock.time = time.time() + 1  # it is due by the clock of Postgres
    await deliver(worker())

    assert "no usable webhook secret" in waiting["last_error"] and waiting["given_up_at"] is None
    assert (await row(database, callback_id))["delivered_at"] is not None
    assert len(receiver.deliveries) == 1


async def test_a_failed_try_is_repeated_with_growing_waits(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """The same id and body with a new timestamp, once the wait is over and not before."""
    receiver.acts = [answer(500), RESET, answer(307, "location: http://169.254.169.254/"), OK]
    callback_id = await put(database, clock, receiver.url())
    one = worker()
    waits = []
    while not (stored := await row(database, callback_id))["delivered_at"]:
        wait = stored["next_try_at"].timestamp() - clock.now()
        if wait:
            waits.append(wait)
            clock.move(wait - 0.5)
            assert await deliver(one) == 0
            clock.move(0.5)
        assert await deliver(one) == 1

    assert waits == [5.0, 10.0, 20.0]
    assert len({delivery.headers["webhook-id"] for delivery in receiver.deliveries}) == 1
    assert len({delivery.body for delivery in receiver.deliveries}) == 1
    assert len({delivery.headers["webhook-timestamp"] for delivery in receiver.deliveries}) == 4
    assert (await row(database, callback_id))["tries"] == 4


async def test_retry_after_moves_the_next_try(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """A receiver that says when it will be back is believed, up to an hour."""
    receiver.acts = [answer(503, "retry-after: 600")]
    callback_id = await put(database, clock, receiver.url())
    await deliver(worker())

    assert (await row(database, callback_id))["next_try_at"].timestamp() == clock.now() + 600


async def test_after_24_hours_it_is_kept_as_undelivered(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """A last try at the end of the day, then no more; an admin can have it delivered again."""
    receiver.acts = [answer(500)]
    callback_id = await put(database, clock, receiver.url())
    began = clock.now()
    one = worker()
    while not (stored := await row(database, callback_id))["given_up_at"]:
        clock.time = max(clock.now(), stored["next_try_at"].timestamp())
        await deliver(one)
    tries = len(receiver.deliveries)
    clock.move(KEEP_TRYING)
    assert await deliver(one) == 0
    async with database.begin() as connection:
        undelivered = await list_callbacks(connection, team_id="search", is_undelivered=True)
        await reopen(connection, callback_id, clock.now())
    receiver.acts = [OK]
    await deliver(one)

    assert stored["given_up_at"].timestamp() == began + KEEP_TRYING
    assert (stored["last_status"], stored["tries"]) == (500, tries)
    assert 24 <= tries <= 60
    assert [each["id"] for each in undelivered] == [callback_id]
    again = await row(database, callback_id)
    assert (again["tries"], again["given_up_at"]) == (1, None) and again["delivered_at"] is not None
    assert receiver.deliveries[-1].headers["webhook-id"] == callback_id


async def test_workers_that_were_away_for_days_try_once_more(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """What nobody tried is not given up untried."""
    callback_id = await put(database, clock, receiver.url())
    clock.move(3 * KEEP_TRYING)
    await deliver(worker())

    assert (await row(database, callback_id))["delivered_at"] is not None


async def test_gone_gives_up_at_once(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """410 ends it, for this callback."""
    receiver.acts = [answer(410)]
    callback_id = await put(database, clock, receiver.url())
    await deliver(worker())

    assert (await row(database, callback_id))["given_up_at"] is not None


async def test_a_delivered_one_can_be_delivered_again(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """A receiver that lost it gets it again, under the same id."""
    callback_id = await put(database, clock, receiver.url())
    await deliver(worker())
    async with database.begin() as connection:
        await reopen(connection, callback_id, clock.now())
        assert await reopen(connection, "evt_unknown", clock.now()) is None
    await deliver(worker())

    assert [delivery.headers["webhook-id"] for delivery in receiver.deliveries] == [callback_id] * 2


async def test_two_workers_never_try_the_same_at_once(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """Whoever claims first has it; the other finds nothing."""
    paths = [f"/{number}" for number in range(40)]
    for path in paths:
        await put(database, clock, receiver.url(path))
    workers = [worker() for _ in range(3)]
    while sum(await asyncio.gather(*(deliver(each) for each in workers))):
        pass

    assert sorted(receiver.paths()) == sorted(paths)


async def test_many_who_claim_at_once_share(database: Database, clock: SetClock, secret: str) -> None:
    """What another worker took between our look and our lock is not taken again."""
    async with database.begin() as connection:
        await connection.execute(
            text("INSERT INTO teams (id, name) SELECT 'team_' || n, 'x' FROM generate_series(1, 200) n")
        )
    for number in range(1, 201):
        await put(database, clock, f"https://host-{number}.example/", team_id=f"team_{number}")
    claimed: list[str] = []

    async def claim_all(owner: str) -> None:
        while True:
            async with database.begin() as connection:
                found = await claim_due(connection, owner=owner, now=clock.now(), running=[], at_most=3)
            if not found:
                return
            claimed.extend(each.id for each in found)

    await asyncio.gather(*(claim_all(f"worker-{number}") for number in range(8)))

    assert len(claimed) == len(set(claimed)) == 200


async def test_a_callback_of_a_dead_worker_is_tried_by_another(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """Its lease runs out; the receiver may get it twice, always under one id. The late worker changes nothing."""
    receiver.acts = [HANG, OK]
    callback_id = await put(database, clock, receiver.url())
    dead = worker()
    await dead.start_due()
    while not receiver.deliveries:
        await asyncio.sleep(0.01)
    other = worker()
    before = await deliver(other)
    clock.move(LEASE)
    after = await deliver(other)
    delivered = await row(database, callback_id)
    for task in list(dead._running):  # its try ends now, too late, as a failure
        task.cancel()
    await dead.finish(0)

    assert (before, after) == (0, 1)
    assert [each.headers["webhook-id"] for each in receiver.deliveries] == [callback_id] * 2
    assert await row(database, callback_id) == delivered
    assert delivered["delivered_at"] is not None


async def test_a_late_failure_does_not_undo_the_lease_of_another(
    database: Database,
    clock: SetClock,
    secret: str,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    worker: Callable[[], Deliverer],
) -> None:
    """Only the holder of the lease says when the next try is."""
    monkeypatch.setattr(sender_module, "SEND_WITHIN", 1.0)
    receiver.acts = [HANG]
    callback_id = await put(database, clock, receiver.url())
    late = worker()
    await late.start_due()
    clock.move(LEASE)
    async with database.begin() as connection:
        (claimed,) = await claim_due(connection, owner="holder", now=clock.now(), running=[], at_most=9)
    await asyncio.wait(late._running, timeout=30)
    stored = await row(database, callback_id)

    assert claimed.id == callback_id and claimed.tries == 2
    assert (stored["lease_owner"], stored["last_error"]) == ("holder", None)


async def test_a_worker_that_ends_gives_back_what_runs(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """Others need not wait for its leases."""
    receiver.acts = [HANG, OK]
    callback_id = await put(database, clock, receiver.url())
    ending = worker()
    await ending.start_due()
    while not receiver.deliveries:
        await asyncio.sleep(0.01)
    await ending.finish(0.1)
    await deliver(worker())

    assert (await row(database, callback_id))["delivered_at"] is not None


async def test_a_slow_receiver_holds_up_no_other(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """However much waits for it, it has a few places, no transaction waits with it, and others pass by."""
    async with receiving() as slow:
        slow.acts = [HANG]
        for number in range(30):
            await put(database, clock, slow.url(f"/{number}"))
        clock.move(1)
        for number in range(3):
            await put(database, clock, receiver.url(f"/{number}"))
        one = worker()
        await one.start_due()
        while len(receiver.deliveries) < 3:
            await asyncio.sleep(0.01)
            await one.start_due()
        for _ in range(3):
            await one.start_due()
        held = [each.receiver for each in one._running.values()]
        transactions = database.engine.pool.checkedout()  # type: ignore[attr-defined]
        await one.finish(0)

    assert sorted(receiver.paths()) == ["/0", "/1", "/2"]
    assert transactions == 0
    assert len([each for each in held if each.endswith(f":{slow.port}")]) == PER_RECEIVER
    assert slow.most_running <= PER_RECEIVER


async def test_one_team_with_many_hosts_leaves_room(database: Database, clock: SetClock, secret: str) -> None:
    """A team's places are few as well; of its hosts each has a turn, and other teams have theirs."""
    async with database.begin() as connection:
        await create_team(connection, NewTeam(id="other"), ADMIN)
    for number in range(40):
        await put(database, clock, f"https://host-{number % 20:02}.example/")
    clock.move(1)
    late = [await put(database, clock, "https://other.example/", team_id="other") for _ in range(2)]
    async with database.begin() as connection:
        first = await claim_due(connection, owner="a", now=clock.now(), running=[], at_most=64)
        second = await claim_due(connection, owner="a", now=clock.now(), running=first, at_most=64)
        of_the_team = [each for each in first if each.team_id == "search"]
        third = await claim_due(connection, owner="a", now=clock.now(), running=of_the_team[1:], at_most=64)

    assert len(of_the_team) == PER_TEAM == len({each.receiver for each in of_the_team})
    assert {each.id for each in first if each.team_id == "other"} == set(late)
    assert second == []
    assert [each.team_id for each in third] == ["search"]


async def test_claims_are_bounded(database: Database, clock: SetClock, secret: str) -> None:
    """No more is claimed than there is room for, and each receiver's first before any receiver's second."""
    for number in range(6):
        await put(database, clock, f"https://host-{number % 2}.example/")
    async with database.begin() as connection:
        claimed: list[ClaimedCallback] = await claim_due(connection, owner="a", now=clock.now(), running=[], at_most=3)

    assert len(claimed) == 3
    assert len({each.receiver for each in claimed}) == 2


async def test_a_closed_address_is_never_reached(
    database: Database, clock: SetClock, secret: str, receiver: Receiver
) -> None:
    """What was allowed when the URL was set need not be so when it is delivered."""
    callback_id = await put(database, clock, receiver.url())
    strict = Deliverer(database, clock, Sender(Guard()), SEALER)
    await deliver(strict)

    stored = await row(database, callback_id)
    assert "loopback" in stored["last_error"] and stored["delivered_at"] is None
    assert receiver.connections == 0


async def test_a_changed_url_takes_what_is_undelivered_along(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """A corrected URL gets what the wrong one never took; a batch's own callback stays where it was."""
    wrong = "http://127.0.0.1:9/wrong"
    async with database.begin() as connection:
        await update_team(connection, "search", TeamPatch(webhook_url=wrong), ADMIN)
    mine = await put(database, clock, wrong)
    elsewhere = await put(database, clock, "http://127.0.0.1:9/batch")
    await deliver(worker())
    async with database.begin() as connection:
        await update_team(connection, "search", TeamPatch(webhook_url=receiver.url("/right")), ADMIN)
    clock.time = time.time() + 1
    await deliver(worker())

    assert receiver.paths() == ["/right"]
    assert (await row(database, mine))["delivered_at"] is not None
    assert (await row(database, elsewhere))["url"] == "http://127.0.0.1:9/batch"


async def test_a_url_taken_away_gives_up_what_waits(
    database: Database, clock: SetClock, secret: str, worker: Callable[[], Deliverer]
) -> None:
    """Nobody wants to hear of it any more; the audit log never saw the URL's path."""
    url = "http://127.0.0.1:9/secret-path"
    async with database.begin() as connection:
        await update_team(connection, "search", TeamPatch(webhook_url=url), ADMIN)
    callback_id = await put(database, clock, url)
    async with database.begin() as connection:
        await update_team(connection, "search", TeamPatch(webhook_url=None), ADMIN)
        acts = await list_acts(connection, team_id="search", action="team.updated")

    stored = await row(database, callback_id)
    assert stored["given_up_at"] is not None and "taken away" in stored["last_error"]
    assert [act.details["webhook_url"] for act in acts] == [None, "http://127.0.0.1:9/…"]


async def test_finished_callbacks_are_dropped_in_time(
    database: Database, clock: SetClock, secret: str, receiver: Receiver, worker: Callable[[], Deliverer]
) -> None:
    """What was delivered or given up goes after its time; what waits stays."""
    await put(database, clock, receiver.url())
    await deliver(worker())
    waiting = await put(database, clock, receiver.url())
    async with database.begin() as connection:
        early = await drop_old(connection, clock.now())
        dropped = await drop_old(connection, clock.now() + 1)
        left = await list_callbacks(connection)

    assert (early, dropped) == (0, 1)
    assert [each["id"] for each in left] == [waiting]


async def test_the_loop_delivers_and_ends_when_asked(
    database: Database,
    clock: SetClock,
    secret: str,
    receiver: Receiver,
    worker: Callable[[], Deliverer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is put in while it runs goes out; cancelled, it leaves what runs to be finished."""
    monkeypatch.setattr(deliverer_module, "EVERY", 0.02)
    entered = asyncio.Event()

    def act(delivery: Delivery) -> bytes:
        entered.set()
        return OK

    receiver.act_of = act
    one = worker()
    loop = asyncio.create_task(one.run())
    callback_id = await put(database, clock, receiver.url())
    await asyncio.wait_for(entered.wait(), 30)
    loop.cancel()
    await asyncio.wait([loop], timeout=30)
    await one.finish(30)

    assert loop.cancelled()
    assert (await row(database, callback_id))["delivered_at"] is not None


class Away(Database):
    """A Postgres that does not answer, and how often it was asked."""

    asked = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """Refuse."""
        self.asked += 1
        async with super().begin() as connection:
            yield connection


async def test_the_loops_outlive_postgres(clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is away they ask again."""
    monkeypatch.setattr(deliverer_module, "EVERY", 0.01)
    monkeypatch.setattr(budget_alerts, "EVERY", 0.01)
    places = [Away("postgresql://nobody@127.0.0.1:1/none") for _ in range(2)]
    deliverer = Deliverer(places[0], clock, Sender(Guard(LOOPBACK)), SEALER)
    alerts = budget_alerts.BudgetAlerts(places[1], clock)
    loops = [asyncio.create_task(deliverer.run()), asyncio.create_task(alerts.run())]
    async with asyncio.timeout(60):
        while min(place.asked for place in places) < 3:
            await asyncio.sleep(0.01)

    assert not any(loop.done() for loop in loops)
    await stop_all(loops)
    await deliverer.finish(0)
