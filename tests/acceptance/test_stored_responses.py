# Stored responses as teams use them, by the stock openai package: gone on from, read again, deleted; nobody else's; and
# given all the same where they cannot be stored.

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from msgspec.structs import replace
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from sqlalchemy import text

from gateway.core.clock import Clock
from gateway.core.settings import Retention, Settings
from gateway.overload.body_memory import BodyRoom
from gateway.storage.database import Database
from gateway.stored_responses import memory, store
from gateway.stored_responses.store import purge_responses
from tests.support.house import House, make_team, serving
from tests.support.response_stream import built_response, events_in
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/responses"
ASK: dict[str, Any] = {"model": "small", "input": "Say something."}
DROPPED = "x-tollgate-dropped"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
MODELS = ["small", "claude"]


def sent(upstream: ScriptedUpstream) -> list[dict[str, Any]]:
    """Return the messages that the upstream was sent last."""
    messages: list[dict[str, Any]] = (upstream.requests[-1].body or {})["messages"]
    return messages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", [False, True], ids=["plain", "keyed"])
def test_a_response_is_read_as_it_was_answered(client: httpx.Client, stream: bool, key: bool) -> None:
    """To the letter, as soon as its answer has ended, with an Idempotency-Key as without."""
    headers = {"idempotency-key": str(uuid.uuid4())} if key else {}
    answer = client.post(URL, json=ASK | {"stream": stream}, headers=headers)
    response = built_response(answer.text) if stream else answer.json()
    read = client.get(f"{URL}/{response['id']}?include[]=reasoning.encrypted_content&include[]=x")

    assert response["store"] is True and (read.status_code, read.json()) == (200, response)
    if stream:
        assert all(event["response"]["store"] is True for event in events_in(answer.text)[:2])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_its_last_response(
    openai: OpenAI, upstream: ScriptedUpstream, model: str, stream: bool
) -> None:
    """The model has all turns before, tools and signed thinking among them; instructions are of one turn alone."""
    upstream.script(Script(thinking="They ask for the weather."), times=1)
    asked: Any = {"model": model, "tools": [WEATHER], "reasoning": {"effort": "low"}, "max_output_tokens": 9000}
    first = openai.responses.create(input="weather?", instructions="Be brief.", **asked)
    [call] = [item for item in first.output if item.type == "function_call"]
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"}]
    if stream:
        with openai.responses.stream(input=output, previous_response_id=first.id, **asked) as events:
            second = events.until_done().get_final_response()
    else:
        second = openai.responses.create(input=output, previous_response_id=first.id, **asked)
    second_seen = sent(upstream)
    third = openai.responses.create(model=model, input="And then?", previous_response_id=second.id)
    said = json.dumps(sent(upstream), ensure_ascii=False)

    assert second.previous_response_id == first.id and second.output_text
    assert [message["role"] for message in second_seen][-3:-1] == ["user", "assistant"]
    assert call.call_id in json.dumps(second_seen) and "Be brief." not in json.dumps(second_seen)
    if model == "claude":
        assert second_seen[1]["content"][0]["signature"]
    assert "weather?" in said and second.output_text in said and said.index("weather?") < said.index("And then?")
    listed = list(openai.responses.input_items.list(third.id, limit=2, order="asc"))
    kinds = [item.type for item in listed if item.type != "reasoning"]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    for item in listed:
        TypeAdapter(ResponseItem).validate_python(item.model_dump(exclude_none=True))
    latest = openai.responses.input_items.list(third.id, limit=1)
    assert [item.id for item in latest.data] == [listed[-1].id] and latest.has_more  # type: ignore[attr-defined]
    after = openai.responses.input_items.list(third.id, after=str(listed[-1].id), limit=1)
    assert [item.id for item in after.data] == [listed[-2].id]


