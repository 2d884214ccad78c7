# Conversations by voice, through the stock client: what reaches the provider and what comes back, what each response
# costs, and what either side can do wrong. After each test the books agree.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from billing.core.prices import cost_of
from gateway.accounts import client_secrets
from gateway.accounts.schemas import LimitsInput, SafetyInput
from gateway.http.routes.sockets import realtime
from gateway.realtime import relay
from gateway.realtime.gateway import JudgedPace
from protocol.usage import Usage
from tests.support.audits import lasting_differences
from tests.support.house import House, make_team
from tests.support.scripted_realtime import SECOND, SPEECH, VOICE, Answer, ScriptedRealtime
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")

PATH = "/v1/realtime"
RESPONSE = "response.create"
SECRET = "The key is AKIAIOSFODNN7EXAMPLE."

# 100 tokens at $4 a million and 30 at $16; 80 words at $4, 20 cached at $0.4, 60 heard at $32, 40 cached at $0.4, 20
# said at $16 and 100 by voice at $64.
WORDS_COST, VOICE_COST = Decimal("0.00088"), Decimal("0.008984")
ONE_HELD = Decimal(4096 * 32 + 1024 * 64) / 1_000_000


@pytest.fixture(autouse=True)
def _books(house: House, voices: ScriptedRealtime) -> Iterator[None]:
    voices.forget()
    yield
    assert lasting_differences(house.settings.database_url) == []


@pytest.fixture
def talk(openai: OpenAI) -> Iterator[RealtimeConnection]:
    """A conversation of the team."""
    with openai.realtime.connect(model="talker") as talk:
        assert talk.recv().type == "session.created"
        yield talk


def heard(talk: RealtimeConnection, last: str = "response.done") -> list[Any]:
    """Return what comes up to an event of a type."""
    events = [talk.recv()]
    while events[-1].type != last:
        events.append(talk.recv())
    return events


def row_of(house: House, done: Any) -> dict[str, Any]:
    """Return the row of a response by its last event."""
    return house.record_of(httpx.Response(200, headers={"x-request-id": done.model_extra["request_id"]}))


def rows(house: House, key: str | None = None) -> list[dict[str, Any]]:
    """Return the team's last calls by voice, the latest first."""
    with house.client(key) as client:
        found = client.get("/v1/calls", params={"limit": "100"}).json()["data"]
    return [dict(row) for row in found if row["endpoint"] == "realtime" and row["status"] != "refused"]


def cost(told: dict[str, Any]) -> Decimal:
    """Return what something cost, exactly."""
    return Decimal(str(told["cost_usd"]))


@pytest.fixture
def newest(house: House) -> Callable[[], dict[str, Any]]:
    """Return the row that was not there before the test, once it is there."""
    before = {row["request_id"] for row in rows(house)}
    return lambda: until(lambda: [row for row in rows(house) if row["request_id"] not in before])[0]


def closing(talk: Any) -> tuple[int, str]:
    """Return why the gateway closes a connection, whatever comes before."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            talk.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_response_of_words_is_a_call_of_its_own(
    house: House, talk: RealtimeConnection, voices: ScriptedRealtime
) -> None:
    """What the client says reaches the provider as it was understood, under the model's name there; the answer comes as
    the provider sent it, and its end says what it cost, as its row does."""
    talk.session.update(session={"type": "realtime", "model": "talker", "output_modalities": ["text"]})
    heard(talk, "session.updated")
    turn: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "I am Ada."}]}
    talk.conversation.item.create(item=turn)
    talk.response.create(response={"max_output_tokens": 5000})
    events = heard(talk)
    row = row_of(house, events[-1])

    assert voices.asked == [f"{PATH}?model=gpt-realtime"]
    session, item, asked = voices.heard
    assert session["session"] == {"type": "realtime", "model": "gpt-realtime", "output_modalities": ["text"]}
    assert (item["item"], asked["response"]) == (turn, {"max_output_tokens": 1024})
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello, Ada."
    assert (row["status"], row["endpoint"], row["model_used"]) == ("answered", "realtime", "talker")
    assert (row["input_tokens"], row["output_tokens"], cost(row)) == (100, 30, WORDS_COST)
    assert cost(events[-1].model_extra) == WORDS_COST


def test_what_is_heard_and_said_has_prices_of_its_own(
    house: House, talk: RealtimeConnection, voices: ScriptedRealtime
) -> None:
    """By the provider's count of tokens by kind; `explain` shows each kind."""
    voices.script(Answer(words=("Hello.",), sound=(SECOND, SECOND), usage=VOICE))
    talk.input_audio_buffer.append(audio=SECOND)
    talk.input_audio_buffer.commit()
    talk.response.create()
    done = heard(talk)[-1]
    row = row_of(house, done)
    with house.client() as client:
        lines = client.get(f"/v1/calls/{done.model_extra['request_id']}").json()["price"]["lines"]

    assert voices.kinds() == ["input_audio_buffer.append", "input_audio_buffer.commit", RESPONSE]
    assert cost(row) == VOICE_COST
    assert {line["kind"]: line["count"] for line in lines} == {
        "audio_input": 60,
        "cached_audio": 40,
        "input": 80,
        "cached_input": 20,
        "audio_output": 100,
        "output": 20,
    }


