# Shadow traffic from a small model's answer to a team's curve: asked in batches, judged, paid, within a budget.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import httpx
import msgspec
import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from gateway.accounts.schemas import LimitsInput
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.parts import Parts
from gateway.inference.edition import Editions
from gateway.inference.recalibrations import Recalibrations
from gateway.run.process import open_process
from gateway.run.worker import batch_runner_of, comparer_of
from gateway.shadow.comparer import Comparer
from gateway.shadow.store import ShadowCall, note_call
from gateway.storage.books import Books
from gateway.storage.database import Database
from protocol.chat import ChatRequest
from router.catalog.catalog import AutoRoute, ShadowTraffic
from router.complexity.classifier import Complexity
from router.complexity.text_stats import STATS_NAMES
from router.learning import packed_form
from router.recalibration import LEAST_COMPARISONS
from tests.support.house import House, make_team, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until_found

JUDGED = AutoRoute(
    small=("small",),
    large=("large",),
    quality=0.0,
    shadow=ShadowTraffic(share=1.0, budget_nanousd=10**9, judge="judge"),
)

ASKED = [{"role": "user", "content": "Which river?"}]


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world: the models disagree, and the judge prefers whichever answer stands first."""
    with ScriptedUpstream(models=("small", "large", "judge")) as upstream:
        upstream.script(Script(text="The Seine."), model="small")
        upstream.script(Script(text="The Rhine."), model="large")
        upstream.script(Script(text="FIRST"), model="judge")
        yield upstream


@pytest.fixture
def house(
    database_url: str, redis_url: str, upstream: ScriptedUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[House]:
    """A gateway that holds every answer of a small model back, for a dollar a day, in "both" of any; and "poor", for
    next to nothing; and "own", which asks for hardly less than ASKED scores, and goes by what a team measured."""
    monkeypatch.setattr("gateway.inference.recalibrations.READ_EVERY", 0.1)
    settings = settings_for(database_url, redis_url, upstream.url, tmp_path)
    poor = replace(JUDGED, shadow=ShadowTraffic(share=1.0, budget_nanousd=to_nano("0.000001")))
    both = ShadowTraffic(share=1.0, explore=True, budget_nanousd=10**9, judge="judge")
    own = ShadowTraffic(share=1.0, budget_nanousd=10**9, recalibrate=frozenset({"team_a"}))
    request = msgspec.convert({"model": "own", "messages": ASKED}, ChatRequest)
    close = replace(JUDGED, quality=Complexity.load()(request) - 0.01, shadow=own)
    routes = {"auto": JUDGED, "poor": poor, "off": replace(JUDGED, shadow=None), "own": close}
    routes["both"] = replace(JUDGED, shadow=both)
    routes["taught"] = replace(JUDGED, quality=0.8, shadow=replace(both, recalibrate=frozenset({"team_a"})))
    models = settings.models | {"judge": model("judge")}
    aliases = settings.aliases | {"modest": "poor"}
    with running_house(replace(settings, auto=routes, models=models, aliases=aliases)) as house:
        yield house


@pytest.fixture
async def worker(house: House) -> AsyncIterator[Parts]:
    """A worker that runs batches, in this process."""
    async with open_process(house.settings, Clock(), Drain()) as parts:
        task = asyncio.create_task(batch_runner_of(parts, 4).run())
        yield parts
        await stop_all([task])


async def rows(house: House, query: str) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(house.settings.database_url)
    try:
        return [dict(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def until(condition: Callable[[], Any], act: Callable[[], Any] | None = None) -> None:
    async def look() -> bool:
        is_so: bool = await condition()
        if act is not None and not is_so:
            await act()
        return is_so

    await until_found(look)


async def test_answers_are_compared_and_give_a_curve(house: House, worker: Parts, upstream: ScriptedUpstream) -> None:
    """Streamed or not, each is asked of the large model and judged; rows, texts, money and curve are as promised."""
    comparer = comparer_of(worker)
    async with httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {house.team_key}"}) as client:
        for number in range(6):
            body = {"model": "auto", "messages": [{"role": "user", "content": f"Which river, {number}?"}]}
            answer = await client.post(
                "/v1/chat/completions", json=body | {"max_tokens": 20, "stream": number % 2 == 0}
            )
            assert answer.status_code == 200 and answer.headers["x-model-used"] == "small"

        async def is_done() -> bool:
            found = await rows(house, "SELECT status FROM held_back")
            return [row["status"] for row in found] == ["compared"] * 6

        async def work() -> None:
            await comparer.ask()
            await comparer.compare()

        await until(is_done, work)
        curve = (await client.get("/v1/route/curve")).json()
        batches = (await client.get("/v1/batches")).json()["data"]
    found = await rows(house, "SELECT *, request_id::text AS id FROM held_back")
    asked = await rows(house, "SELECT model_used, tier, cost_nanousd FROM usage_records WHERE tier = 'batch'")

    assert {(row["small_model"], row["large_model"], row["body"], row["answer"]) for row in found} == {
        ("small", "large", None, None)
    }
    assert all(row["suffices"] == (int(row["id"][-1], 16) % 2 == 0) for row in found)  # FIRST, where it stood first
    assert sorted(row["model_used"] for row in asked) == ["judge"] * 6 + ["large"] * 6
    spent = sum(row["large_nanousd"] + row["judge_nanousd"] for row in found)
    assert spent == sum(row["cost_nanousd"] for row in asked) == sum(row["reserved_nanousd"] for row in found) > 0
    assert {batch["metadata"]["purpose"] for batch in batches} == {"held_back"}
    right = sum(row["suffices"] for row in found)
    assert curve["calls"] == {"open": 0, "compared": 6, "dropped": 0}
    assert curve["small_suffices"]["measured"] == pytest.approx(right / 6, abs=1e-4)
    assert curve["curve"][0]["calls_small"] == 6 and curve["curve"][-1]["share_large"] == 1.0
    shares = [point["share_large"] for point in curve["shipped"]["curve"]]
    costs = [float(point["usd_per_call"]) for point in curve["shipped"]["curve"]]
    assert (shares[0], shares[-1], shares, costs) == (0, 1, sorted(shares), sorted(costs))
    assert round(float(curve["used_usd_today"]) * 10**9) == spent
    assert upstream.violations == []


async def test_what_a_large_model_answered_is_asked_of_a_small_one_where_a_route_explores(
    house: House, worker: Parts, upstream: ScriptedUpstream
) -> None:
    """The caller has the large model's answer and pays for it as ever; the small one's is compared unseen, and both
    sides of the threshold stand in the curve."""
    comparer = comparer_of(worker)
    async with httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {house.team_key}"}) as client:
        body = {"model": "both", "messages": ASKED, "max_tokens": 20}
        answers = [
            (await client.post("/v1/chat/completions", json=body, headers={"x-quality": quality})).raise_for_status()
            for quality in ("1", "1", "0")
        ]

        async def is_done() -> bool:
            found = await rows(house, "SELECT status FROM held_back")
            return [row["status"] for row in found] == ["compared"] * 3

        async def work() -> None:
            await comparer.ask()
            await comparer.compare()

        await until(is_done, work)
        curve = (await client.get("/v1/route/curve", params={"route": "both"})).json()
    found = await rows(house, "SELECT *, request_id::text AS id FROM held_back ORDER BY is_explored DESC")
    booked = "SELECT model_used, tier, sum(cost_nanousd) AS nano FROM usage_records GROUP BY 1, 2"
    paid = {(row["model_used"], row["tier"]): row["nano"] for row in await rows(house, booked)}

    assert [answer.headers["x-model-used"] for answer in answers] == ["large", "large", "small"]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers][:2] == ["The Rhine."] * 2
    assert [(row["is_explored"], row["small_model"], row["large_model"]) for row in found] == [
        (True, "small", "large"),
        (True, "small", "large"),
        (False, "small", "large"),
    ]
    assert all(row["suffices"] == (int(row["id"][-1], 16) % 2 == 0) for row in found)  # FIRST, where it stood first
    assert {(row["body"], row["answer"], row["scored_by"]) for row in found} == {
        (None, None, worker.get(Complexity).version)
    }
    assert sum(row["small_nanousd"] for row in found[:2]) == paid["small", "batch"] > 0
    assert sum(row["large_nanousd"] for row in found[:2]) == paid["large", "interactive"]
    internal = sum(nano for (_, tier), nano in paid.items() if tier == "batch")
    assert sum(row["reserved_nanousd"] for row in found) == internal == round(float(curve["used_usd_today"]) * 10**9)
    assert (curve["calls"]["compared"], curve["explores"], curve["curve"][0]["calls_small"]) == (3, True, 3)
    assert upstream.violations == []


async def test_what_the_house_asks_is_nothing_that_a_team_tried(house: House, worker: Parts) -> None:
    """It takes neither a place nor a request of the minute from its team, which pays for it all the same."""
    comparer = comparer_of(worker)
    key = await make_team(house.settings, "tight", LimitsInput(requests_per_minute=4, concurrent_requests=1))
    async with httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {key}"}) as client:

        async def ask(model: str) -> httpx.Response:
            body = {"model": model, "messages": ASKED, "max_tokens": 20}
            return await client.post("/v1/chat/completions", json=body)

        answers = [await ask("auto") for _ in range(2)]

        async def work() -> None:
            await comparer.ask()
            await comparer.compare()

        async def is_compared() -> bool:
            found = await rows(house, "SELECT status FROM held_back")
            return [row["status"] for row in found] == ["compared"] * 2

        await until(is_compared, work)
        answers.append(await ask("small"))
    paid: dict[str, Any] = {}

    async def is_booked() -> bool:
        paid.update((await rows(house, "SELECT sum(cost_nanousd) AS nano, count(*) AS n FROM usage_records"))[0])
        spent = await rows(
            house, "SELECT sum(spent) AS nano FROM leases WHERE scope = 'team:tight' AND unit = 'nanousd'"
        )
        return bool(paid["n"] == 7 and spent[0]["nano"] == paid["nano"])

    await until(is_booked)

    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "1"
    assert len(worker.get(Books).quotas.leases.holding.calls) == 0


async def test_a_budget_is_never_exceeded_and_off_is_off(house: House) -> None:
    """What a call can cost must fit into the day; a route without a share notes nothing, nor does a named model."""
    async with httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {house.team_key}"}) as client:
        for name in ("poor", "off", "small", "auto"):
            body = {"model": name, "messages": [{"role": "user", "content": "Which river?"}], "max_tokens": 20}
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()

        async def is_noted() -> bool:
            return bool(await rows(house, "SELECT 1 FROM held_back"))

        await until(is_noted)
        curve = (await client.get("/v1/route/curve", params={"route": "poor"})).json()
        by_alias = (await client.get("/v1/route/curve", params={"route": "modest"})).json()

    assert [row["route"] for row in await rows(house, "SELECT route FROM held_back")] == ["auto"]
    assert (curve["calls"], curve["small_suffices"], curve["curve"]) == (
        {"open": 0, "compared": 0, "dropped": 0},
        None,
        [],
    )
    assert by_alias == curve


async def test_a_budget_is_kept_by_many_at_once(house: House, worker: Parts) -> None:
    """Whoever notes calls at the same moment, of either kind, the day takes as many as fit, and none more."""
    [key] = await rows(house, "SELECT id FROM api_keys")
    call = ShadowCall(
        request_id="",
        team_id=house.team_id,
        key_id=key["id"],
        route="auto",
        score=0.5,
        scored_by="v",
        form=None,
        is_explored=False,
        small_model="small",
        large_model=None,
        body=b"{}",
        answer=b"The Seine.",
        small_nanousd=1,
        large_nanousd=0,
        reserved_nanousd=250,
    )

    async def note(is_explored: bool) -> bool:
        mine = replace(call, request_id=worker.get(Clock).new_id(), is_explored=is_explored)
        async with worker.get(Database).begin() as connection:
            return await note_call(connection, worker.get(Clock), mine, 1_100)

    noted = await asyncio.gather(*(note(place % 2 == 0) for place in range(16)))

    assert sum(noted) == 4
    assert await rows(house, "SELECT sum(reserved_nanousd)::int AS nano FROM held_back") == [{"nano": 1_000}]


async def test_what_a_team_measured_moves_its_calls_and_no_others(house: House, worker: Parts) -> None:
    """From calls over HTTP to a threshold that the next call meets: a hundred answers of the small model, each asked of
    the large one in the batch tier, none the same, all within the budget."""
    comparer = comparer_of(worker)
    others = await make_team(house.settings, "team_b")
    body = {"model": "own", "messages": ASKED, "max_tokens": 20}
    async with httpx.AsyncClient(base_url=house.url, timeout=30) as client:

        async def ask(key: str, path: str = "chat/completions", **headers: str) -> httpx.Response:
            said = {"authorization": f"Bearer {key}", **headers}
            return (await client.post(f"/v1/{path}", json=body, headers=said)).raise_for_status()

        async def curve() -> dict[str, Any]:
            said = {"authorization": f"Bearer {house.team_key}"}
            return dict((await client.get("/v1/route/curve", params={"route": "own"}, headers=said)).json())

        before = await curve()
        asked = [await ask(house.team_key) for _ in range(LEAST_COMPARISONS)]

        async def is_done() -> bool:
            found = await rows(house, "SELECT status FROM held_back")
            return [row["status"] for row in found] == ["compared"] * LEAST_COMPARISONS

        async def work() -> None:
            await comparer.ask()
            await comparer.compare()

        await until(is_done, work)
        await comparer.recalibrate()

        async def is_applied() -> bool:
            return bool((await curve())["applied_quality"] > before["applied_quality"])

        await until(is_applied)
        after, told = await curve(), (await ask(house.team_key, "route")).json()
        answers = [await ask(house.team_key), await ask(house.team_key, **{"x-quality": "0"}), await ask(others)]
    [spent] = await rows(
        house, "SELECT sum(cost_nanousd) AS nano, count(*) AS n FROM usage_records WHERE tier = 'batch'"
    )

    assert {answer.headers["x-model-used"] for answer in asked} == {"small"}
    assert (before["applied_quality"], before["small_suffices"]) == (before["quality"], None)
    assert after["small_suffices"]["measured"] == 0 and after["calls"]["compared"] == LEAST_COMPARISONS
    assert told["quality"] == after["applied_quality"] > told["small_suffices"] > before["quality"]
    assert (told["reason"], told["model_used"]) == ("auto_large", "large")
    assert [answer.headers["x-model-used"] for answer in answers] == ["large", "small", "small"]
    assert spent["n"] == LEAST_COMPARISONS
    assert 0 < spent["nano"] == round(float(after["used_usd_today"]) * 10**9) <= 10**9


async def test_a_team_is_routed_by_what_its_own_calls_taught(house: House, worker: Parts) -> None:
    """Where calls of both kinds are compared, the form of a request tells for this team, beside its score: from rows
    with numbers of form, which other teams' calls do not keep, to the decision, its explanation and the curve."""
    version, others = worker.get(Complexity).version, await make_team(house.settings, "team_b")
    easy = [f"What is the capital of country {number}?" for number in range(70)]
    hard = [f"- {number}\n- mend: it;\n- why?\n" * 6 for number in range(70)]
    [key] = await rows(house, f"SELECT id FROM api_keys WHERE team_id = '{house.team_id}'")
    insert = """INSERT INTO held_back (request_id, team_id, key_id, route, score, scored_by, form, is_explored,
                    suffices, status, small_model, large_model, small_nanousd, large_nanousd, reserved_nanousd)
                VALUES (gen_random_uuid(), $1, $2, 'taught', $3, $4, $5, $6, $6, 'compared', 'small', 'large', 1, 10, 1)
    """
    asked = [(_asked("taught", text), text in easy) for both in zip(easy, hard, strict=True) for text in both]
    known = worker.get(Complexity)
    values = [(house.team_id, key["id"], known(one), version, packed_form(one), ok) for one, ok in asked]

    async with httpx.AsyncClient(base_url=house.url, timeout=30) as client:

        async def ask(key: str, path: str, text: str, **headers: str) -> dict[str, Any]:
            body = {"model": "taught", "messages": [{"role": "user", "content": text}]}
            said = {"authorization": f"Bearer {key}", **headers}
            return dict((await client.post(f"/v1/{path}", json=body, headers=said)).raise_for_status().json())

        before = await ask(house.team_key, "route", hard[0])
        for each in (house.team_key, others):
            await ask(each, "chat/completions", easy[0])

        async def forms() -> dict[str, int | None]:
            noted = await rows(house, "SELECT team_id, length(form) AS bytes FROM held_back")
            return {row["team_id"]: row["bytes"] for row in noted}

        async def is_noted() -> bool:
            return len(await forms()) == 2

        await until(is_noted)
        kept = await forms()
        connection = await asyncpg.connect(house.settings.database_url)
        await connection.executemany(insert, values)
        await connection.close()
        await comparer_of(worker).recalibrate()

        async def is_learned() -> bool:
            return (await ask(house.team_key, "route", easy[0]))["learned"] is not None

        await until(is_learned)
        told = [
            await ask(house.team_key, "route", text) for text in ("What is the capital of Peru?", hard[0] + "- so?")
        ]
        stands = await ask(house.team_key, "route", easy[0], **{"x-quality": "0.5"})
        other = await ask(others, "route", easy[0])
        said = {"authorization": f"Bearer {house.team_key}"}
        curve = (await client.get("/v1/route/curve", params={"route": "taught"}, headers=said)).json()

    assert kept == {house.team_id: 2 * len(STATS_NAMES), "team_b": None}
    assert before["learned"] is stands["learned"] is other["learned"] is None and stands["quality"] == 0.5
    assert [one["learned"]["comparisons"] for one in told] == [140, 140]
    assert told[0]["small_suffices"] > told[1]["small_suffices"] < 0.5
    low, high = told[1]["learned"]["interval"]
    assert low < told[1]["small_suffices"] < high and told[1]["reason"] == "auto_large"
    assert told[1]["learned"]["shipped"] == pytest.approx(known(_asked("taught", hard[0] + "- so?")))
    assert "learned from the team's own compared calls" in told[1]["explanation"]
    assert curve["learned"]["comparisons"] == 140 and curve["learned"]["gain_nats"] > 0
    assert (curve["regret"]["small_answered"], curve["regret"]["large_was_needless"]["share"]) == (70, 1.0)
    assert (curve["regret"]["small_was_worse"]["share"], curve["regret"]["needless_usd"]) == (1.0, "0.00000063")