def test_an_item_is_referred_to_in_its_place(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Clients that store send an answer's items by their ids."""
    first = openai.responses.create(**ASK)
    items: Any = [{"role": "user", "content": "Say something."}, {"type": "item_reference", "id": first.output[0].id}]
    second = openai.responses.create(model="small", input=[*items, {"role": "user", "content": "More."}])
    roles = [message["role"] for message in sent(upstream)]
    third = openai.responses.create(model="small", input="On.", previous_response_id=second.id)

    assert roles == ["user", "assistant", "user"] and sent(upstream)[1]["content"] == first.output_text
    assert len(sent(upstream)) == 5 and third.output_text


def test_references_name_no_more_than_a_conversation_has(
    openai: OpenAI, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item that is named a thousand times is a thousand items to its model: together they are as short as the items
    of a conversation."""
    monkeypatch.setattr(memory, "LARGEST", 2_000)
    first = openai.responses.create(**ASK)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    seen = len(upstream.requests)
    openai.responses.create(model="small", input=[reference, {"role": "user", "content": "More."}])
    with pytest.raises(BadRequestError, match="items that 'input' refers to have more than") as refused:
        openai.responses.create(model="small", input=[reference] * 1_000)

    assert refused.value.param == "input" and len(upstream.requests) == seen + 1


def test_what_is_deleted_is_gone(openai: OpenAI) -> None:
    """For readers, and for what would go on from it or from a turn after it."""
    first = openai.responses.create(**ASK)
    second = openai.responses.create(**ASK, previous_response_id=first.id)
    openai.responses.delete(first.id)

    assert openai.responses.retrieve(second.id).output_text == second.output_text
    for ask in (openai.responses.retrieve, openai.responses.delete, openai.responses.input_items.list):
        with pytest.raises(NotFoundError, match="not found"):
            ask(first.id)
    for previous in (first.id, second.id):
        with pytest.raises(BadRequestError, match=f"{first.id}' not found") as refused:
            openai.responses.create(**ASK, previous_response_id=previous)
        assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"


def test_an_id_with_a_nul_is_not_found(client: httpx.Client) -> None:
    """Postgres cannot even look for it; that is no reason to say that Postgres is away."""
    answer = client.post(URL, json=ASK | {"previous_response_id": "resp_\x00"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
    reference = {"type": "item_reference", "id": "resp_\x00"}
    assert client.post(URL, json=ASK | {"input": [reference]}).status_code in (400, 404)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert client.request(method, f"{URL}/resp_%00{path}").status_code == 404


def test_another_team_finds_nothing(house: House, openai: OpenAI) -> None:
    """Its id is as unknown there as one that never was, whatever is done with it; and it stays."""
    response = openai.responses.create(**ASK)
    key = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}"))
    item = {"type": "item_reference", "id": response.output[0].id}
    with house.client(key) as other:
        found = [
            other.get(f"{URL}/{response.id}"),
            other.get(f"{URL}/{response.id}/input_items"),
            other.delete(f"{URL}/{response.id}"),
            other.post(f"{URL}/{response.id}/cancel"),
        ]
        refused = [
            other.post(URL, json=ASK | {"previous_response_id": response.id}),
            other.post("/v1/route", json=ASK | {"previous_response_id": response.id}),
            other.post(URL, json=ASK | {"input": [item]}),
        ]

    assert [answer.status_code for answer in found] == [404] * 4
    assert [answer.status_code for answer in refused] == [400] * 3
    assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in (*found, *refused))
    assert openai.responses.retrieve(response.id).id == response.id


def test_only_what_runs_in_the_background_is_cancelled(openai: OpenAI) -> None:
    """Another response has ended, or ends with its connection."""
    response = openai.responses.create(**ASK)

    with pytest.raises(BadRequestError, match="close its connection"):
        openai.responses.cancel(response.id)


def test_a_route_is_explained_for_the_whole_conversation(client: httpx.Client) -> None:
    """With the turns before, which its limits and costs are of."""
    long = client.post(URL, json=ASK | {"input": "word " * 1000, "max_output_tokens": 16}).json()
    alone, after = (
        client.post("/v1/route", json=ASK | {"max_output_tokens": 16} | more).json()["targets"][0]["most_cost_usd"]
        for more in ({"stream": False}, {"previous_response_id": long["id"]})
    )

    assert float(after) > 2 * float(alone)


def test_contents_lie_sealed_and_go_with_their_time(house: House, client: httpx.Client) -> None:
    """Nothing of them is to be read in Postgres; the sweep deletes what is past its time and nothing else."""
    secret = f"Remember {uuid.uuid4()}."
    old, new = (client.post(URL, json=ASK | {"input": secret}).json() for _ in range(2))
    database_url, read = (
        house.settings.database_url,
        "SELECT row_to_json(s)::text FROM stored_responses s WHERE id = $1",
    )
    row = asyncio.run(fetch(database_url, read, old["id"]))
    past = "UPDATE stored_responses SET created_at = now() - interval '31 days' WHERE id = $1"
    asyncio.run(fetch(database_url, past, old["id"]))
    answers = [client.get(f"{URL}/{response['id']}").status_code for response in (old, new)]
    after = client.post(URL, json=ASK | {"previous_response_id": old["id"]})

    assert secret not in row[0][0] and old["output"][0]["content"][0]["text"] not in row[0][0]
    assert answers == [404, 200] and after.status_code == 400
    assert asyncio.run(purge(house.settings)) >= 1
    assert asyncio.run(fetch(database_url, read, old["id"])) == []
    assert asyncio.run(fetch(database_url, read, new["id"])) != []


def test_a_gateway_may_store_nothing(house: House, client: httpx.Client, tmp_path: Path) -> None:
    """``retention.responses: 0``: answers say that they are not stored, and nothing is found or gone on from."""
    stored = client.post(URL, json=ASK).json()
    settings = replace(house.settings, retention=Retention(responses=0.0), data_dir=tmp_path)
    with serving(settings) as url, httpx.Client(base_url=url, headers=client.headers) as other:
        answers = [other.post(URL, json=ASK | more) for more in ({}, {"store": True})]
        after = other.post(URL, json=ASK | {"previous_response_id": stored["id"]})
        read = other.get(f"{URL}/{stored['id']}")
        chat = {"model": "small", "store": True, "messages": [{"role": "user", "content": "Hi"}]}
        told = other.post("/v1/chat/completions", json=chat)
        sought = other.get(f"/v1/chat/completions/{told.json()['id']}")

    assert (told.headers[DROPPED], sought.status_code) == ("store", 404)
    assert [answer.json()["store"] for answer in answers] == [False, False]
    assert [answer.headers.get(DROPPED) for answer in answers] == [None, "store"]
    assert client.get(f"{URL}/{answers[0].json()['id']}").status_code == 404
    assert (after.status_code, read.status_code) == (400, 404) and "in 'input'" in after.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", ["too long", "broken"])
def test_an_answer_that_cannot_be_stored_is_given_all_the_same(
    house: House, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, why: str, stream: bool
) -> None:
    """It says so, and is paid as any other."""
    match why:
        case "too long":
            monkeypatch.setattr(store, "LARGEST", 2000)
        case "broken":
            monkeypatch.setattr(memory, "AWAY_FOR", 0.0)
            monkeypatch.setattr(store, "PUT", text("INSERT INTO nowhere SELECT :id"))
    answer = client.post(URL, json=ASK | {"stream": stream, "instructions": "x" * 2000})
    response = built_response(answer.text) if stream else answer.json()

    assert answer.status_code == 200 and response["store"] is False and response["status"] == "completed"
    assert stream or answer.headers[DROPPED] == "store"
    assert house.record_of(answer)["status"] == "answered"
    assert client.get(f"{URL}/{response['id']}").status_code == 404


def test_a_team_stores_no_more_than_its_bytes(house: House, client: httpx.Client, tmp_path: Path) -> None:
    """``responses.stored_bytes``: beyond, answers are given and not stored, nor added to a conversation, and none is
    begun, be it empty. What was stored, any gateway has."""
    key, thrifty = (asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}")) for _ in range(2))
    settings = replace(house.settings, responses_stored_bytes=1, data_dir=tmp_path)
    with serving(settings) as url, httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}) as other:
        first, second = (other.post(URL, json=ASK) for _ in range(2))
        with house.client(key) as elsewhere:  # another gateway
            read = elsewhere.get(f"{URL}/{first.json()['id']}")
            after = elsewhere.post(URL, json=ASK | {"previous_response_id": first.json()["id"]})
        other.headers["authorization"] = f"Bearer {thrifty}"
        begun, full = (other.post("/v1/conversations", json={}) for _ in range(2))
        added = other.post(URL, json=ASK | {"store": False, "conversation": begun.json()["id"]})

    assert (begun.status_code, full.status_code, full.json()["error"]["code"]) == (200, 429, "storage_limit_exceeded")
    assert (added.status_code, added.headers[DROPPED], added.json()["conversation"]) == (200, "conversation", None)
    assert [answer.json()["store"] for answer in (first, second)] == [True, False]
    assert second.headers[DROPPED] == "store"
    assert (read.status_code, read.json(), after.json()["store"]) == (200, first.json(), True)


def test_a_team_with_very_many_rows_keeps_none_from_storing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sum its bytes may take longer than an answer waits to be stored: neither it nor another team pays for that."""
    large, other = (f"team_{uuid.uuid4().hex}" for _ in range(2))
    monkeypatch.setattr(memory, "SUM_WITHIN", 0.1)
    slow = f"CASE WHEN CAST(:team_id AS text) = '{large}' THEN pg_sleep(4) END, CAST(:since AS timestamptz)"
    monkeypatch.setattr(store, "BYTES", text(f"SELECT 0 AS bytes, {slow}"))
    stored: list[bool] = []
    for key in [asyncio.run(make_team(house.settings, team)) for team in (large, other)]:
        with house.client(key) as client:
            stored += [client.post(URL, json=ASK).json()["store"] for _ in range(2)]

    assert stored == [True] * 4


def test_a_long_conversation_is_answered_and_not_stored(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turns count together, and what was stored of it stays."""
    first = client.post(URL, json=ASK | {"input": "x" * 3000}).json()
    monkeypatch.setattr(store, "LARGEST", 6000)
    second = client.post(URL, json=ASK | {"input": "x" * 1000, "previous_response_id": first["id"]}).json()

    assert (first["store"], second["store"]) == (True, False)
    assert client.get(f"{URL}/{first['id']}").status_code == 200


def test_a_long_conversation_is_read_where_long_bodies_have_room(
    client: httpx.Client, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small request takes the memory of the conversation that it goes on from, and waits for it as a long body."""
    first = client.post(URL, json=ASK | {"input": "x" * 3000}).json()
    taken: list[int] = []
    take = BodyRoom.taken
    monkeypatch.setattr(BodyRoom, "taken", lambda room, team, size: taken.append(size) or take(room, team, size))
    monkeypatch.setattr(store, "HEAVY", 2000)
    second = client.post(URL, json=ASK | {"previous_response_id": first["id"]}).json()

    assert second["store"] is True and len(sent(upstream)) == 3 and len(taken) == 1 and 3000 < taken[0] < 8000
    assert len(client.get(f"{URL}/{second['id']}/input_items").json()["data"]) == 3


async def fetch(url: str, statement: str, *values: object) -> list[Any]:
    """Return the rows of one statement."""
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(statement, *values))
    finally:
        await connection.close()


async def purge(settings: Settings) -> int:
    """Have the sweep delete what is past its time."""
    async with Database(settings.database_url) as database:
        return await purge_responses(database, Clock(), settings.retention.responses)
