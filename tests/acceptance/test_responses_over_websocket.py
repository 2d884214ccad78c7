# The Responses API's WebSocket mode: the stock client and bare messages over one connection that stays open.

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.accounts.schemas import LimitsInput
from gateway.http.websocket import protocol, session
from protocol.sse import encode_event
from tests.support.house import House, make_team
from tests.support.response_stream import built_response
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.talking import Talk, talking
from tests.support.upstream_scripts import Fault, Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

URL = "/v1/responses"


@pytest.fixture
def talk(house: House) -> Iterator[Talk]:
    """A connection of the team."""
    with talking(house.url, house.team_key) as talk:
        yield talk


def said_to(upstream: ScriptedUpstream) -> list[tuple[str, str]]:
    """Return who said what in the conversation that the upstream was asked last."""
    return [(turn["role"], turn["content"]) for turn in (upstream.requests[-1].body or {})["messages"]]


def record_of(house: House, first: dict[str, Any]) -> dict[str, Any]:
    """Return the usage record of the call whose first message this is."""
    answer = httpx.Response(200, headers={"x-request-id": first["headers"]["x-request-id"]})
    return house.record_of(answer)


@pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
def test_the_package_goes_on_from_what_is_not_stored(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """The stock client: the second response knows the first one's turns, which are in no store."""
    upstream.script(Script(text="Hello, Ada."))
    ends = []
    with openai.responses.connect() as connection:
        for asked in ("I am Ada.", "Who am I?"):
            before = ends[-1].id if ends else None
            connection.response.create(model="small", input=asked, store=False, previous_response_id=before)
            for event in connection:
                if event.type == "response.completed":
                    ends.append(event.response)
                    break

    assert [end.output_text for end in ends] == ["Hello, Ada.", "Hello, Ada."]
    assert said_to(upstream) == [("user", "I am Ada."), ("assistant", "Hello, Ada."), ("user", "Who am I?")]
    assert not ends[0].store and ends[1].previous_response_id == ends[0].id  # type: ignore[attr-defined]


def test_the_messages_are_the_events_of_a_stream(house: House, talk: Talk, upstream: ScriptedUpstream) -> None:
    """They build the same response, the first tells the headers of the answer, and the call is booked as any other."""
    upstream.script(Script(text="Grüezi 東京 🚪 there", thinking="Hm."))
    talk.send(input="hi", stream_id="main", store=True, tier="interactive", seeds=3)
    heard = talk.hear_all()
    record = record_of(house, heard[0])
    stream = b"".join(encode_event(json.dumps(each).encode(), each["type"].encode()) for each in heard)
    response = built_response(stream.decode())

    assert {each["stream_id"] for each in heard} == {"main"} and "headers" not in heard[1]
    told = heard[0]["headers"]
    assert (told["x-model-used"], told["x-cache"], told["x-tollgate-dropped"]) == ("small", "off", "seeds")
    assert (record["status"], record["endpoint"], record["output_tokens"]) == (
        *("answered", "responses"),
        response["usage"]["output_tokens"],
    )
    with house.client() as client:
        assert client.get(f"{URL}/{response['id']}").json() == response


def test_responses_take_turns(talk: Talk, upstream: ScriptedUpstream) -> None:
    """What is asked before the end of a response is answered after it, whichever stream it names."""
    upstream.script("tokens=3")
    for stream_id in ("one", "two", "one"):
        talk.send(input="hi", stream_id=stream_id)
    heard = [talk.hear_all() for _ in range(3)]

    assert [[*{each["stream_id"] for each in each_of}] for each_of in heard] == [["one"], ["two"], ["one"]]
    assert [each_of[0]["type"] for each_of in heard] == ["response.created"] * 3


def test_a_warm_up_costs_nothing_and_can_be_gone_on_from(talk: Talk, upstream: ScriptedUpstream) -> None:
    """``generate: false`` reads, checks and routes a request; no upstream hears of it."""
    talk.send(input="I am Ada.", instructions="Be kind.", generate=False)
    created, completed = talk.hear_all()
    warm = completed["response"]
    asked = len(upstream.requests)
    refused = talk.ask(input="hi", model="nope", generate=False)
    talk.ask(input="Who am I?", previous_response_id=warm["id"])

    assert (created["type"], asked, warm["output"], warm["usage"]["cost_usd"]) == ("response.created", 0, [], "0.00")
    assert (refused["status"], refused["error"]["code"]) == (404, "model_not_found")
    assert said_to(upstream) == [("user", "I am Ada."), ("user", "Who am I?")]


def test_what_is_stored_after_what_is_not_is_stored_whole(
    house: House, talk: Talk, upstream: ScriptedUpstream, openai: OpenAI
) -> None:
    """A response is stored with all turns before it, and gone on from over HTTP; one that is not stored is not found
    on another connection."""
    upstream.script(Script(text="Yes."))
    first = talk.ask(input="One?")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    apart = talk.ask(input=[{"role": "user", "content": "Said:"}, reference])
    stored = talk.ask(input="Two?", previous_response_id=apart["id"], store=True)
    with talking(house.url, house.team_key) as other:
        lost = other.ask(input="hi", previous_response_id=apart["id"])
        found = other.ask(input="hi", previous_response_id=stored["id"])
    openai.responses.create(model="small", input="Three?", previous_response_id=stored["id"])

    said = [("user", "Said:"), ("assistant", "Yes."), ("assistant", "Yes."), ("user", "Two?"), ("assistant", "Yes.")]
    assert said_to(upstream) == [*said, ("user", "Three?")]
    assert (lost["status"], lost["error"]["code"]) == (400, "previous_response_not_found")
    assert (stored["store"], found["status"]) == (True, "completed")


def test_what_fails_is_told_and_the_connection_goes_on(talk: Talk, upstream: ScriptedUpstream) -> None:
    """An upstream's failure is a message, and what could not be gone on from is forgotten, as OpenAI does."""
    first = talk.ask(input="hi")
    upstream.script(Script(status=500), times=1)
    failed = talk.ask(input="hi", previous_response_id=first["id"], stream_id="main")
    again = talk.ask(input="hi", previous_response_id=first["id"])
    upstream.script(Script(fault=Fault.RESET, after=2), times=1)
    talk.send(input="hi")
    broken = talk.hear_all()
    last = talk.ask(input="hi")

    assert (failed["status"] >= 500, failed["stream_id"]) == (True, "main") and failed["headers"]["x-request-id"]
    assert again["error"]["code"] == "previous_response_not_found"
    assert [each["type"] for each in broken[-2:]] == ["response.failed", "error"]
    assert last["status"] == "completed"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ("[]", "type", None),
        ('{"type": "response.cancel"}', "type", None),
        ('{"type": "response.create", "stream": false}', "stream", "invalid_value"),
        ('{"type": "response.create", "background": true}', "background", "invalid_value"),
        ('{"type": "response.create", "stream_id": "a b"}', "stream_id", "invalid_stream_id"),
        ('{"type": "response.create", "generate": 1}', "generate", "invalid_value"),
        ('{"type": "response.create", "model": "small", "model": "large", "input": "hi"}', "model", "duplicate_key"),
        ('{"type": "response.create", "model": "small", "input": "hi", "top_p": 3}', "top_p", None),
        (b'{"type": "response.create"}', None, None),
    ],
)
def test_a_wrong_message_is_refused_with_what_would_be_right(
    talk: Talk, message: Any, param: str | None, code: str | None
) -> None:
    """The connection goes on."""
    talk.socket.send(message)
    refused = talk.hear()

    assert (refused["type"], refused["status"]) == ("error", 400)
    assert refused["error"]["param"] == param and code in (None, refused["error"]["code"])
    assert talk.ask(input="hi", generate=False)["status"] == "completed"


