# Responses where the upstream speaks that API itself: asked there, and given as it came but for what is this gateway's
# own: ids, numbers, the model's name and the cost. Nothing is stored there; what goes on, goes on from here.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.support.house import House
from tests.support.response_stream import events_in
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL, OWN, CHAT = "/v1/responses", "/v1/responses", "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "native", "input": "Say something."}
THINKS: dict[str, Any] = {"model": "native", "reasoning": {"effort": "high", "summary": "auto"}}
DROPPED = "x-tollgate-dropped"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
SEAL = "reasoning.encrypted_content"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Patch files."}
PATCH |= {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
NAMESPACE = {"type": "namespace", "name": "ulm", "description": "Ulm.", "tools": [WEATHER | {"name": "clock"}]}
SEARCH: dict[str, Any] = {"type": "web_search", "search_context_size": "low"}


class City(BaseModel):
    """What a structured answer holds."""

    city: str


def sent(upstream: ScriptedUpstream) -> dict[str, Any]:
    """Return what the upstream was asked last, at its own API."""
    seen = upstream.requests[-1]
    assert seen.path == OWN and seen.body is not None
    return seen.body


def whole(openai: OpenAI, *, stream: bool, **asked: Any) -> Any:
    """Return the response that is answered, or that a stream adds up to."""
    if not stream:
        return openai.responses.create(**asked)
    with openai.responses.stream(**asked) as events:
        return events.until_done().get_final_response()


@pytest.mark.parametrize("model", ["native", "small", "claude", "gemini"])
def test_tokens_of_a_response_are_counted(openai: OpenAI, house: House, upstream: ScriptedUpstream, model: str) -> None:
    """Where the upstream counts them, as it does for its answer, turns before included; elsewhere about. It costs
    nothing, leaves no row, and is told of nothing but the prompt."""
    said: dict[str, Any] = {"model": model, "input": "word " * 400, "instructions": "Be brief.", "tools": [WEATHER]}
    first = openai.responses.create(**said)
    upstream.requests.clear()
    raw = openai.responses.input_tokens.with_raw_response.count(**said)
    more = openai.responses.input_tokens.count(model=model, previous_response_id=first.id)
    assert first.usage is not None
    alone, near = raw.parse(), 0 if model != "gemini" else first.usage.input_tokens
    with house.client(house.admin_key) as admin:
        row = admin.get(f"/admin/usage-records/{raw.headers['x-request-id']}")

    assert row.status_code == 404
    assert (alone.object, len(upstream.requests)) == ("response.input_tokens", 0 if near else 2)
    assert abs(alone.input_tokens - first.usage.input_tokens) <= near
    assert more.input_tokens > 300
    if model == "native":
        counted = upstream.requests[0].body or {}
        assert counted.keys() == {"model", "input", "instructions", "tools"}


@pytest.mark.parametrize("stream", [False, True])
def test_every_field_reaches_the_upstream_and_nothing_is_left_out(
    client: httpx.Client, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """In the caller's words; the answer's own fields come back, with ours for id, model, store and cost."""
    upstream.script(Script(text="Grüezi 東京 🚪", thinking="Hm. No.", cached_tokens=3), times=1)
    said: dict[str, Any] = {
        "instructions": "Be brief.",
        "reasoning": {"effort": "xhigh", "summary": "detailed"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "auto",
        "context_management": [{"type": "compaction", "compact_threshold": 90_000}],
        "top_p": 0.5,
        "parallel_tool_calls": False,
        "tools": [WEATHER, PATCH, NAMESPACE],
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_output_tokens": 900,
    }
    answer = client.post(URL, json=ASK | said | {"stream": stream, "include": ["web_search_call.results"]})
    response = events_in(answer.text)[-1]["response"] if stream else answer.json()
    row, seen = house.record_of(answer), sent(upstream)

    assert {name: seen[name] for name in said} == said
    assert (seen["model"], seen["store"], seen["include"]) == ("gpt-5", False, ["web_search_call.results", SEAL])
    assert DROPPED not in answer.headers
    assert (response["model"], response["model_used"], response["store"]) == ("native", "native", True)
    assert response["truncation"] == "auto" and response["billing"] == {"payer": "developer"}
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["phase"] == "final_answer" and response["output"][0]["summary"]
    usage = response["usage"]
    assert (row["cached_input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (3, 3)
    assert (row["output_tokens"], float(usage["cost_usd"])) == (usage["output_tokens"], row["cost_usd"])
    TypeAdapter(Response).validate_python(response)
    assert client.get(f"{URL}/{response['id']}").json() == response


def test_marks_of_the_prompt_cache_reach_the_upstream(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """As they came; a model that is asked for a chat has none, and the answer says so."""
    mark = {"mode": "explicit"}
    parts = [
        {"type": "input_text", "text": "Long.", "prompt_cache_breakpoint": mark},
        {"type": "input_image", "image_url": PIXEL, "prompt_cache_breakpoint": mark},
        {"type": "input_text", "text": "And short."},
    ]
    asked = {"input": [{"type": "message", "role": "user", "content": parts}], "store": False}
    native = client.post(URL, json=ASK | asked)
    seen = sent(upstream)["input"][0]["content"]
    chat = client.post(URL, json=ASK | asked | {"model": "small"})

    assert (native.status_code, chat.status_code, seen) == (200, 200, parts)
    parts[0]["prompt_cache_breakpoint"] = mark | {"ttl": "12h"}
    longer = client.post(URL, json=ASK | asked)

    assert sent(upstream)["input"][0]["content"] == seen  # what is kept for longer may cost more
    assert longer.headers[DROPPED] == "input.prompt_cache_breakpoint.ttl"
    assert DROPPED not in native.headers and chat.headers[DROPPED] == "input.prompt_cache_breakpoint"


def test_every_event_goes_through(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Of each type, with its own fields; ids and numbers are ours, and belong together."""
    upstream.script(Script(text="Grüezi 東京 🚪", thinking="Hm. No."), times=1)
    asked = {"input": "search it", "tools": [SEARCH], "stream": True}
    events = events_in(client.post(URL, json=THINKS | asked).text)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    kinds = {event["type"].removeprefix("response.") for event in events}
    [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"][-1:]
    [first, *_, last] = events

    assert kinds >= {
        *("reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_part.done"),
        *("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
        *("created", "in_progress", "output_text.delta", "output_text.done", "completed"),
    }
    assert first["response"]["id"] == last["response"]["id"] and "up" not in last["response"]["id"]
    assert done == last["response"]["output"][-1] and done["content"][0]["annotations"]
    assert {event["item_id"] for event in events if "item_id" in event} == {
        item["id"] for item in last["response"]["output"]
    }
    assert all(event["obfuscation"] for event in events if event["type"].endswith("text.delta"))


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_goes_back_as_it_came(openai: OpenAI, upstream: ScriptedUpstream, stream: bool) -> None:
    """A client sends back what it was answered: the upstream has its own ids and seals again, or would refuse them."""
    upstream.script(Script(thinking="They ask for the weather."), times=1)
    items: list[Any] = [{"role": "user", "content": "weather? apply_patch"}]
    asked: Any = THINKS | {"tools": [WEATHER, PATCH], "store": False, "include": [SEAL]}
    first = whole(openai, stream=stream, input=items, **asked)
    items += first.output
    for call in first.output[1:]:
        items.append({"type": f"{call.type}_output", "call_id": call.call_id, "output": "fine"})
    second = whole(openai, stream=stream, input=items, **asked)
    thought, *calls = sent(upstream)["input"][1:4]

    assert [item.type for item in first.output] == ["reasoning", "function_call", "custom_tool_call"]
    assert thought["encrypted_content"] == f"sealed-{thought['id']}" == first.output[0].encrypted_content
    assert [call["call_id"] for call in calls] == [call.call_id for call in first.output[1:]]
    assert second.output_text and second.store is False


@pytest.mark.parametrize("by", ["previous_response_id", "conversation", "item_reference"])
def test_what_is_stored_here_is_shown_to_the_upstream(openai: OpenAI, upstream: ScriptedUpstream, by: str) -> None:
    """Every item of the turns before, its thinking too; the upstream stores nothing and knows of no response."""
    upstream.script(Script(text="Ann.", thinking="A name."), times=1)
    held = openai.conversations.create().id if by == "conversation" else None
    asked: Any = THINKS if held is None else THINKS | {"conversation": held}
    first = openai.responses.create(input="I am Ann.", **asked)
    if by == "previous_response_id":
        asked = asked | {by: first.id}
    elif by == "item_reference":
        references: list[Any] = [{"type": by, "id": item.id} for item in first.output]
        asked = asked | {"input": [*references, {"role": "user", "content": "Who am I?"}]}
    second = openai.responses.create(**({"input": "Who am I?"} | asked))
    seen = sent(upstream)

    assert [item["type"] for item in seen["input"][-3:]] == ["reasoning", "message", "message"]
    assert seen["input"][-3]["encrypted_content"] == first.output[0].encrypted_content
    assert not {"previous_response_id", "conversation"} & seen.keys() and second.output_text


def test_it_runs_in_the_background_and_over_a_websocket(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """As other responses do: numbered from the first event on, and gone on from."""
    upstream.script(Script(text="Ann.", thinking="A name."))
    queued = openai.responses.create(input="I am Ann.", background=True, **THINKS)
    until(lambda: openai.responses.retrieve(queued.id).status == "completed")
    with openai.responses.retrieve(queued.id, stream=True) as stream:
        numbers = [event.sequence_number for event in stream]
    with openai.responses.connect() as connection:
        connection.response.create(input="And?", previous_response_id=queued.id, store=False, **THINKS)
        kinds = [event.type for event in _until_end(connection)]

    assert numbers == list(range(len(numbers))) and kinds[-1] == "response.completed"
    assert [item["type"] for item in sent(upstream)["input"]] == ["message", "reasoning", "message", "message"]


def _until_end(connection: Any) -> Iterator[Any]:
    for event in connection:
        yield event
        if event.type in ("response.completed", "response.failed", "error"):
            return


def test_what_has_a_schema_is_parsed_and_a_conversation_summed_up(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """``responses.parse``, and ``responses.compact``, whose summary the upstream is shown as words."""
    parsed = openai.responses.parse(model="native", input="Where?", text_format=City)
    upstream.script(Script(text="Ann asked."), times=1)
    compacted: Any = openai.responses.compact(model="native", input="I am Ann.")
    openai.responses.create(model="native", input=[*compacted.output, {"role": "user", "content": "And?"}])

    assert isinstance(parsed.output_parsed, City)
    assert "Ann asked." in json.dumps(sent(upstream)["input"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_of_the_web_is_charged_by_its_number(
    client: httpx.Client, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """The upstream makes no more than are held for; without a price for it, or a way to say it, it is refused."""
    asked: dict[str, Any] = {"input": "search it", "tools": [SEARCH], "tool_choice": {"type": "web_search"}}
    answer = client.post(URL, json=ASK | asked | {"stream": stream})
    row, most = house.record_of(answer), sent(upstream)["max_tool_calls"]
    refused = [client.post(URL, json=ASK | asked | {"model": name}) for name in ("native-before", "small")]

    assert (row["status"], row["units"], most) == ("answered", {"web_searches": 1}, 10)
    tokens = row["input_tokens"] * 1e-6 + row["output_tokens"] * 2e-6
    assert row["cost_usd"] == pytest.approx(0.01 + tokens, abs=2e-9)
    assert row["held_tokens"] >= 11 * row["input_tokens"] + 20_000
    assert [one.status_code for one in refused] == [400, 400]
    assert [one.json()["error"]["code"] for one in refused] == ["unsupported_parameter"] * 2


def test_another_model_goes_on_with_what_it_can_read(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Where the first fails, a chat is asked of the next: thinking that is sealed for another is left out and told."""
    upstream.script("500", model="gpt-5")
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed-None"}
    items = [{"role": "user", "content": "Hi"}, thought, {"role": "assistant", "content": "Yes?"}]
    asked = ASK | {"models": ["small"], "input": [*items, {"role": "user", "content": "Well?"}], "truncation": "auto"}
    answer = client.post(URL, json=asked)
    told = set(answer.headers[DROPPED].split(", "))

    assert (answer.status_code, answer.headers["x-model-used"]) == (200, "small")
    assert told == {"input.reasoning", "truncation"} and upstream.requests[-1].path == CHAT


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_upstream_compacted_stands_for_the_turns_before(
    openai: OpenAI, client: httpx.Client, upstream: ScriptedUpstream, stream: bool
) -> None:
    """Its item comes in the answer and goes back; of stored turns those before it are not shown again. No other API
    reads it, and none is asked to compact."""
    asked: dict[str, Any] = ASK | {"input": "Long ago. " * 9, "stream": stream}
    asked["context_management"] = [{"type": "compaction", "compact_threshold": 50}]
    answer = client.post(URL, json=asked)
    response = events_in(answer.text)[-1]["response"] if stream else answer.json()
    made = response["output"][0]
    theirs = made["encrypted_content"].removeprefix("sealed-")
    told: dict[str, Any] = {"type": "compaction", "id": theirs, "encrypted_content": made["encrypted_content"]}
    client.post(URL, json=ASK | {"previous_response_id": response["id"]}).raise_for_status()
    stored = sent(upstream)["input"]
    client.post(
        URL, json=ASK | {"input": [*response["output"], {"role": "user", "content": "And?"}]}
    ).raise_for_status()
    stateless = sent(upstream)["input"]
    elsewhere = client.post(URL, json={"model": "small", "input": [made, {"role": "user", "content": "And?"}]})
    uncompacted = client.post(URL, json=asked | {"model": "small"})

    assert made["type"] == "compaction" and "Long ago" not in json.dumps(stored)
    assert stored[0] == told and stateless[0] == told
    assert [item["type"] for item in stored] == ["compaction", "message", "message"]
    error = elsewhere.json()["error"]
    assert (elsewhere.status_code, error["param"]) == (400, "input[0].encrypted_content")
    assert (uncompacted.status_code, uncompacted.headers[DROPPED]) == (200, "context_management")


def test_thinking_that_another_account_sealed_is_left_out(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """The upstream refuses it by its code, is asked again without, and the caller is told."""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "sealed-elsewhere"}
    answer = client.post(URL, json=ASK | {"input": [thought, {"role": "user", "content": "Well?"}]})
    refusal = upstream.violations.pop()

    assert (answer.status_code, answer.headers[DROPPED]) == (200, "input.reasoning")
    assert "could not be verified" in refusal and [item["type"] for item in sent(upstream)["input"]] == ["message"]


def test_tools_are_searched_where_the_upstream_can(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """What was searched and found goes back as it came; a model that is asked for a chat refuses it by name."""
    searched = {"execution": "client", "call_id": "c", "status": "completed"}
    asked = searched | {"type": "tool_search_call", "arguments": {"queries": ["weather"]}}
    found = searched | {"type": "tool_search_output", "tools": [WEATHER]}
    body = {"input": [{"role": "user", "content": "a"}, asked, found], "reasoning": {"context": "all_turns"}}
    body |= {"tools": [{"type": "tool_search", "execution": "client"}, WEATHER | {"name": "x", "defer_loading": True}]}
    answers = [client.post(URL, json=ASK | body | {"model": name}) for name in ("native", "small")]
    seen, error = sent(upstream), answers[1].json()["error"]

    assert answers[0].status_code == 200 and DROPPED not in answers[0].headers
    assert (seen["input"][1:], seen["tools"], seen["reasoning"]) == ([asked, found], body["tools"], body["reasoning"])
    assert (answers[1].status_code, error["param"], error["code"]) == (400, "tools[0].type", "unsupported_parameter")


def test_a_pdf_is_read_where_the_upstream_can(client: httpx.Client, house: House, upstream: ScriptedUpstream) -> None:
    """Held for its pages; natively as it came, and by a model that is asked for a chat in its words."""
    pdf = {"type": "input_file", "filename": "toll.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjQK"}
    asked = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Read:"}, pdf]}]}
    answer = client.post(URL, json=ASK | asked)
    natively = sent(upstream)
    elsewhere = client.post(URL, json=ASK | asked | {"model": "claude"})
    as_chat = (upstream.requests[-1].body or {})["messages"][0]["content"][1]

    assert natively["input"][0]["content"][1] == pdf and answer.status_code == elsewhere.status_code == 200
    assert house.record_of(answer)["held_tokens"] > 7_000
    assert (as_chat["type"], as_chat["title"], as_chat["source"]["data"]) == ("document", "toll.pdf", "JVBERi0xLjQK")


@pytest.mark.parametrize("fault", ["cut,after=2", "reset,after=2", "error-frame,after=2", "malformed,after=2"])
def test_a_stream_that_breaks_fails(house: House, client: httpx.Client, upstream: ScriptedUpstream, fault: str) -> None:
    """What came is told, then the failure; the row says interrupted."""
    upstream.script(fault, times=1)
    answer = client.post(URL, json=ASK | {"stream": True})
    *_, failed, error = events_in(answer.text)

    assert (failed["type"], failed["response"]["status"], error["type"]) == ("response.failed", "failed", "error")
    assert house.record_of(answer)["status"] == "interrupted"


def test_an_answer_is_given_again_as_it_was(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Under an Idempotency-Key to the byte; from the cache with an id of its own."""
    upstream.script(Script(text="Ann.", thinking="A name."))
    key = {"idempotency-key": "native-1"}
    once, again = (client.post(URL, json=THINKS | {"input": "Hi", "stream": True}, headers=key) for _ in range(2))
    assert once.text == again.text and len(upstream.requests) == 1
    for stream in (False, True):
        answers = answers_until_a_hit(client, THINKS | {"input": "Hi, you.", "stream": stream})
        told = [events_in(each.text)[-1]["response"] if stream else each.json() for each in answers]
        first, *_, last = [[item | {"id": ""} for item in each["output"]] for each in told]
        assert first == last and last[0]["encrypted_content"] and told[0]["id"] != told[-1]["id"]


def answers_until_a_hit(client: httpx.Client, asked: dict[str, Any]) -> list[httpx.Response]:
    """Return answers to the same request, of which the last comes from the cache: it is kept behind the first."""
    answers: list[httpx.Response] = []

    def is_hit() -> bool:
        answers.append(client.post(URL, json=asked, headers={"x-cache": "all"}))
        return answers[-1].headers["x-cache"] == "hit"

    until(is_hit)
    return answers


def test_a_model_that_seals_nothing_is_not_asked_to(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """It refuses that by name, and is asked without, from then on at once; who wished for it is told."""
    upstream.script("unknown=include", model="gpt-5")
    asked = ASK | {"model": "native-before"}
    answers = [client.post(URL, json=asked | more) for more in ({}, {"include": [SEAL]})]

    assert [answer.headers.get(DROPPED) for answer in answers] == [None, "include"]
    assert [(seen.path, "include" in (seen.body or {})) for seen in upstream.requests] == [
        *((OWN, True), (OWN, False), (OWN, False)),
    ]


def test_an_upstream_without_the_path_is_asked_for_chats(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """A 404 is remembered: the next call goes to its chat at once."""
    upstream.script("404", model="gpt-5", times=1)
    asked = ASK | {"model": "native-before", "reasoning": {"summary": "auto"}}
    answers = [client.post(URL, json=asked) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert [seen.path for seen in upstream.requests] == [OWN, CHAT, CHAT]
    assert {answer.headers[DROPPED] for answer in answers} == {"reasoning.summary"}
