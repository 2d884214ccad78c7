# What a product team does with the stock anthropic package: /v1/messages in front of models of either dialect.

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

if TYPE_CHECKING:  # seconds, which only the process that runs these tests should spend
    from anthropic import Anthropic

ASK: Any = [{"role": "user", "content": "Say something."}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA: dict[str, Any] = CITY | {"additionalProperties": False}
TOOLS: Any = [{"name": "weather", "input_schema": SCHEMA}, {"name": "clock", "input_schema": {"type": "object"}}]
models = pytest.mark.parametrize("model", ["claude", "small"])


@pytest.fixture
def client(house: House, upstream: ScriptedUpstream) -> Iterator[Anthropic]:
    """The team's client; it does not retry, so that a test sees every answer."""
    from anthropic import Anthropic

    upstream.forget()
    with Anthropic(base_url=house.url, api_key=house.team_key, max_retries=0) as client:
        yield client
    assert upstream.violations == []


@models
def test_a_message_has_text_usage_and_cost(client: Anthropic, upstream: ScriptedUpstream, model: str) -> None:
    """The parts of the prompt stand apart as Anthropic has them; the cost is ours, to the nano-dollar."""
    upstream.script("cached_tokens=5")
    message = client.messages.create(model=model, max_tokens=100, system="Be brief.", messages=ASK)
    usage = message.usage

    assert message.content[0].type == "text" and message.content[0].text
    assert (message.role, message.model, message.stop_reason) == ("assistant", model, "end_turn")
    assert usage.cache_read_input_tokens == 5
    dollars = Decimal(usage.input_tokens + 2 * usage.output_tokens) + 5 * Decimal("0.5")
    assert Decimal(usage.cost_usd) == dollars / 1_000_000  # type: ignore[attr-defined]
    assert message.model_used == model  # type: ignore[attr-defined]
    assert message._request_id and message._request_id.replace("-", "") in message.id


@models
def test_a_stream_says_what_the_plain_message_says(client: Anthropic, model: str) -> None:
    """The package's own accumulator builds the same message from the events."""
    plain = client.messages.create(model=model, max_tokens=100, messages=ASK)
    with client.messages.stream(model=model, max_tokens=100, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert plain.content[0].type == final.content[0].type == "text"
    assert plain.content[0].text == final.content[0].text == text
    assert (plain.stop_reason, plain.usage.output_tokens) == (final.stop_reason, final.usage.output_tokens)
    assert plain.usage.input_tokens == final.usage.input_tokens


@models
@pytest.mark.parametrize("streams", [False, True])
def test_tools_go_round(client: Anthropic, model: str, streams: bool) -> None:
    """Two calls at once, one without arguments; their results go back in one turn, and the model answers."""
    ask: Any = [{"role": "user", "content": "Ask weather and clock."}]
    if streams:
        with client.messages.stream(model=model, max_tokens=200, messages=ask, tools=TOOLS) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(model=model, max_tokens=200, messages=ask, tools=TOOLS)
    calls = [block for block in reply.content if block.type == "tool_use"]
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in calls]
    turn: Any = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
    last = client.messages.create(
        model=model, max_tokens=200, messages=[*ask, turn, {"role": "user", "content": results}], tools=TOOLS
    )

    assert reply.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Zürich 🚪"}), ("clock", {})]
    assert last.stop_reason == "end_turn"


def test_a_request_keeps_its_form_where_the_upstream_speaks_it(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """Cache marks and signed thinking reach Anthropic as they came; another maker's thinking stays behind."""
    mark: Any = {"type": "ephemeral"}
    thought: Any = {"type": "thinking", "thinking": "Hm.", "signature": "EqQB"}
    foreign: Any = {"type": "thinking", "thinking": "Aha.", "signature": ""}
    client.messages.create(
        model="claude",
        max_tokens=100,
        system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
        messages=[
            *ASK,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}]},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": [foreign, {"type": "text", "text": "So."}]},
            {"role": "user", "content": [{"type": "text", "text": "So?", "cache_control": mark}]},
        ],
        cache_control=mark,
        extra_body={"top_k": 5, "output_format": {"type": "json_schema", "schema": SCHEMA}},  # its name in a beta
    )
    sent = upstream.requests[-1].body or {}

    assert sent["output_config"]["format"]["schema"] == SCHEMA
    assert sent["cache_control"] == mark
    assert sent["system"] == [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    assert sent["messages"][1]["content"] == [thought, {"type": "text", "text": "Well."}]
    assert sent["messages"][3]["content"] == [{"type": "text", "text": "So."}]
    assert sent["messages"][4]["content"][0]["cache_control"] == mark
    assert sent["top_k"] == 5


def test_images_tools_and_options_reach_an_openai_upstream(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """What a message asks for is asked in OpenAI's words; errors and images of tools are not lost."""
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image], "is_error": True}
    client.messages.create(
        model="small",
        max_tokens=100,
        system="Be brief.",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look:"}, image]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ],
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    sent = upstream.requests[-1].body or {}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}

    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert sent["messages"][1]["content"] == [{"type": "text", "text": "Look:"}, url]
    assert json.loads(sent["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern"}
    assert sent["messages"][3] == {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: "}
    assert sent["messages"][4]["content"] == [url, {"type": "text", "text": "Well?"}]
    assert (sent["tool_choice"], sent["parallel_tool_calls"], sent["stop"]) == ("required", False, ["END"])
    assert sent["response_format"]["json_schema"]["schema"] == SCHEMA


LONG: Any = [{"role": "user", "content": "word " * 400}]


@pytest.mark.parametrize("model", ["auto", "gemini"])
def test_tokens_that_no_upstream_counts_are_estimated(
    client: Anthropic, upstream: ScriptedUpstream, model: str
) -> None:
    """The count is about right and asks no upstream."""
    counted = client.messages.count_tokens(model=model, messages=LONG)

    assert 300 <= counted.input_tokens <= 900
    assert upstream.requests == []


@pytest.mark.parametrize(("model", "path"), [("claude", "/v1/messages/count_tokens"), ("small", "/tokenize")])
def test_tokens_are_counted_by_their_upstream(
    client: Anthropic, house: House, upstream: ScriptedUpstream, model: str, path: str
) -> None:
    """The count is what the message is charged for; it leaves no row and costs nothing."""
    ask: Any = {
        "model": model,
        "messages": LONG,
        "system": "Be brief.",
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
    }
    raw = client.messages.with_raw_response.count_tokens(**ask)
    message = client.messages.create(max_tokens=10, **ask)
    with house.client(house.admin_key) as admin:
        row = admin.get(f"/admin/usage-records/{raw.headers['x-request-id']}")

    assert raw.parse().input_tokens == message.usage.input_tokens
    assert upstream.requests[0].path == path and len(upstream.requests) == 2
    assert row.status_code == 404


def test_an_engine_that_refuses_one_prompt_counts_the_next(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """One team's odd prompt takes no team's exact counts away, nor does an engine that has too many to count."""
    for script in ("status=400", "full"):
        upstream.script(script, times=1)
        assert 300 <= client.messages.count_tokens(model="small", messages=LONG).input_tokens <= 900
    exact = client.messages.count_tokens(model="small", messages=LONG).input_tokens

    assert exact == client.messages.create(model="small", max_tokens=10, messages=LONG).usage.input_tokens
    assert [request.path for request in upstream.requests[:3]] == ["/tokenize"] * 3


@pytest.mark.parametrize(
    "script", ["500", "429", "529", "refused-key", "not-json", "hang-before-headers", "status=404"]
)
def test_a_count_that_its_upstream_does_not_give_is_estimated(
    client: Anthropic, house: House, upstream: ScriptedUpstream, script: str
) -> None:
    """An estimate at once, and the model is asked as before: counting speaks for nobody's health."""
    upstream.script(script, times=1)
    counted = client.messages.count_tokens(model="claude", messages=LONG)
    with house.client(house.admin_key) as admin:
        [breaker] = [one for one in admin.get("/admin/breakers").json()["breakers"] if one["model"] == "claude"]

    assert 300 <= counted.input_tokens <= 900
    assert (breaker["state"], breaker["keys_set_aside"]) == ("closed", [])
    assert client.messages.create(model="claude", max_tokens=10, messages=ASK).stop_reason


def test_a_prompt_that_its_upstream_refuses_is_refused(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """The upstream's words, not a count of what it would not take."""
    import anthropic

    upstream.script("400", times=1)
    with pytest.raises(anthropic.BadRequestError, match="That is not a value"):
        client.messages.count_tokens(model="claude", messages=LONG)


def test_a_model_that_the_team_may_not_use_is_not_counted(house: House, upstream: ScriptedUpstream) -> None:
    """Nobody reaches an upstream by way of counting whom they may not ask."""
    import anthropic

    upstream.forget()
    with house.client(house.admin_key) as admin:
        team = {"id": "team_small_alone", "allowed_models": ["small"]}
        admin.post("/admin/teams", json=team).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": team["id"]}).raise_for_status().json()["key"]
    with anthropic.Anthropic(base_url=house.url, api_key=key, max_retries=0) as client:
        with pytest.raises(anthropic.PermissionDeniedError):
            client.messages.count_tokens(model="claude", messages=ASK)

    assert upstream.requests == []


@models
def test_errors_are_the_packages_own(client: Anthropic, house: House, upstream: ScriptedUpstream, model: str) -> None:
    """From a missing key to a bad field: Anthropic's shape, class and words, with the request's id."""
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model=model, max_tokens=0, messages=ASK)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nobody", max_tokens=1, messages=ASK)
    with anthropic.Anthropic(base_url=house.url, api_key="tg-wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(model=model, max_tokens=1, messages=ASK)

    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9001 tokens > 8192") as long:
        client.messages.create(model=model, max_tokens=1, messages=[{"role": "user", "content": "word " * 9000}])
    upstream.script("status=400,type=invalid_request_error,code=context_length_exceeded", model="small")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: Scripted\."):
        client.messages.create(model="small", max_tokens=1, messages=ASK)

    for caught, kind in (
        (bad, "invalid_request_error"),
        (long, "invalid_request_error"),
        (unknown, "not_found_error"),
        (refused, "authentication_error"),
    ):
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["request_id"] == caught.value.request_id


@models
def test_a_stream_that_breaks_raises(client: Anthropic, upstream: ScriptedUpstream, model: str) -> None:
    """A cut upstream ends in an error event, never in a message that looks whole."""
    import anthropic

    upstream.script("cut")
    with pytest.raises(anthropic.APIStatusError) as caught:
        with client.messages.stream(model=model, max_tokens=100, messages=ASK) as stream:
            for _ in stream:
                pass

    body: Any = caught.value.body
    assert "cut off" in str(caught.value)
    assert body["request_id"] == caught.value.response.headers["request-id"]
    assert body["error"]["model"] == model and "/" in body["error"]["endpoint"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "system", "content": "no"}]),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]),
        ("messages", []),
        ("messages", [{"role": "user", "content": []}]),
        ("messages", [{"role": "user", "content": ""}]),
        ("cache_control", {"type": "ephemeral", "ttl": "2h"}),
        ("tools", [{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}]),
        ("mcp_servers", [{"url": "https://a"}]),
        ("temperature", 1.5),
        ("stop_sequences", [" "]),
        ("tool_choice", {"type": "any"}),
    ],
    ids=str,
)
def test_what_we_cannot_price_or_carry_is_refused(
    house: House, upstream: ScriptedUpstream, field: str, value: object
) -> None:
    """Server tools, documents without a source and misplaced blocks get a clear 400, and no upstream is asked."""
    upstream.forget()
    with house.client() as client:
        answer = client.post("/v1/messages", json={"model": "claude", "max_tokens": 9, "messages": ASK, field: value})

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and field in error["message"], error
    assert upstream.requests == []


def test_calls_of_one_stream_come_block_by_block(house: House, upstream: ScriptedUpstream) -> None:
    """Blocks open and close one after the other, each delta in its own block, whatever the upstream's order."""
    ask = {"model": "claude", "max_tokens": 200, "stream": True, "tools": TOOLS}
    with house.client() as client:
        answer: httpx.Response = client.post(
            "/v1/messages", json={**ask, "messages": [{"role": "user", "content": "weather and clock"}]}
        )
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

    open_block = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