def test_each_response_is_booked(house: House, talk: RealtimeConnection, voices: ScriptedRealtime) -> None:
    """One that calls a function, one that stands apart, and one that the provider begins by itself: three calls."""
    voices.script(Answer(call="weather"))
    tool: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    talk.session.update(session={"type": "realtime", "tools": [tool]})
    talk.response.create()
    calls = heard(talk)
    talk.response.create(response={"conversation": "none", "input": []})
    apart = heard(talk)
    talk.input_audio_buffer.append(audio=SPEECH)
    own = heard(talk)
    ends = [events[-1] for events in (calls, apart, own)]

    done = next(event for event in calls if event.type == "response.function_call_arguments.done")
    assert (done.name, json.loads(done.arguments)) == ("weather", {"city": "Bern"})
    assert len({end.model_extra["request_id"] for end in ends}) == 3
    assert [row_of(house, end)["status"] for end in ends] == ["answered"] * 3


def test_a_response_that_is_cancelled_costs_what_was_made(
    house: House, talk: RealtimeConnection, voices: ScriptedRealtime
) -> None:
    """`response.cancel` reaches the provider, which counts what it made until then."""
    voices.script(Answer(end="waits"))
    talk.response.create()
    heard(talk, "response.output_text.delta")
    talk.response.cancel()
    done = heard(talk)[-1]
    row = row_of(house, done)

    assert done.response.status == "cancelled"
    assert (row["status"], cost(row)) == ("interrupted", WORDS_COST)


def test_a_response_that_the_provider_refuses_costs_nothing(
    house: House, talk: RealtimeConnection, voices: ScriptedRealtime
) -> None:
    """Its error goes through, and the conversation goes on."""
    voices.script(Answer(end="refused"))
    talk.response.create(event_id="mine")
    error = heard(talk, "error")[-1]
    talk.response.create()
    last = row_of(house, heard(talk)[-1])
    newest, refused, *_ = rows(house)

    assert (error.error.code, error.error.event_id) == ("conversation_already_has_active_response", "mine")
    assert newest["request_id"] == last["request_id"]
    assert (refused["status"], cost(refused)) == ("failed", 0)


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"type": "session.update", "session": {"type": "realtime", "model": "large"}}, "session.model", None),
    ({"type": "session.update", "session": {"type": "transcription"}}, "session.type", "invalid_value"),
    (
        {"type": "session.update", "session": {"type": "realtime", "tools": [{"type": "mcp", "server_label": "x"}]}},
        *("session.tools[0]", "unsupported_parameter"),
    ),
    (
        {"type": "session.update", "session": {"type": "realtime", "prompt": {"id": "pmpt_1"}}},
        *("session.prompt", "unsupported_parameter"),
    ),
    (
        {
            "type": "session.update",
            "session": {"type": "realtime", "audio": {"input": {"transcription": {"model": "whisper-1"}}}},
        },
        *("session.audio.input.transcription", "unsupported_parameter"),
    ),
    ({"type": RESPONSE, "response": {"model": "gpt-realtime"}}, "response", "invalid_value"),
    ({"type": "response.invent"}, "type", "invalid_value"),
    ({"type": RESPONSE, "response": {"max_output_tokens": 0}}, "response.max_output_tokens", None),
    (
        {
            "type": "conversation.item.create",
            "item": {"type": "message", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]},
        },
        *("item.content", None),
    ),
]


