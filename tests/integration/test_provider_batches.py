# Lines of batches that go through the Batch API of their provider: sent once, booked once at the price that was given,
# held until then, and asked again as ordinary calls where the provider does not answer them.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import text

from billing.core.money import to_nano
from billing.core.prices import Price
from billing.upkeep.audit import audit
from gateway.accounts.team_deletion import purge_deleted_teams
from gateway.batch.running.provider_runner import Pace
from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.run.process import open_process
from gateway.run.worker import batch_runner_of
from gateway.storage.database import Database
from gateway.upstreams.provider_batches import ProviderBatches, digest_of
from tests.support.house import (
    House,
    anthropic_provider,
    azure_provider,
    gemini_provider,
    make_team,
    model,
    running_house,
    settings_for,
)
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.upstream_batches import BatchFault
from tests.support.waiting import until_found

# Lines of one batch go together however long the machine stands still between two of them: `no_more_come` says when.
FAST = Pace(every=0.05, lease=1.5, quiet=2.0, first_look=0.05, longest=0.2, later=0.1, full=0.1, settle=0.6, cancel=1.5)
PROVIDERS = ("upstream", "anthropic", "gemini", "azure")
PRICE = Price(input=to_nano(1), output=to_nano(2))


@pytest.fixture(scope="module")
def outside() -> Iterator[ScriptedUpstream]:
    """The providers."""
    with ScriptedUpstream(models=PROVIDERS) as upstream:
        yield upstream


@pytest.fixture
def upstream(outside: ScriptedUpstream) -> Iterator[ScriptedUpstream]:
    """The providers, as one test finds them."""
    outside.forget()
    yield outside
    assert outside.violations == []


