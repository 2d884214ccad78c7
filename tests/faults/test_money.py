# The money survives whatever dies: under mixed load, at a moment drawn by a seed, a part of a whole house is killed,
# frozen or wiped. Afterwards every answered call has exactly one row, refused ones none; ledger, statements, leases and
# balances agree to the nano-dollar; nothing is held any more; and no limit was passed.

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from redis.asyncio import Redis as AsyncRedis

from tests.support import books
from tests.support.audits import differences
from tests.support.cap_watch import CapWatch
from tests.support.fault_house import ILL_WORDS, FaultHouse, running_fault_house
from tests.support.fault_load import Attempt, Load, Member, Seen
from tests.support.faults import FAULTS, Outage, of, suffer

QUIET_WITHIN = 60.0  # seconds after the last call until nothing is held any more
POSTGRES_FAULTS, REDIS_FAULTS = of("Postgres"), of("Redis")
COMES_BACK = 3.0  # seconds in which a gateway finds a database that is back
STARVED = 0.5  # seconds that a gateway waits for a processor; so do the way to Postgres and Postgres, of two in all
SLOTS_STAY = 30.0  # seconds that the slots of a killed gateway's calls stay taken
ASKS_FOR = 5.0  # seconds that a gateway waits for Postgres to say whether a call with an Idempotency-Key may run
SOON = 8.0  # seconds: the longest answer takes one, the rest is for a busy machine
FORGETFUL = ("Postgres killed", "Postgres demoted")  # it waits for no disk and no replica: what was done last is lost
LOST = 1.5  # how much of a cap can be spent where grants of a moment are forgotten

# By team: its limits, those of each of its keys, and how much of the load each key brings.
TEAMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], int]] = {
    "free": ({}, [{}, {}], 6),
    "other": ({}, [{}], 3),
    "few-dollars": ({"usd_per_day": 0.0015}, [{}], 3),
    "few-tokens": ({"tokens_per_day": 360}, [{}], 3),
    "narrow": ({"concurrent_requests": 2}, [{}], 3),
    "slow-key": ({}, [{"requests_per_minute": 20}], 2),
}
CAPS = {"few-dollars": {"nanousd": 1_500_000}, "few-tokens": {"tokens": 360}, "narrow": {"slots": 2}}
EACH_MINUTE = 20
CLIENTS, FEW_CLIENTS = 20, 12  # with the few, too, every run reaches limits

# What each part of the house suffers with every change, the worst of its kind; all faults in a soak, with twenty more
# seeds each.
AT_ONCE = (
    *("gateway killed after [DONE]", "gateway frozen", "worker killed"),
    *("Postgres unheard", "Redis killed and emptied"),
)
SEEDS = [
    pytest.param(
        *(fault, seed), id=f"{fault}-{seed}", marks=[] if seed == 1 and fault in AT_ONCE else [pytest.mark.soak]
    )
    for seed in range(1, 22)
    for fault in FAULTS
]


class Shelter:
    """Keeps one house for test after test, and builds another after one that failed."""

    def __init__(self, folders: Callable[[], Path]) -> None:
        self.is_sound = False
        self._folders = folders
        self._stack = ExitStack()
        self._house: FaultHouse | None = None

    def house(self) -> FaultHouse:
        """Return a house that nothing is wrong with."""
        if self._house is None or not self.is_sound:
            self.close()
            self._house = self._stack.enter_context(running_fault_house(self._folders()))
        self.is_sound = False
        return self._house

    def close(self) -> list[str]:
        """End the house; return what it left running."""
        self._stack.close()
        house, self._house = self._house, None
        return [] if house is None else house.left_running(5.0)


@pytest.fixture(scope="module")
def shelter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelter]:
    """Give what keeps the house; when all is over, nothing of it runs on."""
    shelter = Shelter(lambda: tmp_path_factory.mktemp("house"))
    yield shelter
    assert shelter.close() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "seed"), SEEDS)