def test_streams_have_so_many_names(talk: Talk) -> None:
    """A connection has 32 of them."""
    for number in range(session.MOST_STREAMS):
        talk.ask(input="hi", generate=False, stream_id=f"s{number}")
    refused = talk.ask(input="hi", generate=False, stream_id="more")

    assert refused["error"]["code"] == "websocket_stream_limit_reached"
    assert talk.ask(input="hi", generate=False, stream_id="s0")["status"] == "completed"


def test_an_idempotency_key_is_of_one_response(house: House, talk: Talk, upstream: ScriptedUpstream) -> None:
    """The same key is answered with the same response, which is paid once and can be gone on from."""
    first = talk.ask(input="hi", idempotency_key="talk-1")
    with talking(house.url, house.team_key) as other:
        again = other.ask(input="hi", idempotency_key="talk-1")
        other.ask(input="more", previous_response_id=again["id"])
        reused = other.ask(input="another", idempotency_key="talk-1")

    assert again == first and len(upstream.requests) == 2 and len(said_to(upstream)) == 3
    assert (reused["status"], reused["error"]["code"]) == (409, "idempotency_key_reused")
    with pytest.raises(InvalidStatus) as refused:
        talking(house.url, house.team_key, {"idempotency-key": "all"}).__enter__()
    assert refused.value.response.status_code == 400