@pytest.fixture(scope="module")
def house(outside: ScriptedUpstream, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway with a model at each of them, all with Batch APIs."""
    with database_of_its_own(postgres_url) as url, temporary_valkey() as valkey:
        settings = settings_for(url, valkey.url, outside.url, tmp_path_factory.mktemp("house"))
        root = outside.root_url
        others = (anthropic_provider(root), gemini_provider(root), azure_provider(root))
        providers = {one.name: replace(one, batch_api=True) for one in (*settings.providers.values(), *others)}
        batch_price = replace(PRICE, batch_discount=0.5)
        models = {name: model(name, name, price=PRICE, batch_price=batch_price) for name in PROVIDERS}
        with running_house(replace(settings, providers=providers, models=models)) as house:
            yield house


@asynccontextmanager
async def working(house: House, *, gathers: bool = False) -> AsyncIterator[None]:
    """Run a worker; it ends in the middle of what it does. One that ``gathers`` waits for more lines for an hour."""
    async with open_process(house.settings, Clock(), Drain()) as parts:
        worker = batch_runner_of(parts, 8, pace=replace(FAST, quiet=3600.0) if gathers else FAST)
        running, ended = asyncio.create_task(worker.run()), asyncio.Event()
        telling = asyncio.create_task(asyncio.sleep(0) if gathers else no_more_come(parts.get(Database), ended))
        try:
            yield
        finally:
            ended.set()
            await telling
            await stop_all([running])
            await worker.finish(5.0, asyncio.Event())


async def no_more_come(database: Database, ended: asyncio.Event) -> None:
    """Have it look as if no line had come for long to what gathers, once all lines of its batch are there."""
    while not ended.is_set():
        async with database.begin() as connection:
            await connection.execute(text(ALL_ARE_THERE))
        await asyncio.sleep(0.05)


class Team:
    """A team and its batches."""

    def __init__(self, house: House, key: str | None = None) -> None:
        self.house = house
        self.http = httpx.AsyncClient(
            base_url=house.url, headers={"authorization": f"Bearer {key or house.team_key}"}, timeout=30
        )

    async def submit(self, name: str, lines: int = 6, **more: Any) -> str:
        """Submit a batch of chats to a model; return its id."""
        asked = [
            {"model": name, "messages": [{"role": "user", "content": f"Number {line}"}], "max_tokens": 20}
            for line in range(lines)
        ]
        made = await self.http.post("/v1/batch", json={"requests": asked, **more})
        return str(made.raise_for_status().json()["batch_id"])

    async def look(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return dict((await self.http.get(f"/v1/batch/{batch_id}")).raise_for_status().json())

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """Wait until a batch has ended, and all of it at providers."""

        async def ended() -> dict[str, Any] | None:
            return seen if (seen := await self.look(batch_id))["ended_at"] else None

        seen = await until_found(ended, within=60)
        await until_true(self.house, ALL_ENDED)
        return seen  # type: ignore[return-value]

    async def answers(self, batch_id: str) -> list[dict[str, Any]]:
        """Return the bodies of the answers, in the order of the input."""
        lines = (await self.http.get(f"/v1/batch/{batch_id}/results")).raise_for_status().text.splitlines()
        return [httpx.Response(200, text=line).json()["response"]["body"] for line in lines]


@pytest.fixture
def team(house: House) -> Team:
    """The house's team."""
    return Team(house)


async def query(house: House, statement: str) -> list[dict[str, Any]]:
    """Return rows of the database."""
    database = Database(house.settings.database_url)
    async with database.begin() as connection:
        rows = [dict(row) for row in (await connection.execute(text(statement))).mappings()]
    await database.close()
    return rows


async def until_true(house: House, statement: str) -> None:
    """Wait until a query's first column is true."""
    database = Database(house.settings.database_url)

    async def look() -> Any:
        async with database.begin() as connection:
            return (await connection.execute(text(statement))).scalar_one()

    await until_found(look)
    await database.close()


ALL_ARE_THERE = """
    UPDATE provider_batches AS one SET touched_at = touched_at - interval '1 minute', next_look_at = clock_timestamp()
    WHERE status = 'gathering' AND next_look_at > clock_timestamp() AND NOT EXISTS (
        SELECT FROM batch_items AS item
        WHERE item.batch_id = one.batch_id AND item.status IN ('queued', 'running') AND provider_batch_id IS NULL
    )
"""
ALL_ENDED = "SELECT coalesce(bool_and(status = 'ended'), true) FROM provider_batches"
UNENDED = "SELECT count(*) AS count FROM owners WHERE id LIKE 'provider-batch:%' AND ended_at IS NULL"
HELD = (
    "SELECT sum(granted - returned - spent) AS held FROM leases "
    "WHERE owner LIKE 'provider-batch:%' AND scope LIKE 'team:%' AND unit = 'nanousd'"
)
OWN_KEYS = "SELECT provider FROM provider_keys WHERE team_id = 'own-deleted'"
IS_GATHERED = "SELECT count(provider_batch_id) = 2 FROM batch_items WHERE batch_id = '{}'"
IS_SENT = "SELECT count(*) FILTER (WHERE status = 'submitted') > 0 FROM provider_batches"


async def check_books(house: House) -> None:
    """The tables agree, and nothing of a provider's batch is held any more."""
    assert await query(house, UNENDED) == [{"count": 0}]
    database = Database(house.settings.database_url)
    report = await audit(database, datetime.now(UTC).date())
    await database.close()

    assert report.differences == [] and report.books > 0


async def rows_of(house: House, batch_id: str) -> list[dict[str, Any]]:
    """Return the rows of a batch's lines."""
    return await query(
        house,
        "SELECT model_used, tier, status, cost_nanousd, discount_nanousd, input_tokens, output_tokens "
        f"FROM usage_records WHERE client_request_id LIKE '{batch_id}:%'",
    )


def live_calls(upstream: ScriptedUpstream) -> int:
    """Return how many ordinary calls came."""
    ends = ("/chat/completions", "/v1/messages", ":generateContent")
    return sum(seen.path.partition("?")[0].endswith(ends) and seen.method == "POST" for seen in upstream.requests)


@pytest.mark.parametrize("name", PROVIDERS)
async def test_lines_go_through_the_providers_batch_api_at_half_the_price(
    house: House, upstream: ScriptedUpstream, team: Team, name: str
) -> None:
    """One batch there, one row each, half of what a live call costs; no ordinary call is made. Their contents are in
    the batch's files alone, also of a team that has those of its calls kept."""
    await query(house, """UPDATE teams SET contents = '{"keep_days": 1}' RETURNING id""")
    async with working(house):
        batch_id = await team.submit(name)
        seen = await team.ended(batch_id)
        async with asyncio.timeout(30):
            while not upstream.batches.deleted:  # nothing is left there
                await asyncio.sleep(0.02)
    answers = await team.answers(batch_id)
    rows = await rows_of(house, batch_id)

    assert (seen["status"], seen["request_counts"]) == ("completed", {"total": 6, "completed": 6, "failed": 0})
    assert all(answer["choices"][0]["message"]["content"] and answer["model"] == name for answer in answers)
    assert len(upstream.batches.made) == 1 and live_calls(upstream) == 0
    assert len(rows) == 6 and {(row["tier"], row["status"]) for row in rows} == {("batch", "answered")}
    for row in rows:
        full = 1000 * row["input_tokens"] + 2000 * row["output_tokens"]
        assert (row["cost_nanousd"], row["discount_nanousd"]) == (full // 2, full // 2)
    kept = (
        "SELECT request_id FROM call_contents JOIN usage_records USING (request_id) WHERE client_request_id LIKE '{}:%'"
    )
    assert await query(house, kept.format(batch_id)) == []
    await check_books(house)
    today = datetime.now(UTC).date()
    usage = (await team.http.get(f"/v1/usage?from={today}&to={today}&group_by=model")).json()["results"]
    of_model = next(line for line in usage if line["model"] == name)
    assert of_model["tier_saved_usd"] == pytest.approx(sum(row["discount_nanousd"] for row in rows) / 1e9)


FAULTS = {
    "expired": (BatchFault(end="expired"), 3),
    "failed": (BatchFault(end="failed", code="invalid_json_line"), 6),
    "errors, a missing line, out of order, twice, and one that nobody sent": (
        BatchFault(errors=frozenset({0, 5}), missing=frozenset({4}), backwards=True, twice=True, foreign=True),
        3,
    ),
    "refused": (BatchFault(refuse=[400]), 6),
    "busy, then taken, and results that are cut": (BatchFault(refuse=[429, 429], cut_results=2), 0),
    "no room there, then some": (BatchFault(end="failed", code="token_limit_exceeded"), 0),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_a_provider_does_each_line_is_answered_and_paid_once(
    house: House, upstream: ScriptedUpstream, team: Team, fault: str
) -> None:
    """What its batch does not answer is asked again, as an ordinary call, at the full price."""
    upstream.batches.fault, live = FAULTS[fault][0], FAULTS[fault][1]
    async with working(house):
        batch_id = await team.submit("upstream")
        if fault.startswith("no room"):
            async with asyncio.timeout(30):
                while len(upstream.batches.made) < 2:
                    await asyncio.sleep(0.02)
            upstream.batches.fault.end = "completed"
        seen = await team.ended(batch_id)
    rows = await rows_of(house, batch_id)

    assert seen["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    assert len(rows) == 6 and {row["status"] for row in rows} == {"answered"}
    assert sum(row["discount_nanousd"] == 0 for row in rows) == live == live_calls(upstream)
    assert seen["usage"]["cost_usd"] == pytest.approx(sum(row["cost_nanousd"] for row in rows) / 1e9)
    await check_books(house)


@pytest.mark.parametrize("name", ["upstream", "anthropic", "gemini"])
async def test_a_batch_that_was_taken_unheard_is_found_and_not_sent_again(
    house: House, upstream: ScriptedUpstream, team: Team, name: str
) -> None:
    """A 500 behind the acceptance: the provider has one batch of it, and the lines are paid once."""
    upstream.batches.fault = BatchFault(refuse=[500], after_taking=True)
    async with working(house):
        seen = await team.ended(await team.submit(name))

    assert seen["request_counts"]["completed"] == 6
    assert len(upstream.batches.made) == 1 and live_calls(upstream) == 0
    await check_books(house)


async def test_a_batch_that_was_never_taken_is_sent_again(house: House, upstream: ScriptedUpstream, team: Team) -> None:
    """A 500 and no batch of that name for as long as one would need to show."""
    upstream.batches.fault = BatchFault(refuse=[500])
    async with working(house):
        seen = await team.ended(await team.submit("upstream"))

    assert seen["request_counts"]["completed"] == 6
    assert len(upstream.batches.made) == 1 and live_calls(upstream) == 0
    await check_books(house)


async def test_another_worker_goes_on_when_the_one_that_sent_a_batch_has_died(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """Nothing is sent twice, what is held stays held meanwhile, and every line is booked once."""
    upstream.batches.fault = BatchFault(end="never")
    async with working(house):
        batch_id = await team.submit("upstream")
        await until_true(house, IS_SENT)
    held = await query(house, HELD)
    upstream.batches.fault.end = "completed"
    async with working(house):
        seen = await team.ended(batch_id)

    assert held[0]["held"] >= 6 * 20 * 2000  # the full price of all that they may answer
    assert seen["request_counts"]["completed"] == 6
    assert len(upstream.batches.made) == 1 and live_calls(upstream) == 0
    assert len(await rows_of(house, batch_id)) == 6
    await check_books(house)


async def test_a_cancelled_batch_is_cancelled_at_its_provider(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """What it had answered is kept and paid, at its price; the rest is not asked again. So it is where the provider has
    had the batch for long and does not answer at that moment."""
    upstream.batches.fault = BatchFault(end="never")
    async with working(house):
        batch_id = await team.submit("upstream")
        await until_true(house, IS_SENT)
        await query(house, "UPDATE provider_batches SET submitted_at = now() - interval '9 hours' RETURNING id")
        upstream.batches.fault.away = True
        cancelling = (await team.http.post(f"/v1/batch/{batch_id}/cancel")).json()["status"]
        await asyncio.sleep(0.3)  # a few looks
        upstream.batches.fault.away = False
        seen = await team.ended(batch_id)
    rows = await rows_of(house, batch_id)

    assert (cancelling, seen["status"]) == ("cancelling", "cancelled")
    assert upstream.batches.made[0].cancelled and live_calls(upstream) == 0
    assert seen["request_counts"]["completed"] == len(rows) == 3
    assert all(row["cost_nanousd"] == row["discount_nanousd"] > 0 for row in rows)
    await check_books(house)


async def test_a_batch_of_a_stranger_that_looks_like_ours_stays_theirs(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """Anthropic knows no names: one of that size, made when ours was not heard of, may be another program's."""
    body = {"model": "anthropic", "max_tokens": 5, "messages": [{"role": "user", "content": "Theirs"}]}
    theirs = upstream.batches.take_from_a_stranger("anthropic", "/v1/messages", [body] * 6)
    upstream.batches.fault = BatchFault(refuse=[500])
    async with working(house):
        seen = await team.ended(await team.submit("anthropic"))
        await asyncio.sleep(0.2)  # in which what is left there would be deleted

    assert seen["request_counts"]["completed"] == 6
    assert theirs not in upstream.batches.deleted
    await check_books(house)


async def test_a_fault_of_ours_holds_nothing_for_ever(
    house: House, upstream: ScriptedUpstream, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that cannot be looked after is let go when its time is over: its lines are ordinary calls."""
    upstream.batches.fault = BatchFault(end="never")

    async def broken(*_: object) -> None:
        raise KeyError("a fault")

    async with working(house):
        batch_id = await team.submit("upstream")
        await until_true(house, IS_SENT)
        monkeypatch.setattr(ProviderBatches, "look", broken)
        sooner = "UPDATE batches SET expires_at = now() + interval '5 hours'"
        await query(house, f"{sooner} WHERE id = '{batch_id}' RETURNING id")
        seen = await team.ended(batch_id)

    assert seen["request_counts"]["completed"] == live_calls(upstream) == 6
    await check_books(house)


async def test_a_batch_that_a_later_version_wrote_waits_for_that_one(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """A worker that cannot read what its neighbour wrote looks after all others."""
    upstream.batches.fault = BatchFault(end="never")
    able = "UPDATE provider_batches SET target = jsonb_set(target, '{model,capabilities}', '[%s]'), lease_until = NULL "
    async with working(house):
        later = await team.submit("upstream")
        await until_true(house, IS_SENT)
        able += f"WHERE batch_id = '{later}' RETURNING id"
        await query(house, able % '"telepathy"')
        upstream.batches.fault.end = "completed"
        batch_id = await team.submit("upstream", 2)
        async with asyncio.timeout(30):
            while not (await team.look(batch_id))["ended_at"]:
                await asyncio.sleep(0.05)
        await query(house, able % "")
        seen = await team.ended(later)

    assert seen["request_counts"]["completed"] == 6 and live_calls(upstream) == 0
    await check_books(house)


async def test_a_provider_that_does_not_answer_in_time_is_left_for_ordinary_calls(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """Six hours before the batch expires, what is not there is asked at once."""
    upstream.batches.fault = BatchFault(end="never")
    async with working(house):
        batch_id = await team.submit("upstream")
        await until_true(house, IS_SENT)
        sooner = "UPDATE batches SET expires_at = now() + interval '5 hours'"
        await query(house, f"{sooner} WHERE id = '{batch_id}' RETURNING id")
        seen = await team.ended(batch_id)
    rows = await rows_of(house, batch_id)

    assert (seen["status"], seen["request_counts"]["completed"], len(rows)) == ("completed", 6, 6)
    assert sum(row["discount_nanousd"] == 0 for row in rows) == live_calls(upstream) == 3
    await check_books(house)


async def test_what_is_in_a_hurry_or_cannot_go_there_is_an_ordinary_call(
    house: House, upstream: ScriptedUpstream, team: Team
) -> None:
    """Lines of high priority; several replies to one line, which are several requests at Anthropic; answers by voice,
    of which no provider says that its batches take them."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    async with working(house):
        high = await team.ended(await team.submit("upstream", 2, priority="high"))
        voice = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "mp3"}}
        body = {"requests": [{"model": "anthropic", **chat, "n": 2}, {"model": "upstream", **chat, **voice}]}
        made = (await team.http.post("/v1/batch", json=body)).raise_for_status().json()
        several = await team.ended(made["batch_id"])
        spoken = (await team.answers(made["batch_id"]))[1]

    assert high["request_counts"]["completed"] == 2 and several["request_counts"]["total"] == 2
    assert spoken["choices"][0]["message"]["audio"]["transcript"]
    assert upstream.batches.made == []


async def test_a_budget_holds_what_lies_with_a_provider(house: House, upstream: ScriptedUpstream) -> None:
    """Lines beyond the cap wait until others are booked; live calls are refused meanwhile, and no cap is passed. Room
    that comes free goes with a line into the next batch, not a part of it to one that has been sent already."""
    with house.client(house.admin_key) as admin:
        limits = {"usd_per_day": 0.0009}  # about four lines, as they are held
        admin.post("/admin/teams", json={"id": "tight", "name": "Tight", "limits": limits}).raise_for_status()
        made = admin.post("/admin/keys", json={"team_id": "tight", "name": "k"}).raise_for_status().json()
    team = Team(house, made["key"])
    upstream.batches.fault = BatchFault(end="never")
    async with working(house):
        batch_id = await team.submit("upstream", 7)
        await until_true(house, IS_SENT)
        body = {"model": "upstream", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000}
        refused = await team.http.post("/v1/chat/completions", json=body)
        held = float((await query(house, HELD.replace("LIKE 'team:%'", "= 'team:tight'")))[0]["held"])
        more = held * (1 + 1.5 / len(upstream.batches.made[0].lines)) / 1e9  # room for one
        with house.client(house.admin_key) as admin:
            admin.patch("/admin/teams/tight", json={"limits": {"usd_per_day": more}}).raise_for_status()
        async with asyncio.timeout(30):
            while len(upstream.batches.made) < 2:
                await asyncio.sleep(0.05)
        upstream.batches.fault.end = "completed"
        seen = await team.ended(batch_id)

    assert refused.status_code == 429
    assert seen["request_counts"] == {"total": 7, "completed": 7, "failed": 0}
    over = await query(house, "SELECT scope FROM balances WHERE cap IS NOT NULL AND drawn + corrected > cap")
    assert over == [] and len(upstream.batches.made) > 1
    await check_books(house)


async def test_lines_go_with_the_teams_own_key_and_lie_in_its_account(house: House, upstream: ScriptedUpstream) -> None:
    """File, batch, looks and results are asked with it; the lines cost nothing, and the row of the batch has no key."""
    owner = Team(house, await make_team(house.settings, "own-key"))
    with house.client(house.admin_key) as admin:
        said = {"provider": "upstream", "key": "sk-own-of-batches"}
        admin.post("/admin/teams/own-key/provider-keys", json=said).raise_for_status()
    async with working(house):
        batch_id = await owner.submit("upstream", lines=2)
        seen = await owner.ended(batch_id)
    rows = await rows_of(house, batch_id)
    [kept] = await query(house, f"SELECT target, key_digest FROM provider_batches WHERE batch_id = '{batch_id}'")

    assert (seen["status"], seen["request_counts"]["completed"]) == ("completed", 2)
    assert {one.api_key for one in upstream.requests} == {"sk-own-of-batches"} and live_calls(upstream) == 0
    assert [(row["status"], row["cost_nanousd"]) for row in rows] == [("answered", 0)] * 2
    assert kept["target"]["own"] == {"team": "own-key"} and kept["key_digest"] == digest_of("sk-own-of-batches")
    await check_books(house)


async def test_a_deleted_teams_batch_is_ended_in_its_own_account(house: House, upstream: ScriptedUpstream) -> None:
    """What its provider had answered is booked; the key goes when no batch there needs it any more."""
    owner = Team(house, await make_team(house.settings, "own-deleted"))
    upstream.batches.fault = BatchFault(end="never")
    with house.client(house.admin_key) as admin:
        for provider in ("upstream", "anthropic"):
            said = {"provider": provider, "key": "sk-own-to-the-end"}
            admin.post("/admin/teams/own-deleted/provider-keys", json=said).raise_for_status()
        async with working(house):
            batch_id = await owner.submit("upstream", lines=2)
            await until_true(house, IS_SENT)
            admin.delete("/admin/teams/own-deleted?confirm=own-deleted").raise_for_status()
            left = await query(house, OWN_KEYS)
            await until_true(house, ALL_ENDED)
    rows = await rows_of(house, batch_id)
    database = Database(house.settings.database_url)
    await purge_deleted_teams(database)
    await database.close()

    assert left == [{"provider": "upstream"}] and await query(house, OWN_KEYS) == []
    assert upstream.batches.made[0].cancelled and [row["status"] for row in rows] == ["answered"]
    await check_books(house)


async def test_lines_whose_own_key_is_revoked_while_they_gather_are_ordinary_calls_at_once(
    house: House, upstream: ScriptedUpstream
) -> None:
    """The team goes with the company's keys where it has none of its own, and so do they; where it may not, they fail
    with what an ordinary call is told."""
    said = {"provider": "upstream", "key": "sk-own-to-revoke"}
    owners = {name: Team(house, await make_team(house.settings, name)) for name in ("otherwise", "never")}
    with house.client(house.admin_key) as admin:
        for name in owners:
            admin.patch(f"/admin/teams/{name}", json={"company_keys": name}).raise_for_status()
        paths = [f"/admin/teams/{name}/provider-keys" for name in owners]
        keys = [f"{path}/{admin.post(path, json=said).raise_for_status().json()['id']}" for path in paths]
        async with working(house, gathers=True):
            ids = [await owner.submit("upstream", lines=2) for owner in owners.values()]
            for batch_id in ids:
                await until_true(house, IS_GATHERED.format(batch_id))
        for key in keys:
            admin.delete(key).raise_for_status()
    async with working(house):
        ended = [await owner.ended(batch_id) for owner, batch_id in zip(owners.values(), ids, strict=True)]

    assert [one["request_counts"] for one in ended] == [
        {"total": 2, "completed": 2, "failed": 0},
        {"total": 2, "completed": 0, "failed": 2},
    ]
    assert [one.api_key for one in upstream.requests] == ["sk-upstream"] * 2 and live_calls(upstream) == 2
    await check_books(house)


async def test_a_batch_whose_own_key_the_provider_refuses_becomes_ordinary_calls(
    house: House, upstream: ScriptedUpstream
) -> None:
    """Those have the team's other keys, or tell the team what is wrong."""
    owner = Team(house, await make_team(house.settings, "refused-key"))
    upstream.batches.fault = BatchFault(refuse=[401])
    with house.client(house.admin_key) as admin:
        said = {"provider": "upstream", "key": "sk-own-refused"}
        admin.post("/admin/teams/refused-key/provider-keys", json=said).raise_for_status()
    async with working(house):
        ended = await owner.ended(await owner.submit("upstream", lines=2))

    assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert upstream.batches.made == [] and live_calls(upstream) == 2
    await check_books(house)