def test_the_books_are_true_after_a_fault(
    fault: str, seed: int, shelter: Shelter, record_property: Callable[[str, object], None]
) -> None:
    """Whatever was hit under load: every book says the same as the clients, nothing is held, no limit was passed."""
    house = shelter.house()
    dice = random.Random(f"{fault}:{seed}")
    plan = plan_of(fault, seed, dice)
    members = move_in(house, f"{seed}-{dice.randrange(10**9)}")
    urls = [gateway.url for gateway in house.gateways]
    clients = FEW_CLIENTS if seed == 1 else CLIENTS
    load = Load(urls, members, seed=f"{fault}:{seed}", clients=clients, waited=house.processor_wait)
    outages: list[Outage] = []
    with CapWatch(house.way.url, house.redis.url, caps_of(members)) as watch, load:
        for faults in plan:
            time.sleep(dice.uniform(0.6, 1.6))
            if REDIS_FAULTS & {*faults}:
                watch.pause()
            outages += suffer(faults, house, load, dice)
        time.sleep(0.5)
    recovered, rows, complaints = asyncio.run(true_books(house, members, load.attempts))
    record_property("fault", fault)
    record_property("seed", seed)
    record_property("faults", ", then ".join(" and ".join(faults) for faults in plan))
    record_property("calls", {str(seen): load.count(seen) for seen in Seen})
    record_property("rows", len(rows))
    record_property("away", round(max(outage.healed - outage.struck for outage in outages), 1))
    record_property("recovered", round(recovered, 1))
    logged = house.new_log_lines()
    forgot = any(outage.fault in FORGETFUL for outage in outages)

    assert [line for line in logged if any(word in line for word in ILL_WORDS)] == []
    assert complaints == []
    unfair = list(unfair_refusals(house, load.attempts, outages))
    assert unfair == [], [line for line in logged if "leases_" in line or "clocks_" in line]
    assert watch.samples >= 3 and (watch.overshoots == [] or forgot)
    windows = 2 if any(outage.fault in REDIS_FAULTS for outage in outages) else 1
    assert list(overspending(members, rows, LOST if forgot else 1, windows)) == []
    assert list(silences(load.attempts, outages)) == []
    assert forgot or list(lost_responses(house, load.attempts)) == []
    assert list(phantom_refusals(house, members)) == []
    assert [line for line in house.new_log_lines() if any(word in line for word in ILL_WORDS)] == []
    shelter.is_sound = True


def plan_of(fault: str, seed: int, dice: random.Random) -> list[list[str]]:
    """Return what happens in a run, step by step. In a soak every other run has a second fault, before the first is
    healed or after, as the dice say."""
    other = dice.choice([*FAULTS])
    if seed == 1 or dice.random() < 0.5:
        return [[fault]]
    is_elsewhere = other.split()[0] != fault.split()[0]
    return [[fault, other]] if is_elsewhere and dice.random() < 0.5 else [[fault], [other]]


def move_in(house: FaultHouse, mark: str) -> list[Member]:
    """Make the teams of one run; their books are empty."""
    return [
        Member(f"{name}-{mark}", key_id, key, is_limited=name in CAPS or name == "slow-key", share=share)
        for name, (limits, keys_limits, share) in TEAMS.items()
        for key_id, key in house.make_team(f"{name}-{mark}", limits, keys_limits).items()
    ]


def caps_of(members: Sequence[Member]) -> dict[str, dict[str, int]]:
    """Return what limited teams must never pass."""
    return {member.team_id: caps for member in members for name, caps in CAPS.items() if is_of(member.team_id, name)}


def is_of(team_id: str, name: str) -> bool:
    """Whether a run's team is the one called so."""
    return team_id.rsplit("-", 2)[0] == name


async def true_books(
    house: FaultHouse, members: Sequence[Member], attempts: Sequence[Attempt]
) -> tuple[float, list[books.Row], list[str]]:
    """Read all books again and again until they agree; return the seconds it took, the rows, and what is wrong."""
    started = time.monotonic()
    while True:
        rows, complaints = await read_books(house, members, attempts)
        spent = time.monotonic() - started
        if not complaints or spent > QUIET_WITHIN:
            return spent, rows, complaints[:20]
        await asyncio.sleep(0.5)