def test_a_client_that_leaves_pays_for_what_was_made(house: House, upstream: ScriptedUpstream) -> None:
    """The upstream is let go, and the call is booked as interrupted."""
    upstream.script("tokens=500,pace=0.02")
    with talking(house.url, house.team_key) as talk:
        talk.send(input="hi")
        first = talk.hear()
        until(lambda: talk.hear()["type"] == "response.output_text.delta")
    record = record_of(house, first)

    assert record["status"] == "interrupted" and 0 < record["output_tokens"] < 500


def test_limits_hold_for_each_response(house: House) -> None:
    """A connection is no way around them."""
    key = asyncio.run(make_team(house.settings, "talks_a_lot", LimitsInput(requests_per_minute=2)))
    with talking(house.url, key) as talk:
        told = [talk.ask(input="hi"), talk.ask(input="hi", generate=False), talk.ask(input="hi")]

    assert [each["status"] for each in told] == ["completed", "completed", 429]
    assert told[-1]["error"]["code"] == "rate_limit_exceeded" and int(told[-1]["headers"]["retry-after"]) > 0


def test_who_may_not_come_in_hears_so(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the answer to the handshake, in the shape of all errors; so does what asks for no WebSocket. It is no error
    of the gateway's."""
    monkeypatch.setattr(session, "MOST_OF_KEY", 1)
    told = []
    with talking(house.url, asyncio.run(make_team(house.settings, "talks_once"))) as one:
        for key in ("tg-nothing", house.admin_key, str(one.socket.request.headers["authorization"])[7:]):  # type: ignore[union-attr]
            with pytest.raises(InvalidStatus) as refused:
                talking(house.url, key).__enter__()
            error = json.loads(refused.value.response.body or b"")["error"]
            told.append((refused.value.response.status_code, error["code"], bool(error["request_id"])))
        assert one.ask(input="hi", generate=False)["status"] == "completed"
    with house.client() as client:
        plain = client.get(URL)

    assert told == [
        (401, "invalid_api_key", True),
        (403, "permission_denied", True),
        (429, "rate_limit_exceeded", True),
    ]
    assert (plain.status_code, plain.json()["error"]["code"]) == (426, "upgrade_required")
    assert plain.headers["upgrade"] == "websocket"
    assert not [each for each in caplog.records if each.name == "tollgate.websocket"]


def test_a_connection_ends_when_it_is_too_old(
    house: House, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the end of the response that runs; its client is told by the error that it knows."""
    monkeypatch.setattr(session, "LONGEST", 0.5)
    upstream.script("tokens=40,pace=0.03")
    with talking(house.url, house.team_key) as talk:
        ended, error = talk.ask(input="hi"), talk.hear()
        code = talk.told_at_the_end()

    assert (ended["status"], ended["usage"]["output_tokens"], code) == ("completed", 40, 1000)
    assert (error["status"], error["error"]["code"]) == (400, "websocket_connection_limit_reached")


def test_a_long_message_is_read_as_a_long_body_is(talk: Talk) -> None:
    """Beside the event loop, within its team's room."""
    refused = talk.ask(input="x " * 200_000)

    assert (refused["status"], refused["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("what", "code"), [("bytes", 1009), ("fragments", 1009), ("messages", 1013)])
def test_a_message_takes_so_much(house: House, monkeypatch: pytest.MonkeyPatch, what: str, code: int) -> None:
    """Of bytes, of fragments, and of what a team's messages may take together; beyond it its connection ends."""
    monkeypatch.setattr(protocol, "LARGEST_MESSAGE", 100_000)
    monkeypatch.setattr(protocol, "MOST_FRAGMENTS", 50)
    monkeypatch.setattr(protocol, "room", protocol.SharedRoom(of_a_team=50_000 if what == "messages" else 10**9))
    pieces = ["x"] * 60 if what == "fragments" else ["x" * (60_000 if what == "messages" else 200_000)]
    with talking(house.url, house.team_key) as talk:
        with suppress(ConnectionClosed):
            talk.socket.send(iter(pieces))

        assert talk.told_at_the_end() == code
