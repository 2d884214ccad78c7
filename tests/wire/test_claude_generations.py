# Every generation of Claude takes other requests: whatever a caller combines, each gets one that it takes, or none.

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.model_facts.claude_models import rules_of
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import (
    ChatRequest,
    Function,
    FunctionCall,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    ThinkingBlock,
    Tool,
    ToolCall,
)
from protocol.messages import (
    AnyChoice,
    AutoChoice,
    MessagesRequest,
    MessageTool,
    OutputConfig,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBetweenTools,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Target
from router.prompt_size.prompt_bounds import bound_prompt
from tests.support.anthropic_rules import GENERATIONS, check_body
from tests.wire.traffic import TARGET, asking

HELLO, WEATHER = Message("user", "Hello"), Tool(Function("weather", None, {"type": "object", "properties": {}}))
ODD = Tool(Function("städte.wetter"))
CALLED = Message("assistant", tool_calls=(ToolCall("functions.weather:0", FunctionCall("städte.wetter", "{}")),))
AFTER_A_CALL = (HELLO, CALLED, Message("tool", "sunny", tool_call_id="functions.weather:0"))
BEGUN = (HELLO, Message("assistant", "The answer is"))
SONNET, HAIKU, OPUS, NEWEST = "claude-sonnet-4-5-20250929", "claude-haiku-4-5", "claude-opus-4-6", "claude-opus-5-5"

WEATHER_TOOLS = (MessageTool("weather", {"type": "object"}),)

models = st.sampled_from(sorted(GENERATIONS))
numbers = {
    "temperature": st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_p": st.none() | st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]),
}
chats = st.builds(
    ChatRequest,
    model=st.just("asked"),
    messages=st.sampled_from([(HELLO,), AFTER_A_CALL, BEGUN]),
    max_completion_tokens=st.none() | st.sampled_from([1, 900, 1280, 2000, 4096]),
    tools=st.sampled_from([(WEATHER,), (WEATHER, ODD)]),
    response_format=st.sampled_from([None, JsonObjectFormat(), JsonSchemaFormat(JsonSchema("a", {"type": "object"}))]),
    tool_choice=st.sampled_from([None, "auto", "none", "required", NamedTool(NamedFunction("weather"))]),
    reasoning_effort=st.none() | st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh"]),
    seed=st.none() | st.just(0),
    presence_penalty=st.none() | st.sampled_from([0.0, 0.5]),
    **numbers,
)
turns = st.sampled_from(
    [
        (Turn("user", "Hello"),),
        (Turn("user", "Hello"), Turn("assistant", "The answer is")),
        (
            Turn("user", "Hello"),
            Turn("assistant", (TextBlock("Well."), TextBlock(" "), ToolUseBlock("a:0", "städte.wetter", {}))),
            Turn("user", (ToolResultBlock("a:0", "sunny"),)),
        ),
    ]
)
natives = st.builds(
    MessagesRequest,
    model=st.just("asked"),
    messages=turns,
    max_tokens=st.sampled_from([1, 1024, 1025, 4096]),
    tools=st.just(WEATHER_TOOLS),
    tool_choice=st.sampled_from([None, AutoChoice(), AnyChoice()]),
    top_k=st.none() | st.just(5),
    thinking=st.none()
    | st.sampled_from([ThinkingAdaptive(), ThinkingDisabled(), ThinkingBetweenTools()])
    | st.builds(ThinkingEnabled, st.sampled_from([1024, 4095, 31_999])),
    output_config=st.none() | st.builds(OutputConfig, st.sampled_from(["low", "high", "xhigh", "max"])),
    **numbers | {"temperature": st.none() | st.sampled_from([0.0, 1.0])},
)


def at(model: str) -> Target:
    return replace(TARGET, model=replace(TARGET.model, upstream_model=model, max_output=4_096))


def built(model: str, request: ChatRequest, native: MessagesRequest | None = None) -> UpstreamRequest:
    return AnthropicFormat().build_request(asking(request, target=at(model), native=native))


def told(model: str, **asked: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what goes out for a chat, and what the caller is told was left out."""
    request = built(model, ChatRequest(model="asked", **{"messages": (HELLO,), **asked}))
    return check_body(request.body), request.dropped


def refusable(model: str) -> set[str]:
    """Return the fields whose meaning the model may lack."""
    forced, prefill = GENERATIONS[model].forced_tools, GENERATIONS[model].prefill
    takes = {"tool_choice": forced, "messages": prefill, "response_format": forced}
    return {name for name, is_taken in takes.items() if not is_taken}


@given(models, chats)
@settings(max_examples=250, deadline=None)
def test_every_chat_is_one_that_the_model_takes(model: str, request: ChatRequest) -> None:
    """Whatever is combined; only a call that must be made, where none can be forced, an object without a schema there,
    and a reply that was begun, where none is gone on with, are refused by their names."""
    try:
        check_body(built(model, request).body)
    except Unsayable as exc:
        assert exc.param in refusable(model)


@given(models, natives)
@settings(max_examples=250, deadline=None)
def test_every_message_is_one_that_the_model_takes(model: str, native: MessagesRequest) -> None:
    """A model of another generation than its caller wrote for is asked in its own way."""
    try:
        check_body(built(model, to_chat(native), native).body)
        counted = AnthropicFormat().build_count(asking(to_chat(native), target=at(model), native=native))
        check_body(counted.body, is_count=True)
    except Unsayable as exc:
        assert exc.param in refusable(model)


@pytest.mark.parametrize(
    ("model", "effort", "thinking", "said"),
    [
        (SONNET, "low", {"type": "enabled", "budget_tokens": 2_048}, None),
        (SONNET, "high", {"type": "enabled", "budget_tokens": 3_276}, None),  # four fifths of what there is
        (SONNET, "none", None, None),
        (HAIKU, "medium", {"type": "enabled", "budget_tokens": 3_276}, None),
        (OPUS, "high", {"type": "adaptive"}, "high"),
        (OPUS, "xhigh", {"type": "adaptive"}, "high"),  # the next below
        (NEWEST, "xhigh", {"type": "adaptive"}, "xhigh"),
        ("claude-sonnet-5", "none", {"type": "disabled"}, None),
        ("claude-sonnet-5-5", "none", {"type": "between_tools"}, None),
    ],
)
def test_an_effort_is_told_in_the_models_own_way(model: str, effort: Any, thinking: Any, said: str | None) -> None:
    """A budget below the output limit up to 4.5, adaptive thinking with an effort from 4.6 on."""
    body, dropped = told(model, reasoning_effort=effort)

    assert (body.get("thinking"), body.get("output_config", {}).get("effort"), dropped) == (thinking, said, ())


@pytest.mark.parametrize(
    ("model", "asked", "left", "dropped"),
    [
        (SONNET, {"temperature": 0.2, "top_p": 0.5}, {"temperature": 0.2}, ("top_p",)),
        (SONNET, {"top_p": 0.5}, {"top_p": 0.5}, ()),
        ("claude-3-5-sonnet-20241022", {"temperature": 0.2, "top_p": 0.5}, {"temperature": 0.2, "top_p": 0.5}, ()),
        (NEWEST, {"temperature": 0.2, "top_p": 0.5}, {}, ("temperature", "top_p")),
        (NEWEST, {"temperature": 1, "top_p": 1}, {}, ()),
        (SONNET, {"temperature": 0.2, "reasoning_effort": "low"}, {}, ("temperature",)),
        (
            SONNET,
            {"seed": 7, "presence_penalty": 0.5, "verbosity": "low"},
            {},
            ("seed", "presence_penalty", "verbosity"),
        ),
        (SONNET, {"reasoning_effort": "high", "max_tokens": 1000}, {}, ("reasoning_effort",)),
        ("claude-3-haiku-20240307", {"reasoning_effort": "high"}, {}, ("reasoning_effort",)),
        (NEWEST, {"reasoning_effort": "none"}, {"output_config": {"effort": "low"}}, ("reasoning_effort",)),
        (
            OPUS,
            {"reasoning_effort": "high", "tools": (WEATHER,), "tool_choice": "required"},
            {"output_config": {"effort": "high"}, "tool_choice": {"type": "any"}},
            ("reasoning_effort",),
        ),
        (SONNET, {"reasoning_effort": "low", "messages": AFTER_A_CALL}, {}, ("reasoning_effort",)),
    ],
    ids=str,
)
def test_what_is_left_out_is_told(model: str, asked: Any, left: Any, dropped: tuple[str, ...]) -> None:
    """Of two that do not go together the one stays that says more of the answer."""
    body, names = told(model, **asked)

    wishes = {"temperature", "top_p", "output_config", "tool_choice"}
    assert ({name: body[name] for name in wishes & body.keys()}, names) == (left, dropped)


def test_a_budget_follows_a_limit_that_was_lowered() -> None:
    """Claude Code asks for 31,999 tokens of thinking among 32,000; a model that gives fewer thinks within those."""
    native = MessagesRequest(
        model="asked", max_tokens=32_000, messages=(Turn("user", "Hi"),), thinking=ThinkingEnabled(31_999)
    )
    lowered = replace(to_chat(native), max_tokens=None, max_completion_tokens=16_384)
    body = check_body(built(SONNET, lowered, native).body)
    tiny = check_body(built(SONNET, replace(lowered, max_completion_tokens=1024), native).body)

    assert (body["max_tokens"], body["thinking"]["budget_tokens"]) == (16_384, 16_383)
    assert "thinking" not in tiny


def test_a_reply_that_was_begun_is_gone_on_with_where_the_model_does() -> None:
    """Another target of the route may, where the first one does not."""
    body, _ = told(SONNET, messages=BEGUN)
    with pytest.raises(Unsayable, match="user's turn") as caught:
        told(OPUS, messages=BEGUN)

    assert body["messages"][-1]["role"] == "assistant"
    assert (caught.value.param, caught.value.moves_on) == ("messages", True)


def test_a_conversation_without_a_word_is_the_upstreams_to_refuse() -> None:
    """Nothing is left of a turn that was empty, or held another maker's thinking alone."""
    for content in ("", (ThinkingBlock("Hm."),)):
        native = MessagesRequest(model="asked", max_tokens=9, messages=(Turn("assistant", content),))

        assert b'"messages":[]' in built(OPUS, to_chat(native), native).body


def test_a_budget_gives_way_to_an_effort_where_thinking_was_not_kept() -> None:
    """With a budget the model would want the thinking before its calls back; 4.6 thinks without."""
    history = (
        Turn("user", "Hello"),
        Turn("assistant", (ToolUseBlock("a", "weather", {}),)),
        Turn("user", (ToolResultBlock("a", "sunny"),)),
    )
    native = MessagesRequest(
        model="asked", max_tokens=4_096, messages=history, thinking=ThinkingEnabled(2_048), tools=WEATHER_TOOLS
    )
    bodies = [check_body(built(model, to_chat(native), native).body) for model in (OPUS, SONNET)]

    assert [body.get("thinking") for body in bodies] == [{"type": "adaptive"}, None]
    assert bodies[0]["output_config"] == {"effort": "low"}


@pytest.mark.parametrize(
    ("tool", "beta"),
    [
        (MessageTool("bash", type="bash_20250124"), None),
        (MessageTool("str_replace_based_edit_tool", type="text_editor_20250728", max_characters=9_000), None),
        (
            MessageTool("computer", type="computer_20250124", display_width_px=1024, display_height_px=768),
            "computer-use-2025-01-24",
        ),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_tools_that_claude_was_trained_on_pass(tool: MessageTool, beta: str | None) -> None:
    """As the caller described them, with the beta that each belongs to."""
    native = MessagesRequest(model="asked", max_tokens=100, messages=(Turn("user", "Hi"),), tools=(tool,))
    request = built(SONNET, to_chat(native), native)
    body = check_body(request.body, request.headers)

    assert body["tools"][0]["type"] == tool.type
    assert request.headers.get("anthropic-beta") == beta


def test_what_such_tools_add_to_a_prompt_is_held() -> None:
    """Their definitions are the upstream's: 245, 700 and 735 tokens, and 466 around them, as its pages say."""
    kinds = {"bash": "bash_20250124", "editor": "text_editor_20250728", "computer": "computer_20250124"}
    plain = MessagesRequest(model="asked", max_tokens=100, messages=(Turn("user", "Hi"),))
    armed = replace(plain, tools=tuple(MessageTool(name, type=kind) for name, kind in kinds.items()))

    with_tools, without = (bound_prompt(to_chat(asked)).closely().tokens_on(TARGET.model) for asked in (armed, plain))
    assert with_tools - without >= 245 + 700 + 735 + 466


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("claude-3-opus-20240229", 4_096),
        ("claude-3-5-haiku-latest", 8_192),
        ("anthropic.claude-opus-4-1-20250805-v1:0", 32_000),
        ("anthropic/claude-sonnet-4.5", 64_000),
        ("claude-opus-4-5@20251101", 64_000),
        ("claude-mythos-preview", 128_000),
        ("claude-sonnet-7", 128_000),
        ("glm-4.6", None),
    ],
)
def test_a_generation_is_read_from_a_name(name: str, most: int | None) -> None:
    """Whichever cloud spells it; a Claude that is not known yet counts as the newest, and other makers' as unknown."""
    assert rules_of(name).max_output == most


def test_a_schema_is_followed_by_models_without_structured_outputs() -> None:
    """As the input of a tool; that is an object, so an answer of another type is refused by name."""
    old, city = "claude-3-5-sonnet-20241022", {"properties": {"city": {"type": "string", "minLength": 1}}}
    body, _ = told(old, response_format=JsonSchemaFormat(JsonSchema("a", city)))
    newer, _ = told(SONNET, response_format=JsonSchemaFormat(JsonSchema("a", {"type": "object", **city})))
    with pytest.raises(Unsayable) as caught:
        told(old, response_format=JsonSchemaFormat(JsonSchema("a", {"type": "array"})))

    assert body["tools"][0]["input_schema"] == {"type": "object", **city} and "output_config" not in body
    assert "tools" not in newer and newer["output_config"]["format"]["type"] == "json_schema"
    assert caught.value.param == "response_format"


def test_a_model_that_cannot_be_made_to_call_a_tool_knows_no_json_without_a_schema() -> None:
    """Another target of the route may; what would do here is said."""
    with pytest.raises(Unsayable, match="json_schema") as caught:
        told(NEWEST, response_format=JsonObjectFormat())

    assert (caught.value.param, caught.value.moves_on) == ("response_format", True)
    assert told(SONNET, response_format=JsonObjectFormat(), reasoning_effort="high")[1] == ("reasoning_effort",)
