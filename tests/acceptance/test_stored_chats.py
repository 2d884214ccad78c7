# Stored chats as teams use them, by the stock openai package: asked with ``store``, listed, read, changed, deleted;
# their team's alone, and nothing that an upstream hears of.

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import asyncpg
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from gateway.overload.read_limit import StoredLimit
from gateway.stored_responses import chats
from gateway.upstreams.wire.quirks import stores_chats
from tests.support.house import House, make_team
from tests.support.scripted_upstream import Script, ScriptedUpstream
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PARTS = [{"type": "text", "text": "In parts."}]


def ask(openai: OpenAI, *, stream: bool = False, **more: Any) -> tuple[str, str]:
    """Return the id of a chat and what was said."""
    answer: Any = openai.chat.completions.create(**{"model": "small", "stream": stream, **ASK, **more})
    if not stream:
        return answer.id, answer.choices[0].message.content or ""
    chunks = list(answer)
    return chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def sealed_of(url: str, chat_id: str) -> bytes:
    """Return what the row of a chat holds."""
    connection = await asyncpg.connect(url)
    try:
        found: bytes = await connection.fetchval("SELECT sealed FROM stored_responses WHERE id = $1", chat_id)
        return found
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("stream", "model", "key"),
    [(False, "small", False), (True, "small", True), (False, "claude", True), (True, "claude", False)],
)
def test_a_chat_is_read_as_it_was_answered(
    house: House, openai: OpenAI, upstream: ScriptedUpstream, stream: bool, model: str, key: bool
) -> None:
    """Its words, metadata and messages; sealed in its row, and told to no upstream."""
    asked: Any = {"model": model, "store": True, "metadata": {"of": "me"}, "tools": [TOOL]}
    asked["extra_headers"] = {"idempotency-key": str(uuid.uuid4())} if key else {}
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
    chat_id, said = ask(openai, stream=stream, messages=talk, **asked)
    seen = upstream.requests[-1].body or {}
    found = openai.chat.completions.retrieve(chat_id)
    messages = openai.chat.completions.messages.list(chat_id).data
    sealed = asyncio.run(sealed_of(house.settings.database_url, chat_id))

    assert said and (found.id, found.choices[0].message.content, found.model) == (chat_id, said, model)
    assert found.usage is not None and found.usage.total_tokens > 0
    assert found.model_dump()["metadata"] == {"of": "me"} and "store" not in seen
    assert [(one.id, str(one.role), one.content) for one in messages] == [
        (f"{chat_id}-0", "system", "Be brief."),
        (f"{chat_id}-1", "user", None),
    ]
    assert [part.to_dict() for part in messages[1].content_parts or ()] == PARTS
    assert said.encode() not in sealed and b"In parts." not in sealed