async def read_books(
    house: FaultHouse, members: Sequence[Member], attempts: Sequence[Attempt]
) -> tuple[list[books.Row], list[str]]:
    """Read all books once; return the ledger's rows and what is wrong."""
    teams = sorted({member.team_id for member in members})
    redis = AsyncRedis.from_url(house.redis.url, socket_timeout=5)
    connection = await asyncpg.connect(house.postgres.url, timeout=5)
    try:
        rows = await books.read_rows(connection, teams)
        forgot = await books.has_forgotten(connection, teams)
        complaints = [*books.compare_calls(attempts, rows, house.was_killed_under, forgot=forgot)]
        complaints += books.check_costs(rows)
        complaints += await books.compare_statements(connection, rows, teams)
        complaints += await books.compare_leases(connection, rows, teams)
        complaints += await books.check_slots(redis, teams)
        complaints += await books.check_journals(connection, house.data_dir / "journal")
        if not complaints:
            complaints += told_otherwise(house, teams, rows)
            diff = [*await differences(house.postgres.url)]
            complaints += [f"{one!r} {[dict(r) for r in rows if r['request_id'] == str(one)]}" for one in diff]
        return rows, complaints
    finally:
        await connection.close()
        await redis.aclose()


def told_otherwise(house: FaultHouse, teams: Sequence[str], rows: Sequence[books.Row]) -> Iterator[str]:
    """Yield where a gateway's own reports differ from the rows, or where it says that it is not well."""
    today = datetime.now(UTC).date()
    for gateway in house.gateways:
        ready = house.ask_admin(gateway, "/health/ready").json()
        if ready["status"] != "ok":
            yield f"{gateway.name} is not well: {ready}"
        metrics = house.ask_admin(gateway, "/metrics").text
        if "\ntollgate_journal_backlog 0.0\n" not in metrics:
            yield f"{gateway.name} has a backlog"
    for team in teams:
        span = {"from": str(today - timedelta(days=1)), "to": str(today)}
        told = house.ask_admin(house.gateways[0], "/v1/usage", team_id=team, group_by="key", **span).json()["total"]
        mine = [row for row in rows if row["team_id"] == team and row["status"] in books.CHARGED]
        owed = sum(row["cost_nanousd"] for row in mine)
        if (told["requests"], told["output_tokens"]) != (len(mine), sum(row["output_tokens"] for row in mine)):
            yield f"the usage report of {team} says {told}, the ledger has {len(mine)} rows"
        if round(told["cost_usd"] * 10**9) != owed:
            yield f"the usage report of {team} says {told['cost_usd']}, the ledger {owed}"


def unfair_refusals(house: FaultHouse, attempts: Sequence[Attempt], outages: Sequence[Outage]) -> Iterator[str]:
    """Yield calls that were refused although nothing was wrong with them and no limit stood in their way.

    While Postgres is away nothing runs under an Idempotency-Key, a gateway that was started again knows no key, and a
    limited team has no more than what its gateway has leased. A gateway that has no processor hears no answer in time,
    either, after a stop above all, when all that waited is ready at once.
    """
    away = [(one.struck, one.healed + COMES_BACK) for one in outages if one.fault in POSTGRES_FAULTS]
    for attempt in attempts:
        if attempt.seen is not Seen.REFUSED:
            continue
        expected = {400} if attempt.is_faulty else {429} if attempt.member.is_limited else set()
        if any(start < attempt.ended and attempt.started < end for start, end in away):
            was_started_again = any(
                struck > min(away)[0] - 60 for struck, _ in house.gateways[attempt.gateway].downtimes
            )
            if attempt.idempotency_key or attempt.member.is_limited or was_started_again:
                expected |= {503}
        if attempt.member.is_limited and attempt.starved > STARVED:
            expected |= {503}
        if attempt.idempotency_key and attempt.ended - attempt.started > ASKS_FOR:  # its gateway stood still meanwhile
            expected |= {503}
        if attempt.status not in expected:
            yield f"{attempt.status} for {attempt}"


