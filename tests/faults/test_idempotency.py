# kill -9 of a gateway under calls with Idempotency-Keys, each repeated until it is answered: every key is paid once,
# for the answer that its caller has, and every later answer under it is the same. And the end of a gateway under
# responses that run in the background.

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.support.audits import lasting_differences
from tests.support.fault_house import FaultHouse, running_fault_house
from tests.support.waiting import until, until_found

CALLERS = 10
CALLS = 3  # keys of each caller
MODELS = ("steady", "lengthy", "instant")
SLOW = """\
  slow: {provider: upstream, upstream_model: 'gpt-4o:tokens=60,pace=0.3', context: 4000, max_output: 64,
         price: {input: 1, output: 2}}
"""
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 21))]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHouse]:
    """Two gateways."""
    folder: Path = tmp_path_factory.mktemp("idempotency")
    with running_fault_house(folder, SLOW, workers=0) as house:
        yield house


async def ask(house: FaultHouse, team_key: str, key: str, first: int) -> tuple[str, bytes]:
    """Ask until a whole answer comes, each time the other gateway; return its request id and its bytes."""
    dice = random.Random(key)
    body = {"model": dice.choice(MODELS), "stream": dice.random() < 0.5, "max_tokens": 50, "user": key}
    body |= {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {team_key}", "idempotency-key": key}
    deadline = time.monotonic() + 60
    async with httpx.AsyncClient(headers=headers, timeout=30) as client:
        for turn in itertools.count(first):
            assert time.monotonic() < deadline, "nobody answers"
            try:
                answer = await client.post(house.gateways[turn % 2].url + "/v1/chat/completions", json=body)
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 200 and (not body["stream"] or answer.content.endswith(b"data: [DONE]\n\n")):
                break
            assert answer.status_code in (200, 502, 503), answer.text
        return answer.headers["x-request-id"], answer.content


async def calls_run(database_url: str, at_least: int) -> None:
    """Wait until so many calls run."""
    connection = await asyncpg.connect(database_url)
    query = "SELECT count(*) >= $1 FROM idempotency WHERE lease_until IS NOT NULL"
    await until_found(lambda: connection.fetchval(query, at_least))
    await connection.close()


async def rows_of(database_url: str, prefix: str, expected: int) -> dict[str, list[asyncpg.Record]]:
    """Return the rows of each key, once those of the dead were carried over and no more come."""
    connection = await asyncpg.connect(database_url)
    query = "SELECT user_tag, request_id::text, status, cost_nanousd FROM usage_records WHERE user_tag LIKE $1"
    deadline, before = time.monotonic() + 30, -1
    while True:
        rows = await connection.fetch(query, prefix + "%")
        if (len(rows) >= expected and len(rows) == before) or time.monotonic() > deadline:
            break
        before = len(rows)
        await asyncio.sleep(1.0)
    await connection.close()
    found: dict[str, list[asyncpg.Record]] = defaultdict(list)
    for row in rows:
        found[row["user_tag"]].append(row)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_key_is_paid_once_whichever_process_is_killed(house: FaultHouse, seed: int) -> None:
    """After a kill at a random moment each key has one charged row, that of the answer; other tries cost nothing."""
    (team_key,) = house.make_team(f"team-{seed}", {}, [{}]).values()
    dice = random.Random(seed)
    victim = house.gateways[dice.randrange(2)]
    got: dict[str, list[tuple[str, bytes]]] = defaultdict(list)

    async def call(number: int, first: int) -> None:
        for turn in range(CALLS):
            key = f"seed {seed} call {number}-{turn}"
            got[key].append(await ask(house, team_key, key, first))

    async def kill() -> None:
        await calls_run(house.postgres.url, CALLERS // 2)
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        victim.kill()

    async def everybody(*others: Awaitable[None], first: int) -> None:
        await asyncio.gather(*others, *(call(number, first + number) for number in range(CALLERS)))

    asyncio.run(everybody(kill(), first=0))
    victim.start()
    asyncio.run(everybody(first=1))
    rows = asyncio.run(rows_of(house.postgres.url, f"seed {seed} ", len(got)))

    assert len(got) == CALLERS * CALLS
    for key, answers in got.items():
        assert len(set(answers)) == 1, f"{key} has two answers"
        charged = [row for row in rows[key] if row["cost_nanousd"]]
        assert [(row["request_id"], row["status"]) for row in charged] == [(answers[0][0], "answered")]
        assert {row["status"] for row in rows[key] if not row["cost_nanousd"]} <= {"failed", "superseded"}
    assert lasting_differences(house.postgres.url, within=60) == []
    ill = ("Traceback", "unexpected_error", "reply_failed", "background_work_failed", "stored_answer_unreadable")
    assert [line for line in house.new_log_lines() if any(word in line for word in ill)] == []


@pytest.mark.timeout(120)
def test_responses_in_the_background_end_with_their_gateway(house: FaultHouse) -> None:
    """One that is drained waits for them. Killed, each has failed, for nothing, or had its answer, which is paid."""
    (team_key,) = house.make_team("behind", {}, [{}]).values()
    victim, other = house.gateways
    headers = {"authorization": f"Bearer {team_key}"}

    def started(count: int, model: str = "lengthy") -> list[str]:
        with httpx.Client(base_url=victim.url, headers=headers, timeout=30) as client:
            body = {"model": model, "input": "hi", "background": True, "user": "behind"}
            return [client.post("/v1/responses", json=body).raise_for_status().json()["id"] for _ in range(count)]

    def ended(ids: list[str]) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        with httpx.Client(base_url=other.url, headers=headers, timeout=30) as client:
            for id_ in ids:
                until(lambda id_=id_: client.get(f"/v1/responses/{id_}").json()["status"] in ("completed", "failed"))
                found[id_] = client.get(f"/v1/responses/{id_}").json()
        return list(found.values())

    drained = started(4)
    assert victim.end() == 0
    victim.start()
    killed = started(2)
    time.sleep(1.2)
    killed += started(4, "slow")
    victim.kill()
    victim.start()
    answers = ended([*drained, *killed])
    rows = asyncio.run(rows_of(house.postgres.url, "behind", len(answers)))["behind"]
    charged = {row["request_id"].replace("-", "") for row in rows if row["cost_nanousd"]}

    statuses = [answer["status"] for answer in answers]
    assert statuses[:4] == ["completed"] * 4 and statuses[-4:] == ["failed"] * 4
    assert charged == {str(answer["id"])[5:] for answer in answers if answer["status"] == "completed"}
    assert len(rows) == len(answers)
    assert lasting_differences(house.postgres.url, within=60) == []
    ill = ("Traceback", "unexpected_error", "background_work_failed")
    assert [line for line in house.new_log_lines() if any(word in line for word in ill)] == []