def test_thinking_is_stored_signed_however_it_came(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """A stream is stored as a whole answer is: its tools may be gone on from."""
    upstream.script(Script(text="Hello", thinking="They greet."), model="claude")
    ids = [ask(openai, model="claude", store=True, stream=stream, max_tokens=3000)[0] for stream in (False, True)]
    whole, streamed = (openai.chat.completions.retrieve(each).model_dump()["choices"] for each in ids)
    upstream.forget()

    assert whole == streamed and whole[0]["message"]["thinking_blocks"][0]["signature"]


def test_chats_are_listed_changed_and_deleted(
    openai: OpenAI, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page in either order, by model and metadata; a chat is stored by wish alone, and not at its upstream."""
    monkeypatch.setattr(chats, "READ_AT_ONCE", 1)  # a statement for each
    monkeypatch.setattr(StoredLimit, "a_second", 1e6)  # one list after the other
    run = uuid.uuid4().hex
    completions = openai.chat.completions
    mine = [ask(openai, store=True, metadata={"run": run, "n": str(n)})[0] for n in range(5)]
    other, _ = ask(openai, store=True, model="large", metadata={"run": run})
    unwished = [ask(openai, metadata={"run": run}, **wish)[0] for wish in ({}, {"store": False})]
    rising = [chat.id for chat in completions.list(metadata={"run": run}, limit=2)]
    falling = [chat.id for chat in completions.list(metadata={"run": run}, limit=2, order="desc")]
    changed = completions.update(mine[0], metadata={"run": run, "n": "new"})
    found = completions.list(metadata={"run": run, "n": "new"}, model="small").data
    gone = completions.delete(mine[1])
    with monkeypatch.context() as few:
        few.setattr(chats, "MOST_READS", 2)
        with monkeypatch.context() as slow:
            slow.setattr(StoredLimit, "at_once", 2.0)  # what is found late waits for its turn
            slow.setattr(StoredLimit, "a_second", 50.0)
            late = completions.list(metadata={"run": run, "n": "4"}, limit=1).data
        few.setattr(chats, "MOST_IN_VAIN", 2)
        with pytest.raises(BadRequestError, match=f"Go on with after={mine[4]}"):
            completions.list(metadata={"run": "none"}, order="desc")
        early = completions.list(metadata={"run": run}, order="desc")

    assert [(request.body or {}).get("store") for request in upstream.requests[-2:]] == [None, None]
    assert stores_chats("https://api.openai.com/v1") and not stores_chats("https://api.groq.com/openai/v1")
    assert ([chat.id for chat in early.data], early.has_more) == ([other, mine[4]], True)
    assert [chat.id for chat in late] == [mine[4]]
    assert (rising, falling) == ([*mine, other], [other, *reversed(mine)])
    assert [chat.id for chat in completions.list(metadata={"run": run}, model="large")] == [other]
    assert [chat.id for chat in found] == [mine[0]] == [changed.id]
    assert (gone.id, gone.deleted, gone.object) == (mine[1], True, "chat.completion.deleted")
    for chat_id in (mine[1], *unwished):
        with pytest.raises(NotFoundError, match="'store': true"):
            completions.retrieve(chat_id)


def test_what_was_said_is_for_keys_that_may_say_it(house: House, openai: OpenAI) -> None:
    """A key bound to other endpoints reads and changes no stored chat, response, conversation, file or batch of its
    team."""
    chat_id, _ = ask(openai, store=True)
    chat = f"/v1/chat/completions/{chat_id}"
    said = ["/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/v1/conversations/conv_x"]
    said += ["/v1/files", "/v1/files/file_x/content", "/v1/batches", "/v1/batch/batch_x/results"]
    with house.client(house.admin_key) as admin:
        new = {"team_id": house.team_id, "allowed_endpoints": ["realtime"]}
        bound = admin.post("/admin/keys", json=new).raise_for_status().json()
        with house.client(bound["key"]) as page:
            read = [page.get(path) for path in ("/v1/chat/completions", chat, f"{chat}/messages", *said)]
            changed = [page.post(chat, json={"metadata": {}}), page.delete(chat), page.delete(said[0])]
            changed += [page.delete("/v1/files/file_x"), page.post("/v1/batches/batch_x/cancel")]
            changed.append(page.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}")}))
            changed.append(page.post("/v1/conversations", json={}))
            admin.patch(f"/admin/keys/{bound['key_id']}", json={"allowed_endpoints": ["chat.completions"]})
            until(lambda: page.get(chat).status_code == 200)
            still = page.get(said[0])
            assert page.get("/v1/files").status_code == page.get("/v1/batches").status_code == 200

    told = {(answer.status_code, answer.json()["error"]["code"]) for answer in (*read, *changed, still)}
    assert told == {(403, "endpoint_not_allowed")}


def test_a_chat_is_its_teams_alone_and_no_response(house: House, openai: OpenAI) -> None:
    """Another team finds none of it by any way, and as a response it is none; wrong questions say what is right."""
    chat_id, _ = ask(openai, store=True)
    key = asyncio.run(make_team(house.settings, "stores_no_chats"))
    path = f"/v1/chat/completions/{chat_id}"
    with house.client(key) as other:
        tries = [other.get(path), other.post(path, json={"metadata": {}}), other.delete(path)]
        tries.append(other.get(f"{path}/messages"))
        none = other.get("/v1/chat/completions").json()
    with house.client() as client:
        tries += [client.get(f"/v1/responses/{chat_id}"), client.delete(f"/v1/responses/{chat_id}")]
        tries.append(client.get("/v1/chat/completions/resp_x"))
        wrong = [
            client.post("/v1/responses", json={"model": "small", "input": "Hi", "previous_response_id": chat_id}),
            client.get("/v1/chat/completions", params={"after": "x"}),
            client.get("/v1/chat/completions", params={"tags": "x"}),
            client.get(f"{path}/messages", params={"after": "x"}),
            client.post(path, json={"model": "x"}),
        ]
        still = client.get(path)

    assert [answer.status_code for answer in tries] == [404] * 7
    assert (none["data"], none["has_more"]) == ([], False)
    assert [answer.status_code for answer in wrong] == [400] * 5
    assert still.status_code == 200