def test_what_could_cost_what_is_not_held_is_refused(talk: RealtimeConnection, voices: ScriptedRealtime) -> None:
    """With an error that names the field and the event; the provider hears nothing of it, and the conversation goes
    on."""
    told = []
    for event, _, _ in REFUSED:
        talk.send({**event, "event_id": "mine"})  # type: ignore[misc]
        told.append(heard(talk, "error")[-1].error)
    talk.response.create()
    heard(talk)

    assert [(error.param, error.event_id) for error in told] == [(param, "mine") for _, param, _ in REFUSED]
    assert all(code is None or error.code == code for error, (_, _, code) in zip(told, REFUSED, strict=True))
    assert voices.kinds() == [RESPONSE]


def refusal(house: House, query: str, key: str | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return how a connection is refused."""
    told = {"authorization": f"Bearer {key or house.team_key}", **headers}
    with pytest.raises(InvalidStatus) as refused:
        connect(house.url.replace("http", "ws") + PATH + query, additional_headers=told, proxy=None, open_timeout=30)
    body = json.loads(refused.value.response.body or b"{}")
    return refused.value.response.status_code, body["error"]


def test_who_may_not_is_refused_as_by_http(house: House, voices: ScriptedRealtime) -> None:
    """Before the connection is one: a model that cannot, with those that can; one that there is not; a key that is none
    or that may not; no model; a team without room, and one that is suspended."""
    with house.client(house.admin_key) as admin:
        team = {"team_id": house.team_id, "allowed_endpoints": ["chat.completions"]}
        bounded = admin.post("/admin/keys", json=team).json()["key"]
        one = {"team_id": house.team_id, "allowed_endpoints": ["realtime"]}
        may = admin.post("/admin/keys", json=one).json()["key"]
        two = {"team_id": house.team_id, "allowed_models": ["ranker", "talker"]}
        few = admin.post("/admin/keys", json=two).json()["key"]
    poor = asyncio.run(make_team(house.settings, "team_poor_voice", LimitsInput(usd_per_day=Decimal("0.001"))))
    cannot = refusal(house, "?model=ranker", few)
    unknown = refusal(house, "?model=nope")
    refused = [refusal(house, "?model=talker", key) for key in (bounded, "tg-none", poor)]
    missing = refusal(house, "")
    batch = refusal(house, "?model=talker", **{"x-tier": "batch"})
    plain = httpx.get(house.url + PATH + "?model=talker", headers={"authorization": f"Bearer {may}"})
    opened = connect(
        house.url.replace("http", "ws") + PATH + "?model=talker",
        subprotocols=[Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{may}")],
        proxy=None,
        open_timeout=30,
    )
    with opened as page:
        first = json.loads(page.recv(timeout=30))

    assert (cannot[0], cannot[1]["code"]) == (400, "unsupported_parameter")
    assert cannot[1]["message"].endswith("it lacks realtime. Models that can: talker.")
    assert (unknown[0], unknown[1]["code"]) == (404, "model_not_found")
    assert [(status, error["code"]) for status, error in refused] == [
        *((403, "endpoint_not_allowed"), (401, "invalid_api_key")),
        (429, "rate_limit_exceeded"),
    ]
    assert (batch[0], batch[1]["param"]) == (400, "x-tier")
    assert (missing[0], missing[1]["param"], plain.status_code) == (400, "model", 426)
    assert (page.subprotocol, first["type"], len(voices.asked)) == ("realtime", "session.created", 1)


def test_a_provider_that_does_not_open_is_told_of(house: House, voices: ScriptedRealtime) -> None:
    """With the status that any call has; nothing is held and nothing booked."""
    before = len(rows(house))
    voices.refuses_with = 500
    broken = refusal(house, "?model=talker")
    voices.refuses_with = 429
    busy = refusal(house, "?model=talker")
    house.reset_breakers()

    assert (broken[0], broken[1]["code"], broken[1]["model"]) == (502, "upstream_error", "talker")
    assert (busy[0], busy[1]["code"]) == (429, "rate_limit_exceeded")
    assert len(rows(house)) == before


def test_a_deployment_of_azure_is_asked_in_its_way(house: House, openai: OpenAI, voices: ScriptedRealtime) -> None:
    """By its name and a version of the API, with the key in a header of its own."""
    with openai.realtime.connect(model="classic-talker") as talk:
        talk.response.create()
        row = row_of(house, heard(talk)[-1])

    assert voices.asked == ["/openai/realtime?api-version=2024-10-21&deployment=my%20realtime"]
    assert (row["status"], row["model_used"]) == ("answered", "classic-talker")


def test_a_team_without_room_for_the_next_response_is_told_and_closed(house: House, voices: ScriptedRealtime) -> None:
    """The first is held and booked; then the rest is too little for another, which the team finds as a refused call."""
    limits = LimitsInput(usd_per_day=ONE_HELD + WORDS_COST / 2)
    key = asyncio.run(make_team(house.settings, "team_one_voice", limits))
    with OpenAI(base_url=house.url + "/v1", api_key=key) as client, client.realtime.connect(model="talker") as talk:
        talk.response.create()
        heard(talk)
        error = heard(talk, "error")[-1].error
        end = closing(talk)
    until(lambda: rows(house, key))

    # until the ledger has what the first cost, it counts as held, and may yet come back
    assert end in ((1008, "insufficient_quota"), (1013, "rate_limit_exceeded")) and error.code == end[1]
    assert [cost(row) for row in rows(house, key)] == [WORDS_COST]
    until(lambda: voices.closed == [1000])
    with house.client(key) as client:
        refused = until(lambda: client.get("/v1/calls", params={"status": "refused"}).json()["data"])
    assert [(row["endpoint"], row["code"], row["model_asked"]) for row in refused] == [
        ("realtime", error.code, "talker")
    ]


@pytest.mark.parametrize(
    ("own", "status", "costs"),
    [
        (Answer(), "answered", WORDS_COST),
        (Answer(words=(), end="waits"), "interrupted", Decimal("0.00052")),  # its prompt: 130 tokens of the one before
    ],
)
def test_what_a_provider_begins_before_it_hears_of_the_end_is_owed(
    house: House, voices: ScriptedRealtime, own: Answer, status: str, costs: Decimal
) -> None:
    """It begins a response with the end of the last one, after which the team has no room for another."""
    voices.script(Answer(follows=True), own)
    limits = LimitsInput(usd_per_day=ONE_HELD + WORDS_COST / 2)
    key = asyncio.run(make_team(house.settings, f"team_{status}_voice", limits))
    with OpenAI(base_url=house.url + "/v1", api_key=key) as client, client.realtime.connect(model="talker") as talk:
        talk.response.create()
        end = closing(talk)
    until(lambda: len(rows(house, key)) > 1)

    assert end == (1008, "insufficient_quota")
    assert [(row["status"], cost(row)) for row in rows(house, key)] == [(status, costs), ("answered", WORDS_COST)]


def test_a_conversation_ends_after_an_hour(openai: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the API has it: with an error that says so, and a regular end."""
    monkeypatch.setattr(relay, "LONGEST", 0.05)
    with openai.realtime.connect(model="talker") as talk:
        error = heard(talk, "error")[-1].error
        end = closing(talk)

    assert (error.code, end) == ("session_expired", (1000, "session_expired"))


def test_a_revoked_key_ends_its_conversation(house: House) -> None:
    """At the next response: it is looked at for each."""
    with house.client(house.admin_key) as admin:
        made = admin.post("/admin/keys", json={"team_id": house.team_id}).json()
        with (
            OpenAI(base_url=house.url + "/v1", api_key=made["key"]) as client,
            client.realtime.connect(model="talker") as talk,
        ):
            heard(talk, "session.created")
            admin.delete(f"/admin/keys/{made['key_id']}").raise_for_status()
            with house.client(made["key"]) as revoked:
                until(lambda: revoked.get("/v1/models").status_code == 401)
            talk.response.create()
            heard(talk)
            error = heard(talk, "error")[-1].error
            end = closing(talk)

    assert (error.code, end) == ("invalid_api_key", (1008, "invalid_api_key"))


def test_a_conversation_that_waits_is_looked_at_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hold does not stand for ever: one whose team was suspended meanwhile ends."""
    monkeypatch.setattr(relay, "HELD_FOR", 0.05)
    key = asyncio.run(make_team(house.settings, "team_idle_voice"))
    with (
        OpenAI(base_url=house.url + "/v1", api_key=key) as client,
        client.realtime.connect(model="talker") as talk,
        house.client(house.admin_key) as admin,
    ):
        heard(talk, "session.created")
        admin.patch("/admin/teams/team_idle_voice", json={"suspended": True}).raise_for_status()
        error = heard(talk, "error")[-1].error
        end = closing(talk)

    assert (error.code, end) == ("team_suspended", (1008, "team_suspended"))


def test_a_reload_reaches_an_open_conversation(
    house: House, talk: RealtimeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response that is held already costs what it was held for; the next has the new price, and where its model is
    served no more there is none."""
    current, changes = realtime.edition_of, list[dict[str, Any]]()

    def changed(request: Any) -> Any:
        edition = current(request)
        models = {name: replace(one, **changes[-1]) if changes else one for name, one in edition.catalog.models.items()}
        return replace(edition, catalog=replace(edition.catalog, models=models))

    monkeypatch.setattr(realtime, "edition_of", changed)
    other = house.settings.models["small"].price  # one that the books know
    costs = []
    for change in ({"price": other}, None, {"capabilities": frozenset()}):
        changes += [] if change is None else [change]
        talk.response.create(response={"output_modalities": ["text"]})
        costs.append(cost(row_of(house, heard(talk)[-1])))
    error = heard(talk, "error")[-1].error
    end = closing(talk)

    then = Decimal(cost_of(Usage(100, output_tokens=30), other)) / 1_000_000_000
    assert costs == [WORDS_COST, then, then] and then != WORDS_COST
    assert (error.code, end) == ("service_unavailable", (1013, "service_unavailable"))


def test_what_is_judged_has_its_time() -> None:
    """No limit counts events, and each is read by the classifiers: what comes too fast waits."""
    pace = JudgedPace()
    burst = [pace.take(100.0, 10) for _ in range(201)]

    assert burst[:-1] == [0.0] * 200 and pace.take(100.0, 10) == pytest.approx(0.1)
    assert pace.take(200.0, 4096 * 1000) == 0.0 and pace.take(200.0, 0) == pytest.approx(80.1)


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_provider_that_breaks_off_is_told_of(
    house: House,
    talk: RealtimeConnection,
    voices: ScriptedRealtime,
    newest: Callable[[], dict[str, Any]],
    is_heard: bool,
) -> None:
    """What was seen of its response is owed, in estimated tokens; where nothing was, nothing is."""
    answer = Answer(end="cut", sound=(SECOND, SECOND)) if is_heard else Answer(end="cut", words=())
    voices.script(answer)
    talk.input_audio_buffer.append(audio=SECOND)
    talk.response.create()
    error = heard(talk, "error")[-1].error
    end = closing(talk)
    row = newest()
    house.reset_breakers()

    assert (error.code, end) == ("upstream_error", (1011, "upstream_error"))
    if is_heard:
        # A second heard at 10 tokens of $32 a million, two said at 20 of $64, and three of words at $16.
        assert (row["status"], cost(row)) == ("interrupted", Decimal("0.002928"))
    else:
        assert (row["status"], cost(row)) == ("failed", 0)


def test_a_provider_that_ends_it_is_heard(talk: RealtimeConnection) -> None:
    """With its own code and reason, where no response runs."""
    talk.conversation.item.delete(item_id="item_1")

    assert closing(talk) == (1000, "It is over.")


def test_a_client_that_leaves_owes_what_was_made(
    openai: OpenAI, voices: ScriptedRealtime, newest: Callable[[], dict[str, Any]]
) -> None:
    """The provider's side is closed, and the row says what was seen."""
    voices.script(Answer(words=("Hello, Ada",), end="waits"))
    with openai.realtime.connect(model="talker") as talk:
        talk.response.create()
        heard(talk, "response.output_text.delta")
    until(lambda: voices.closed == [1000])
    row = newest()

    assert (row["status"], row["output_tokens"], cost(row)) == ("interrupted", 3, Decimal("0.000048"))


def test_a_response_that_does_not_begin_is_owed_once(
    openai: OpenAI, voices: ScriptedRealtime, newest: Callable[[], dict[str, Any]]
) -> None:
    """It cannot be asked for twice by one name; a client that leaves owes its prompt, instructions with it."""
    voices.script(Answer(end="silent"))
    parts = [{"type": "input_text", "text": "I am Ada."}, {"type": "input_audio", "audio": "A" * 64_000}]  # a second
    turn: Any = {"type": "message", "role": "user", "content": parts}
    with openai.realtime.connect(model="talker") as talk:
        told: Any = {"type": "realtime", "instructions": "Be kind.", "audio": {"output": {"voice": "marin"}}}
        talk.session.update(session=told)
        talk.conversation.item.create(item=turn)
        talk.response.create(event_id="mine")
        talk.response.create(event_id="mine")
        error = heard(talk, "error")[-1].error
        until(lambda: RESPONSE in voices.kinds())  # else it hears of none once the client has left
    until(lambda: voices.closed)  # it has heard all
    row = newest()

    assert (error.code, error.param, voices.kinds().count(RESPONSE)) == ("duplicate_event", "event_id", 1)
    assert (row["status"], row["input_tokens"], row["output_tokens"]) == ("interrupted", 15, 0)


def test_a_page_opens_conversations_by_a_client_secret(
    house: House, voices: ScriptedRealtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one model and a time; each begins with the secret's session, is booked to the key that made the secret, and
    goes on when that is over. It opens nothing else, and nothing that its key may not."""
    session: Any = {"type": "realtime", "model": "talker", "instructions": "Be kind.", "output_modalities": ["text"]}
    decode, ends = client_secrets._decoder.decode, int(time.time()) + 3600
    with house.client(house.admin_key) as admin:
        asked = {"team_id": house.team_id, "allowed_endpoints": ["realtime"], "expires_at": ends}
        made = admin.post("/admin/keys", json=asked).json()
        key_id, key = made["key_id"], made["key"]
    mine = OpenAI(base_url=f"{house.url}/v1", api_key=key)
    secret = mine.realtime.client_secrets.create(session=session, expires_after={"seconds": 7200})
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{secret.value}")]

    assert secret.value.startswith("ek_") and key not in secret.value and secret.expires_at == ends
    assert secret.session.model == "talker"  # type: ignore[union-attr]
    with connect(house.url.replace("http", "ws") + PATH, subprotocols=offered, proxy=None) as socket:
        told = [json.loads(socket.recv(timeout=30))["type"] for _ in range(2)]
        expired = SimpleNamespace(decode=lambda sealed: replace(decode(sealed), expires_at=0.0))
        monkeypatch.setattr(client_secrets, "_decoder", expired)
        assert refusal(house, "", secret.value)[0] == 401  # its time is over
        for _ in range(2):  # the second is held after that
            socket.send(json.dumps({"type": RESPONSE}))
            while (event := json.loads(socket.recv(timeout=30)))["type"] != "response.done":
                pass
    monkeypatch.undo()
    row = house.record_of(httpx.Response(200, headers={"x-request-id": event["request_id"]}))
    assert (socket.subprotocol, told) == ("realtime", ["session.created", "session.updated"])
    assert row["key_id"] == key_id and voices.heard[0]["session"] == {**session, "model": "gpt-realtime"}

    with house.client(secret.value) as client:
        tries = [client.get(path) for path in ("/v1/models", "/v1/calls", "/v1/files", "/v1/team")]
        tries += [
            client.post(path, json={}) for path in ("/v1/chat/completions", "/v1/route", f"{PATH}/client_secrets")
        ]
    assert {(each.status_code, each.json()["error"]["message"][:15]) for each in tries} == {(403, "A client secret")}
    assert refusal(house, "?model=small", secret.value)[1]["param"] == "model"
    with house.client(house.admin_key) as admin:
        for change in ({"allowed_models": ["small"]}, {"allowed_addresses": ["10.0.0.0/8"]}):
            admin.patch(f"/admin/keys/{key_id}", json=change).raise_for_status()
            code = "address_not_allowed" if "allowed_addresses" in change else "model_not_allowed"
            until(lambda code=code: refusal(house, "", secret.value)[1]["code"] == code)
        admin.delete(f"/admin/keys/{key_id}").raise_for_status()
    until(lambda: refusal(house, "", secret.value)[0] == 401)


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"session": {"type": "realtime"}}, "session.model", 400),
        ({"session": {"type": "transcription", "model": "talker"}}, "session.type", 400),
        ({"session": {"type": "realtime", "model": "ranker"}}, "model", 400),
        ({"session": {"type": "realtime", "model": "none"}}, "model", 404),
        (
            {"session": {"type": "realtime", "model": "talker"}, "expires_after": {"seconds": 9}},
            "expires_after.seconds",
            400,
        ),
        ({"session": {"type": "realtime", "model": "talker", "tools": [{"type": "mcp"}]}}, "session.tools[0]", 400),
        ({"session": {"type": "realtime", "model": "talker", "instructions": "a" * 9000}}, "session", 400),
    ],
)
def test_a_client_secret_that_could_open_nothing_is_refused(
    house: House, body: dict[str, Any], param: str, status: int
) -> None:
    """With the field that is wrong."""
    with house.client() as client:
        answer = client.post(f"{PATH}/client_secrets", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_an_idle_conversation_leaves_no_row(house: House, openai: OpenAI, voices: ScriptedRealtime) -> None:
    """What was held for a response that was not asked for is let go."""
    before = len(rows(house))
    with openai.realtime.connect(model="talker") as talk:
        heard(talk, "session.created")
    until(lambda: voices.closed)

    assert len(rows(house)) == before


def test_words_are_judged_before_the_provider_hears_them(house: House, voices: ScriptedRealtime) -> None:
    """As a chat's input is, where the team's policy blocks; the conversation goes on. One whose policy takes things out
    of requests is not begun: nothing can be taken out of what is spoken."""
    safe = asyncio.run(make_team(house.settings, "team_safe_voice", safety=SafetyInput(input="block")))
    levels: Any = SafetyInput(input="flag", levels={"contacts": "redact"})
    redacting = asyncio.run(make_team(house.settings, "team_redacting_voice", safety=levels))
    secret: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SECRET}]}
    with OpenAI(base_url=house.url + "/v1", api_key=safe) as client, client.realtime.connect(model="talker") as talk:
        talk.conversation.item.create(item=secret, event_id="mine")
        error = heard(talk, "error")[-1].error
        talk.response.create(response={"instructions": "Be kind."})
        heard(talk)
    status, told = refusal(house, "?model=talker", redacting)

    assert (error.code, error.param, error.event_id) == ("content_policy_violation", "item", "mine")
    assert voices.kinds() == [RESPONSE]
    assert (status, told["code"]) == (400, "unsupported_parameter")


def test_a_policy_that_a_team_is_given_meanwhile_holds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next look at it on."""
    monkeypatch.setattr(relay, "HELD_FOR", 0.05)
    key = asyncio.run(make_team(house.settings, "team_late_voice"))
    secret: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SECRET}]}
    with (
        OpenAI(base_url=house.url + "/v1", api_key=key) as client,
        client.realtime.connect(model="talker") as talk,
        house.client(house.admin_key) as admin,
    ):
        heard(talk, "session.created")
        admin.patch("/admin/teams/team_late_voice", json={"safety": {"input": "block"}}).raise_for_status()

        def judged() -> Any:
            talk.conversation.item.create(item=secret)
            answer = talk.recv()
            return answer.error if answer.type == "error" else None

        error = until(judged)

    assert error.code == "content_policy_violation"
