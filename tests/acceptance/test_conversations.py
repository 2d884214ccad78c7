# Conversations as teams use them, by the stock openai package: made, gone on from by responses, listed, deleted; nobody
# else's; and never half of what a response said.

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import asyncpg
import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from gateway.core.clock import Clock
from gateway.overload.read_limit import StoredLimit
from gateway.storage.database import Database
from gateway.stored_responses import conversations, store
from gateway.stored_responses.store import purge_responses
from tests.support.house import House, make_team
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL, STORED = "/v1/conversations", "/v1/responses/r"
ASK: dict[str, Any] = {"model": "small", "input": "Say something.", "max_output_tokens": 16}
FIRST: Any = [{"type": "message", "role": "user", "content": "My name is Ann."}]


def texts_of(openai: OpenAI, conversation_id: str) -> list[str]:
    """Return what the messages of a conversation say, in their order."""
    listed: Any = openai.conversations.items.list(conversation_id, order="asc", limit=3)
    return [item.content[0].text for item in listed if item.type == "message"]


@pytest.mark.parametrize("model", ["small", "claude"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_a_conversation_and_adds_to_it(
    openai: OpenAI, upstream: ScriptedUpstream, model: str, stream: bool
) -> None:
    """Also where the response itself is not stored."""
    made = openai.conversations.create(items=FIRST, metadata={"of": "Ann"})
    said = ["My name is Ann."]
    for words in ("Who am I?", "And you?"):
        asked: Any = {"model": model, "input": words, "conversation": made.id, "store": False}
        if stream:
            with openai.responses.stream(**asked) as events:
                response = events.until_done().get_final_response()
        else:
            response = openai.responses.create(**asked)
        seen: Any = (upstream.requests[-1].body or {})["messages"]
        assert response.conversation is not None and response.conversation.id == made.id
        assert all(one in json.dumps(seen, ensure_ascii=False) for one in [*said, words])
        said += [words, response.output_text]

    assert texts_of(openai, made.id) == said
    assert openai.conversations.retrieve(made.id).metadata == {"of": "Ann"}
    assert openai.conversations.update(made.id, metadata={"of": "Bo"}).metadata == {"of": "Bo"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            (method, path)
            for method in ("GET", "DELETE")
            for path in ("/v1/responses/r", f"{URL}/c", f"{URL}/c/items/i")
        ),
        *(("GET", path) for path in ("/v1/responses/r/input_items", f"{URL}/c/items")),
        *(("POST", path) for path in ("/v1/responses/r/cancel", URL, f"{URL}/c", f"{URL}/c/items")),
        *(
            (method, f"{batches}{path}")
            for batches in ("/v1/batch", "/v1/batches", "/v1/messages/batches")
            for method, path in (("GET", ""), ("GET", "/b"), ("POST", "/b/cancel"))
        ),
        *(("GET", f"/v1/{path}") for path in ("batch/b/results", "messages/batches/b/results", "files/f/content")),
        *(("DELETE", f"/v1/{path}") for path in ("messages/batches/b", "files/f")),
        *(("GET", f"/v1/{path}") for path in ("files", "files/f", "models", "models/small")),
    ],
)
def test_what_is_stored_is_used_within_a_limit_of_its_own(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """Each use asks Postgres; nothing of a team that asks too often is looked for. Its calls go on."""
    monkeypatch.setattr(StoredLimit, "at_once", 0.0)
    monkeypatch.setattr(StoredLimit, "a_second", 0.001)
    refused, asked = client.request(method, path, json={}), client.post("/v1/responses", json=ASK | {"store": False})

    assert refused.status_code == 429 and "asks for what is stored" in refused.json()["error"]["message"]
    assert asked.status_code == 200


def test_items_are_added_read_and_deleted(openai: OpenAI) -> None:
    """Each has an id of its own, calls and what they returned among them; pages go up and down."""
    made = openai.conversations.create()
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_mine"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "fine"}
    added = openai.conversations.items.create(made.id, items=[*FIRST, call, result])
    ids = [str(item.id) for item in added.data]
    down = openai.conversations.items.list(made.id, limit=2)
    after = openai.conversations.items.list(made.id, after=ids[0], order="asc")
    one: Any = openai.conversations.items.retrieve(ids[1], conversation_id=made.id)
    left = openai.conversations.items.delete(ids[0], conversation_id=made.id)

    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert len(set(ids)) == 3 and "fc_mine" not in ids
    assert [item.id for item in down.data] == ids[:0:-1] and down.has_more
    assert [item.id for item in after.data] == ids[1:] and not after.has_more
    assert (one.type, one.name, left.id) == ("function_call", "f", made.id)
    assert [item.id for item in openai.conversations.items.list(made.id, order="asc")] == ids[1:]
    assert openai.conversations.delete(made.id).deleted
    for gone in (openai.conversations.retrieve, openai.conversations.delete, openai.conversations.items.list):
        with pytest.raises(NotFoundError, match="not found"):
            gone(made.id)
    with pytest.raises(NotFoundError, match="Conversation with id"):
        openai.responses.create(**ASK, conversation=made.id)


def test_another_team_finds_nothing(house: House, openai: OpenAI) -> None:
    """Whatever is done with its id, and that of its item; and it stays."""
    made = openai.conversations.create(items=FIRST)
    item = openai.conversations.items.list(made.id).data[0].id
    one, items = f"{URL}/{made.id}", f"{URL}/{made.id}/items"
    key = asyncio.run(make_team(house.settings, f"team_{uuid.uuid4().hex}"))
    with house.client(key) as other:
        answers = [other.request(*call) for call in (("GET", one), ("DELETE", one), ("GET", items))]
        answers += [other.request(method, f"{items}/{item}") for method in ("GET", "DELETE")]
        answers.append(other.post(one, json={"metadata": {}}))
        answers.append(other.post(items, json={"items": FIRST}))
        answers += [other.post(path, json=ASK | {"conversation": made.id}) for path in ("/v1/responses", "/v1/route")]

    assert [answer.status_code for answer in answers] == [404] * 9
    assert texts_of(openai, made.id) == ["My name is Ann."]


def test_what_runs_at_once_stands_one_after_the_other(openai: OpenAI) -> None:
    """Each response with its own question before it."""
    made = openai.conversations.create()

    def ask(number: int) -> tuple[str, str]:
        asked: Any = ASK | {"input": f"Number {number}", "conversation": {"id": made.id}}
        return f"Number {number}", openai.responses.create(**asked).output_text

    with ThreadPoolExecutor(8) as pool:
        said = set(pool.map(ask, range(8)))
    found = texts_of(openai, made.id)

    assert set(zip(found[::2], found[1::2], strict=True)) == said and len(said) == 8


def test_what_has_no_answer_adds_nothing(openai: OpenAI, client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """A call that failed, one whose stream broke, and one that never was."""
    made = openai.conversations.create(items=FIRST)
    asked = ASK | {"conversation": made.id}
    for script, stream in ((Script(status=400, message="No."), False), ("reset,after=2", True)):
        upstream.script(script, times=2)
        client.post("/v1/responses", json=asked | {"stream": stream})
        upstream.forget()
    refused = [
        client.post("/v1/responses", json=asked | {"previous_response_id": "resp_1"}),
        client.post("/v1/responses", json=asked | {"background": True}),
        client.post(f"{URL}/{made.id}/items", json={"items": FIRST * 21}),
        client.post(f"{URL}/{made.id}/items", json={"items": [{"type": "item_reference", "id": "msg_1"}]}),
        client.post(f"{URL}/{made.id}/items", json={"items": [{"type": "function_call"}]}),
        client.post(f"{URL}/{made.id}/items", json={"items": []}),
        client.post(f"{URL}/{made.id}", json={"metadata": {"a": "b" * 1000}}),
        client.get(f"{URL}/{made.id}/items?after=msg_1"),
        client.post(URL, json={"metdata": {}}),
    ]

    assert [answer.status_code for answer in refused] == [400] * 9
    assert all("items" in answer.json()["error"]["param"] for answer in refused[2:6]), [r.text for r in refused[2:6]]
    assert texts_of(openai, made.id) == ["My name is Ann."]


def test_a_turn_of_a_conversation_is_gone_on_from_there(openai: OpenAI) -> None:
    """By its response alone, the items before it would be lost."""
    made = openai.conversations.create(items=FIRST)
    response = openai.responses.create(**ASK, conversation=made.id)

    with pytest.raises(BadRequestError, match=r"turn of a conversation.*'conversation'"):
        openai.responses.create(**ASK, previous_response_id=response.id)


def test_a_full_conversation_takes_nothing_and_the_answer_is_given(
    openai: OpenAI, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says that it was not added."""
    monkeypatch.setattr(conversations, "MOST_MESSAGES", 2)
    made = openai.conversations.create(items=FIRST)
    answer = client.post("/v1/responses", json=ASK | {"conversation": made.id})
    full = client.post(f"{URL}/{made.id}/items", json={"items": FIRST * 2})

    assert answer.status_code == 200 and answer.json()["conversation"] is None
    assert "conversation" in answer.headers["x-tollgate-dropped"]
    assert full.status_code >= 400 and "Begin another" in full.json()["error"]["message"]
    assert texts_of(openai, made.id) == ["My name is Ann."]


def test_what_is_long_is_opened_beside_the_event_loop(openai: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its length as JSON: what says the same again and again is packed to a hundredth of that."""
    on_loop: list[str] = []

    def watched(unseal: Any) -> Any:
        def opened(sealer: Any, team_id: str, label: str, *what: Any) -> Any:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                on_loop.append(label)
            return unseal(sealer, team_id, label, *what)

        return opened

    for module in (conversations, store):
        monkeypatch.setattr(module, "HEAVY", 2_000)
        monkeypatch.setattr(module, "unseal", watched(module.unseal))
    made = openai.conversations.create(items=[{"role": "user", "content": "x" * 5_000}])
    (item,) = openai.conversations.items.list(made.id)
    openai.conversations.items.retrieve(str(item.id), conversation_id=made.id)
    response = openai.responses.create(**ASK | {"input": "x" * 5_000})
    openai.responses.retrieve(response.id)
    openai.responses.input_items.list(response.id)

    assert set(on_loop) <= {made.id}  # its metadata


def test_contents_lie_sealed_and_go_with_their_time(house: House, openai: OpenAI) -> None:
    """Nothing of them is to be read in Postgres; those that are used are kept."""
    secret = f"Remember {uuid.uuid4()}."
    items: Any = [{"role": "user", "content": secret}]
    old, used = (openai.conversations.create(items=items, metadata={"of": secret}) for _ in range(2))

    async def look() -> str:
        connection = await asyncpg.connect(house.settings.database_url)
        tables = ("conversations", "conversation_items")
        rows = [str(await connection.fetch(f"SELECT * FROM {table}")) for table in tables]
        moved = "UPDATE conversations SET touched_at = touched_at - interval '400 days' WHERE id = ANY($1)"
        await connection.execute(moved, [old.id, used.id])
        await connection.execute("UPDATE conversations SET touched_at = now() WHERE id = $1", used.id)
        await connection.close()
        database = Database(house.settings.database_url)
        await purge_responses(database, Clock(), house.settings.retention.responses)
        await database.close()
        return "".join(rows)

    assert secret not in asyncio.run(look())
    with pytest.raises(NotFoundError):
        openai.conversations.retrieve(old.id)
    assert texts_of(openai, used.id) == [secret]