def _asked(model: str, text: str) -> ChatRequest:
    return msgspec.convert({"model": model, "messages": [{"role": "user", "content": text}]}, ChatRequest)


async def test_a_team_that_asks_for_it_goes_by_its_own_outcomes(house: House, worker: Parts) -> None:
    """What 120 comparisons showed moves its threshold, for it alone and while the route's quality stays."""
    route = replace(JUDGED, quality=0.8, shadow=replace(JUDGED.shadow, recalibrate=frozenset({house.team_id})))
    edition = worker.get(Editions).current
    edition = replace(edition, catalog=replace(edition.catalog, auto={"auto": route}))
    database, clock = worker.get(Database), worker.get(Clock)
    comparer = Comparer(cast(Any, SimpleNamespace(current=edition)), database, clock, worker.get(Complexity).version)
    held = Recalibrations(edition.catalog, database, lambda _: None)
    [key] = await rows(house, "SELECT id FROM api_keys")
    insert = """INSERT INTO held_back (request_id, team_id, key_id, route, score, scored_by, small_model, large_model,
                                       status, suffices, small_nanousd, reserved_nanousd)
                SELECT gen_random_uuid(), '{team}', '{key}', 'auto', 0.85, '{by}', 'small', '{large}',
                       'compared', n % 2 = 0, 1, 1
                FROM generate_series(1, {count}) AS n"""

    async def compared(count: int, large: str = "large", by: str = worker.get(Complexity).version) -> float | None:
        await rows(house, insert.format(team=house.team_id, key=key["id"], count=count, large=large, by=by))
        await comparer.recalibrate()
        await held.read()
        return held.of(house.team_id).get("auto")

    # Neither what a model that is gone from the route would have shown counts, nor what another version scored.
    strange = [await compared(120, large="gone"), await compared(120, by="another")]
    few, enough, hardly_more = [await compared(count) for count in (60, 60, 2)]
    held.follow(replace(edition.catalog, auto={"auto": replace(route, quality=0.7)}))
    await held.read()

    assert strange == [None, None] and few is None
    assert enough is not None and enough > 0.9
    assert hardly_more == enough
    assert (held.of(house.team_id), held.of("team_b")) == ({}, {})
    [stored] = await rows(house, "SELECT team_id, quality, outcomes FROM recalibrations")
    assert stored == {"team_id": house.team_id, "quality": 0.8, "outcomes": 120}