def overspending(members: Sequence[Member], rows: Sequence[books.Row], most: float, windows: int) -> Iterator[str]:
    """Yield teams that spent more than ``most`` times a budget, or called more often than in ``windows`` minutes."""
    for member in members:
        mine = [row for row in rows if row["key_id"] == member.key_id and row["status"] in books.CHARGED]
        spent = sum(row["cost_nanousd"] for row in mine)
        tokens = sum(row["input_tokens"] + row["output_tokens"] for row in mine)
        for name, (what, used) in {"few-dollars": ("nanousd", spent), "few-tokens": ("tokens", tokens)}.items():
            if is_of(member.team_id, name) and used > CAPS[name][what] * most:
                yield f"{member.team_id} spent {used} {what} of {CAPS[name][what]}"
        if is_of(member.team_id, "slow-key") and most_in_a_minute(mine) > EACH_MINUTE * windows:
            yield f"{member.team_id} had {len(mine)} calls in a minute"


def most_in_a_minute(rows: Sequence[books.Row]) -> int:
    """Return the most calls that began within 58 seconds: a minute, less the seconds at both its ends."""
    times = sorted(row["created_at"].timestamp() for row in rows)
    return max((sum(start <= moment < start + 58 for moment in times) for start in times), default=0)


def silences(attempts: Sequence[Attempt], outages: Sequence[Outage]) -> Iterator[str]:
    """Yield calls that were not answered as before, or not as soon, while nothing but a database was away."""
    for outage in outages:
        is_alone = all(one is outage or one.healed < outage.struck or outage.healed < one.struck for one in outages)
        if outage.fault not in ("Postgres frozen", "Redis frozen") or not is_alone:
            continue
        within = [one for one in attempts if outage.struck + 1 < one.started and one.ended < outage.healed]
        fair = [one for one in within if is_fair(one)]
        free = [one for one in fair if not one.member.is_limited]
        narrow = [one for one in fair if is_of(one.member.team_id, "narrow")]
        if len(free) < 5:
            yield f"{outage}: too few calls to tell"
        # Without Redis a limit below one per owner is the last user's alone: others may refuse all of its calls. A
        # gateway that was killed a moment before has the slots of its calls.
        has_lost = any("gateway killed" in one.fault and one.struck > outage.struck - SLOTS_STAY for one in outages)
        are_silent = len(narrow) >= 5 and not has_lost and not any(one.seen is Seen.ANSWERED for one in narrow)
        if outage.fault == "Postgres frozen" and are_silent:
            yield f"{outage}: none of {len(narrow)} calls of a limited team was answered"
        for one in free:
            if one.seen is not Seen.ANSWERED or one.ended - one.started > SOON:
                yield f"{outage}: {one}"


def is_fair(attempt: Attempt) -> bool:
    """Whether nothing is in the way of an answer but a limit, or what may be broken in the house."""
    is_sound = not attempt.is_faulty and attempt.model in ("steady", "lengthy", "silent")
    return is_sound and attempt.leaves_after is None and attempt.idempotency_key is None


def lost_responses(house: FaultHouse, attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield responses that were said to be stored, and that some gateway cannot give."""
    with httpx.Client(timeout=20) as client:
        for attempt in attempts:
            if attempt.response_id is None:
                continue
            gateway = house.gateways[attempt.gateway - 1]  # another than answered
            headers = {"authorization": f"Bearer {attempt.member.key}"}
            answer = client.get(f"{gateway.url}/v1/responses/{attempt.response_id}", headers=headers)
            if answer.status_code != 200 or answer.json()["status"] != "completed":
                yield f"{gateway.name}: {answer.status_code} {answer.text} for {attempt}"


def phantom_refusals(house: FaultHouse, members: Sequence[Member]) -> Iterator[str]:
    """Yield gateways that refuse a call which nothing forbids any more."""
    body = {"model": "instant", "messages": [{"role": "user", "content": "Still there?"}], "max_tokens": 48}
    with httpx.Client(timeout=20) as client:
        for gateway, member in itertools.product(house.gateways, members):
            if any(is_of(member.team_id, name) for name in ("few-dollars", "few-tokens", "slow-key")):
                continue  # they may have used theirs up
            headers = {"authorization": f"Bearer {member.key}"}
            answer = client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
            if answer.status_code != 200:
                yield f"{gateway.name} to {member.team_id}: {answer.status_code} {answer.text}"
