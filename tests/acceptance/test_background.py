# Responses that run in the background, as teams use them: asked for, listened to from any gateway, cancelled, deleted,
# and what each end costs.

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import asyncpg
import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI

from billing.core.errors import JournalFull
from billing.journal.journal import Journal
from gateway.accounts.schemas import LimitsInput
from gateway.idempotency.store import IdempotencyStore
from gateway.stored_responses import background
from gateway.stored_responses.background_store import BackgroundStore, Heard
from tests.support.house import House, make_team, serving
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/responses"
ASK: dict[str, Any] = {"model": "small", "input": "Say something.", "background": True}
SLOW = "tokens=30,pace=0.03"
ENDS = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture(scope="module")
def elsewhere(house: House, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the team at another gateway, which waits longer for its upstreams."""
    headers = {"authorization": f"Bearer {house.team_key}"}
    providers = {
        name: replace(each, timeouts=replace(each.timeouts, total=60.0))
        for name, each in house.settings.providers.items()
    }
    settings = replace(house.settings, providers=providers, data_dir=tmp_path_factory.mktemp("elsewhere"))
    with (
        serving(settings) as url,
        httpx.Client(base_url=url, headers=headers, timeout=30) as client,
    ):
        yield client


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    """Return a response once it has ended."""
    until(lambda: client.get(f"{URL}/{response_id}").json()["status"] in ENDS)
    return dict(client.get(f"{URL}/{response_id}").json())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def heard(client: httpx.Client, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    """Return what the stream of a response says, to its end."""
    params = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
    with client.stream("GET", f"{URL}/{response_id}", params=params) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer)


def sql(house: House, statement: str, *values: object) -> list[Any]:
    """Return the rows of one statement."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(house.settings.database_url)
        try:
            return list(await connection.fetch(statement, *values))
        finally:
            await connection.close()

    return asyncio.run(run())


def test_a_response_runs_after_its_request_was_answered(
    house: House, client: httpx.Client, elsewhere: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """Queued, then in progress, then as any other: stored, gone on from at any gateway, and paid once."""
    upstream.script(SLOW, times=1)
    answer = client.post(URL, json=ASK | {"no_such_field": 1})
    queued = answer.json()
    assert (answer.status_code, queued["status"], queued["output"]) == (200, "queued", [])
    until(lambda: elsewhere.get(f"{URL}/{queued['id']}").json()["status"] == "in_progress")
    early = client.post(URL, json={"model": "small", "input": "And?", "previous_response_id": queued["id"]})
    response = ended(elsewhere, queued["id"])
    record = house.record_of(answer)
    after = elsewhere.post(URL, json={"model": "small", "input": "And?", "previous_response_id": queued["id"]})

    assert early.status_code == 400 and "is in_progress" in early.json()["error"]["message"]
    assert response["status"] == "completed" and response["background"] and response["output"]
    assert response["dropped"] == ["no_such_field"]
    assert (record["status"], record["output_tokens"]) == ("answered", response["usage"]["output_tokens"])
    assert float(response["usage"]["cost_usd"]) == record["cost_usd"] and after.status_code == 200
    assert len((upstream.requests[-1].body or {})["messages"]) == 3


def test_the_package_polls_it(openai: OpenAI) -> None:
    """As its documentation tells."""
    response = openai.responses.create(**ASK)
    until(lambda: openai.responses.retrieve(response.id).status == "completed")
    read = openai.responses.retrieve(response.id)

    assert response.status == "queued" and read.output_text and openai.responses.cancel(response.id) == read


def test_a_stream_goes_on_anywhere_from_the_event_after_the_last(
    openai: OpenAI, client: httpx.Client, elsewhere: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """Its client leaves; from any gateway it hears the rest, and whoever asks hears all of it, then and later."""
    upstream.script(SLOW, times=1)
    first: list[Any] = []
    with openai.responses.create(**ASK, stream=True) as stream:
        for event in stream:
            first.append(event)
            if event.sequence_number == 6:
                break
    response_id = first[0].response.id
    rest = heard(elsewhere, response_id, after=6)
    whole = heard(client, response_id)
    with openai.responses.stream(response_id=response_id, starting_after=6) as resumed:
        assert [event.sequence_number for event in resumed] == [event["sequence_number"] for event in rest]
    again = list(openai.responses.retrieve(response_id, stream=True, starting_after=6))

    assert [event.to_dict() for event in again] == rest
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in first] == list(range(7))
    assert [event["sequence_number"] for event in whole] == list(range(len(whole))) and rest == whole[7:]
    assert [event.to_dict() for event in first] == [{**event} for event in whole[:7]]
    assert rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"] == client.get(f"{URL}/{response_id}").json()
    assert "".join(event["delta"] for event in whole if event["type"] == "response.output_text.delta") == "".join(
        part["text"] for item in rest[-1]["response"]["output"] for part in item["content"]
    )
    assert heard(elsewhere, response_id, after=len(whole)) == []
    stream_of_none = client.get(f"{URL}/{client.post(URL, json=ASK | {'background': False}).json()['id']}?stream=true")
    assert stream_of_none.status_code == 400 and client.get(f"{URL}/{response_id}?starting_after=1").status_code == 400


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_its_caller_ends_it_and_pays_what_was_used(
    house: House, client: httpx.Client, elsewhere: httpx.Client, upstream: ScriptedUpstream, where: str, how: str
) -> None:
    """From whichever gateway; its upstream is let go."""
    upstream.script("tokens=200,pace=0.05", times=1)
    answer = elsewhere.post(URL, json=ASK)
    path = f"{URL}/{answer.json()['id']}"
    with elsewhere.stream("GET", path + "?stream=true") as stream:
        lines = (line for line in stream.iter_lines() if "output_text.delta" in line)
        next(lines)
        other = elsewhere if where == "here" else client
        ending = other.post(path + "/cancel") if how == "cancel" else other.delete(path)
        assert len(list(lines)) < 100
    record = house.record_of(answer)

    assert ending.status_code == 200
    assert (record["status"], record["cost_usd"] > 0) == ("interrupted", True) and record["output_tokens"] < 200
    if how == "delete":
        assert client.get(path).status_code == 404
    else:
        assert ending.json()["status"] == client.get(path).json()["status"] == "cancelled"
        assert other.post(path + "/cancel").json()["status"] == "cancelled"
    until(lambda: upstream.requests[-1].closed_at)


def test_what_refuses_a_call_at_once_is_an_error(
    house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a background: nothing is stored, and nothing owed; a journal without room is told last."""
    before = sql(house, "SELECT count(*) FROM stored_responses")
    poor = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}", LimitsInput(tokens_per_day=1)))
    refused = [
        client.post(URL, json=ASK | {"model": "nobody's"}),
        client.post(URL, json=ASK | {"store": False}),
        client.post(URL, json=ASK | {"stream": True}, headers={"idempotency-key": str(uuid.uuid4())}),
        httpx.post(house.url + URL, json=ASK, headers={"authorization": f"Bearer {poor}"}),
    ]

    def full(*_: object) -> None:
        raise JournalFull("This gateway has no room left.")

    monkeypatch.setattr(Journal, "opened", full)
    refused.append(client.post(URL, json=ASK))

    assert [answer.status_code for answer in refused] == [404, 400, 400, 429, 503]
    assert refused[1].json()["error"]["param"] == "background"
    assert sql(house, "SELECT count(*) FROM stored_responses") == before


@pytest.mark.parametrize(("script", "row"), [("500", "failed"), ("reset,tokens=8,after=3", "superseded")])
def test_one_that_fails_says_so_and_costs_nothing(
    house: House, client: httpx.Client, upstream: ScriptedUpstream, script: str, row: str
) -> None:
    """In what is read of it and in its stream, which has an end."""
    upstream.script(script, times=1)
    answer = client.post(URL, json=ASK)
    response = ended(client, answer.json()["id"])
    events = heard(client, response["id"])
    house.reset_breakers()

    assert response["status"] == "failed" and response["error"]["code"] and response["error"]["message"]
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert events[-2]["response"]["error"] == response["error"]
    record = house.record_of(answer)
    assert (record["status"], record["cost_usd"]) == (row, 0)


def test_one_that_its_deadline_ends_owes_what_was_said(
    house: House, client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    """Also with an Idempotency-Key, which was answered long before: its own lease tells that its gateway lives."""
    upstream.script("tokens=200,pace=0.05", times=1)
    answer = client.post(URL, json=ASK, headers={"idempotency-key": str(uuid.uuid4())})
    response = ended(client, answer.json()["id"])
    house.reset_breakers()

    assert (response["status"], house.record_of(answer)["status"]) == ("failed", "interrupted")


def test_the_response_of_a_dead_gateway_fails_and_costs_nothing(
    house: House,
    client: httpx.Client,
    elsewhere: httpx.Client,
    upstream: ScriptedUpstream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads or hears it finds that its lease is over. The gateway that only slept has no say any more."""
    monkeypatch.setattr(IdempotencyStore, "renew", lambda _: asyncio.sleep(0))  # asleep
    upstream.script("tokens=200,pace=0.5", times=1)
    said = f"Count down to {background.NUMBER.decode()}."  # as what stands for a number that is not known yet
    answer = elsewhere.post(URL, json=ASK | {"instructions": said})
    response_id = answer.json()["id"]
    until(lambda: len(sql(house, "SELECT 1 FROM response_events WHERE response_id = $1", response_id)) > 2)
    sql(
        house,
        "UPDATE idempotency SET lease_until = clock_timestamp() - interval '1 second' WHERE key = $1",
        response_id,
    )
    response = client.get(f"{URL}/{response_id}").json()
    events = heard(client, response_id)
    record = house.record_of(answer)

    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed" and events[-1]["response"] == response
    assert (record["status"], record["cost_usd"]) == ("superseded", 0)
    assert elsewhere.get(f"{URL}/{response_id}").json() == response


def test_a_key_stands_for_one_response(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Asked again, with the same Idempotency-Key, the same response is told, and nothing else runs."""
    headers = {"idempotency-key": str(uuid.uuid4())}
    first, second = (client.post(URL, json=ASK, headers=headers) for _ in range(2))
    response = ended(client, first.json()["id"])

    assert first.json() == second.json() and second.headers["idempotent-replayed"] == "true"
    assert response["status"] == "completed" and len(upstream.requests) == 1


def test_a_team_runs_no_more_than_so_many(
    client: httpx.Client, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond, it is told to wait for one."""
    monkeypatch.setattr(background, "MOST_OF_TEAM", 1)
    upstream.script(SLOW, times=1)
    first, second = (client.post(URL, json=ASK) for _ in range(2))
    ended(client, first.json()["id"])
    third = client.post(URL, json=ASK)
    ended(client, third.json()["id"])

    assert (first.status_code, second.status_code, third.status_code) == (200, 429, 200)
    assert (second.json()["error"]["code"], second.headers["retry-after"]) == ("rate_limit_exceeded", "1")


def test_a_team_that_asks_at_once_runs_no_more(
    client: httpx.Client, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of those that begin together is passed over."""
    monkeypatch.setattr(background, "MOST_OF_TEAM", 2)
    upstream.script("hang-before-headers")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post(URL, json=ASK), range(8)))
    runs = [answer.json()["id"] for answer in answers if answer.status_code == 200]
    for response_id in runs:
        client.post(f"{URL}/{response_id}/cancel").raise_for_status()

    assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 6


def test_a_team_listens_to_no_more_than_so_many(
    client: httpx.Client, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that listens looks into Postgres again and again. What is asked for beyond runs nothing."""
    monkeypatch.setattr(background, "MOST_LISTENERS", 1, raising=False)
    upstream.script("tokens=10,pace=0.03", times=1)
    path = f"{URL}/{client.post(URL, json=ASK).json()['id']}?stream=true"
    with client.stream("GET", path) as answer:
        next(lines := answer.iter_lines())
        beyond = [client.get(path), client.post(URL, json=ASK | {"stream": True})]
        list(lines)
    asked = len(upstream.requests)
    until(lambda: client.get(path).status_code == 200)

    assert [answer.status_code for answer in beyond] == [429, 429] and asked == 1
    assert beyond[0].json()["error"]["code"] == "rate_limit_exceeded"


def test_who_listens_reads_no_stream_that_says_nothing(
    client: httpx.Client, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look for all of a process tells which streams have news; each is read when it has."""
    read: list[Heard] = []
    hear = BackgroundStore.hear

    async def noting(self: BackgroundStore, *args: Any) -> Heard:
        read.append(await hear(self, *args))
        return read[-1]

    monkeypatch.setattr(BackgroundStore, "hear", noting)
    upstream.script("tokens=4,pace=0.6", times=1)
    events = heard(client, client.post(URL, json=ASK).json()["id"])

    assert events[-1]["type"] == "response.completed"
    assert len(read) > 1 and all(one.pieces or one.is_over for one in read)


def test_another_team_finds_and_ends_nothing(house: House, client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Nor can its stream be heard; what was said lies sealed."""
    upstream.script("text=the quick brown fox", times=1)
    response_id = client.post(URL, json=ASK).json()["id"]
    key = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}"))
    path = f"{URL}/{response_id}"
    with house.client(key) as other:
        found = [other.get(path), other.get(path + "?stream=true"), other.post(path + "/cancel"), other.delete(path)]
    response = ended(client, response_id)
    rows = sql(house, "SELECT sealed FROM response_events WHERE response_id = $1", response_id)

    assert [answer.status_code for answer in found] == [404] * 4 and response["status"] == "completed"
    assert rows and all(b"fox" not in row["sealed"] for row in rows)
