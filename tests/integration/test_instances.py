# What replicas cost, on a real Postgres: hours are counted once whoever looks, and calls + idle = hours x price.

from __future__ import annotations

import asyncio
import random
from datetime import date
from typing import Any

from billing.ledger.instance_samples import Look, book_look, last_looks
from billing.ledger.instances import UNSEEN, InstanceCost, idle_costs
from billing.ledger.ledger import insert_records
from gateway.storage.database import Database
from tests.support.clock import NOON, SetClock
from tests.support.factories import make_record
from tests.support.gpu_time import price_of_time

TODAY, TOMORROW = date(2026, 4, 5), date(2026, 4, 6)
MIDNIGHT = NOON + 12 * 3600
HOUR = 3_600_000_000  # microseconds
PRICE = 3_500_000_000  # nano-dollars an hour
GPU_0, GPU_1 = "local http://gpu-0:8100/v1", "local http://gpu-1:8100/v1"


def look(instance_id: str, alive: float, busy: float = 0.0, at: float = NOON, **fields: Any) -> Look:
    """Return a look at a replica that has been up for ``alive`` seconds, ``busy`` of them in steps."""
    usual: dict[str, Any] = {
        "provider": "own",
        "endpoint": GPU_0,
        "model": "llama",
        "gpus": 1,
        "gpu_hour_nanousd": PRICE,
        "load": {"status": "active"},
    }
    facts = usual | fields
    return Look(instance_id=instance_id, alive_us=round(alive * 1e6), busy_us=round(busy * 1e6), seen_at=at, **facts)


async def book(database: Database, *looks: Look) -> list[bool]:
    """Book looks one after the other."""
    news = []
    for one in looks:
        async with database.begin() as connection:
            news.append(await book_look(connection, one))
    return news


async def call(database: Database, cost: int, at: float = NOON, endpoint: str = GPU_0, model: str = "llama") -> None:
    """Put a call into the ledger that cost us so much."""
    record = make_record(
        SetClock(at).new_id(), model_used=model, provider="own", provider_endpoint=endpoint, gpu_cost_nanousd=cost
    )
    async with database.begin() as connection:
        await insert_records(connection, [record], today=SetClock(at).today())


async def lines(database: Database, first: date = TODAY, last: date = TODAY) -> list[InstanceCost]:
    """Return what is reported."""
    async with database.begin() as connection:
        return await idle_costs(connection, first, last)


async def test_calls_and_idle_make_the_hours_times_the_price(database: Database) -> None:
    """Two hours at $3.50, half an hour of it in steps, of which calls account for $1."""
    await book(database, look("a", 3600, 600, NOON), look("a", 7200, 1800, NOON + 3600))
    await call(database, 600_000_000)
    await call(database, 400_000_000)

    (line,) = await lines(database)

    assert (line.instance_id, line.provider, line.endpoint, line.model) == ("a", "own", GPU_0, "llama")
    assert (line.hours, line.busy_hours) == (2.0, 0.5)
    assert (line.cost_nanousd, line.attributed_nanousd, line.idle_nanousd) == (2 * PRICE, 10**9, 2 * PRICE - 10**9)


async def test_a_look_counts_once_however_often_it_is_booked(database: Database) -> None:
    """The same look again adds no time; one that comes late, after a newer one, changes nothing."""
    first, second = look("a", 100, at=NOON), look("a", 110, at=NOON + 10)

    news = await book(database, first, first, second, first, second)

    assert news == [True, True, True, False, True]
    assert [line.hours for line in await lines(database)] == [110 / 3600]
    async with database.begin() as connection:
        (seen,) = await last_looks(connection, NOON)
    assert (seen.alive_us, seen.last_seen.timestamp(), seen.first_seen.timestamp()) == (110 * 10**6, NOON + 10, NOON)


async def test_watchers_that_race_add_nothing_twice(database: Database) -> None:
    """Ten looks at the same moment, of a replica nobody knew and of one that all know: the time counts once."""
    for alive in (50.0, 60.0):
        await asyncio.gather(*(book(database, look("a", alive + step / 100, alive / 2)) for step in range(10)))
    await book(database, look("a", 70, 35))

    (line,) = await lines(database)

    assert line.hours == 70 / 3600
    assert line.busy_hours == 35 / 3600


async def test_time_without_a_look_is_caught_up_with(database: Database) -> None:
    """Watchers were away for three hours, and the first look at a replica counts from its start."""
    await book(database, look("a", 1800, at=NOON - 3 * 3600), look("a", 1800 + 3 * 3600, at=NOON))

    (line,) = await lines(database)

    assert line.cost_nanousd == price_of_time(HOUR * 7 // 2, 1, PRICE) == PRICE * 7 // 2


async def test_time_is_split_at_midnight(database: Database) -> None:
    """Six seconds before and four after belong to two days; the steps in proportion."""
    await book(database, look("a", 100, 10, MIDNIGHT - 6), look("a", 110, 15, MIDNIGHT + 4))

    (today,), (tomorrow,) = await lines(database), await lines(database, TOMORROW, TOMORROW)
    (both,) = await lines(database, TODAY, TOMORROW)

    assert (today.hours, tomorrow.hours) == (106 / 3600, 4 / 3600)
    assert (today.busy_hours, tomorrow.busy_hours) == (13 / 3600, 2 / 3600)
    assert both.cost_nanousd == today.cost_nanousd + tomorrow.cost_nanousd


async def test_a_long_time_is_split_at_every_midnight(database: Database) -> None:
    """The parts add up to the microsecond, whatever the moment; no time has no part."""
    long = look("a", 43_200 + 86_400 + 1.000003, 0.777777, MIDNIGHT + 86_400 + 0.5)
    await book(database, look("b", 0), long)

    async with database.begin() as connection:
        query = "SELECT day, alive_us, busy_us FROM instance_days ORDER BY day"
        parts = (await connection.exec_driver_sql(query)).all()

    assert [part.day for part in parts] == [TODAY, TOMORROW, date(2026, 4, 7)]
    assert [part.alive_us for part in parts] == [43_200 * 10**6 + 500_003, 86_400 * 10**6, 500_000]
    assert sum(part.busy_us for part in parts) == 777_777


async def test_a_replica_that_was_started_again_is_another_one(database: Database) -> None:
    """Each start has a line; they share what the calls of their address cost by their time in steps."""
    await book(
        database,
        look("a", 3600, 1800, NOON),
        look("b", 1800, 600, NOON + 1900),
        look("elsewhere", 3600, 3600, NOON, endpoint=GPU_1),
    )
    await call(database, 1000)

    shares = {line.instance_id: line.attributed_nanousd for line in await lines(database)}

    assert shares == {"a": 750, "b": 250, "elsewhere": 0}


async def test_time_costs_what_it_cost_then(database: Database) -> None:
    """A price that changes in mid-day holds from then on; the first hour keeps the old one."""
    await book(database, look("a", 3600), look("a", 7200, at=NOON + 3600, gpu_hour_nanousd=2 * PRICE))

    (line,) = await lines(database)

    assert (line.hours, line.cost_nanousd) == (2.0, 3 * PRICE)


async def test_several_gpus_cost_several_times(database: Database) -> None:
    """The price is that of one GPU for an hour."""
    await book(database, look("a", 3600, gpus=8))

    assert [(line.hours, line.cost_nanousd) for line in await lines(database)] == [(1.0, 8 * PRICE)]


async def test_a_replica_without_a_price_has_no_line(database: Database) -> None:
    """Nothing is shown rather than a cost of 0; once a price is known, time counts from then on."""
    unpriced = {"gpu_hour_nanousd": None}
    await book(database, look("a", 3600, **unpriced), look("a", 7200, at=NOON + 3600, **unpriced))
    before = await lines(database)
    await book(database, look("a", 7260, at=NOON + 3660))

    (line,) = await lines(database)

    assert before == []
    assert line.hours == 60 / 3600


async def test_calls_where_no_replica_was_seen_have_a_line_of_their_own(database: Database) -> None:
    """No watcher ran on that day: the sums still hold, and the line says where to look."""
    await call(database, 500, MIDNIGHT + 60)
    await book(database, look("a", 60))
    await call(database, 70)

    seen, unseen = await lines(database, TODAY, TOMORROW)

    assert (seen.instance_id, seen.attributed_nanousd) == ("a", 70)
    assert (unseen.instance_id, unseen.endpoint, unseen.attributed_nanousd) == (UNSEEN, GPU_0, 500)
    assert (unseen.cost_nanousd, unseen.idle_nanousd) == (0, -500)


async def test_one_address_under_two_names_is_one_place(database: Database) -> None:
    """A second provider may name the same engine: its calls were answered by the same replica."""
    await book(database, look("a", 60, 30))
    await call(database, 70)
    await call(database, 5, endpoint="elsewhere http://gpu-0:8100/v1", model="cheap")

    (line,) = await lines(database)

    assert line.attributed_nanousd == 75


async def test_the_books_balance_to_the_nano_dollar(database: Database) -> None:
    """Random looks at replicas that come and go, and random calls over three days: calls + idle = hours x price."""
    dice = random.Random(7)
    clock = SetClock(NOON)
    alive = {"a0": (GPU_0, 0.0, 0.0), "b0": (GPU_1, 0.0, 0.0)}
    total = 0
    for turn in range(120):
        passed = dice.uniform(1, 3600)
        clock.move(passed)
        for name, (endpoint, up, busy) in alive.items():
            alive[name] = endpoint, up, busy = endpoint, up + passed, busy + dice.uniform(0, passed)
            if dice.random() < 0.7:
                await book(database, look(name, up, busy, clock.now(), endpoint=endpoint))
        if dice.random() < 0.1:  # somebody is started anew
            gone = dice.choice(sorted(alive))
            alive[f"{gone[0]}{turn}"] = (alive.pop(gone)[0], 0.0, 0.0)
        cost = dice.randrange(10**9)
        total += cost
        await call(database, cost, clock.now(), dice.choice([GPU_0, GPU_1]))

    found = await lines(database, TODAY, clock.today())

    async with database.begin() as connection:
        days = await connection.exec_driver_sql("SELECT alive_us, gpu_hour_nanousd FROM instance_days")
        priced = sum(price_of_time(row.alive_us, 1, row.gpu_hour_nanousd) for row in days)
    assert sum(line.attributed_nanousd for line in found) == total
    assert total + sum(line.idle_nanousd for line in found) == priced
    assert abs(priced - sum(line.hours for line in found) * PRICE) < 1000 + len(found)
